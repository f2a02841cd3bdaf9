"""Folders of adapters packed and verified, each in a process of its own.

Goes in: a folder, and what the engine of its base told of itself.  Comes out: what the packer or
the verifier printed, or its refusal as the error that it is.  Torch-free: files are the child's.
"""

import asyncio
import contextlib
import itertools
import os
import sys
from pathlib import Path

import msgspec

import engine
from engine.errors import AdapterInvalid, EngineError
from engine.layout import BlockLayout
from engine.messages import PackedManifest, Purpose
from engine.models.shard import split
from engine.models.spec import ModelSpec
from engine.verify_messages import Verified

_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: The packer's status for "the folder is refused".
EXIT_INVALID = 8


def packed_layout(
    spec: ModelSpec, *, block_size: int, dtype: str, draft_bytes: int = 0, ranks: int = 1
) -> BlockLayout:
    """The layout of packed adapters; `dtype` is the resolved one of EngineInfo, never `auto`,
    `draft_bytes` its `draft_block_bytes`, and `ranks` its `tensor_parallel`."""
    return split(spec, ranks).block_layout(
        block_size=block_size, dtype=dtype, draft_bytes=draft_bytes
    )


async def pack(
    folder: Path,
    *,
    model: Path,
    block_size: int,
    dtype: str,
    out_dir: Path,
    max_rank: int = 512,
    purpose: Purpose | None = None,
    draft_bytes: int = 0,
    ranks: int = 1,
    extra_vocab: int = 0,
) -> PackedManifest:
    """Pack `folder` for the engine of `model` into `out_dir`, in a process of its own.

    `block_size` and what follows are EngineInfo's; there `draft_bytes` are `draft_block_bytes`, and
    `ranks` are `tensor_parallel`.

    Raises AdapterInvalid with its E_ code when the folder is refused, EngineError when the packer
    itself fails (`no_room`: the disk is full; `load_failed`: files that cannot be read or written).
    Cancelling kills the packer.
    """
    stdout = await _helper(
        ("engine.adapters.pack", "--folder", str(folder), "--model", str(model)),
        ("--block-size", str(block_size), "--dtype", dtype, "--out", str(out_dir)),
        ("--max-rank", str(max_rank), "--draft-bytes", str(draft_bytes), *_purpose(purpose)),
        ("--ranks", str(ranks), "--extra-vocab", str(extra_vocab)),
        what=f"packing {folder}",
    )
    return msgspec.json.decode(stdout, type=PackedManifest)


async def verify(
    folder: Path,
    *,
    model: Path,
    block_size: int,
    dtype: str,
    out_dir: Path,
    probe: Path,
    packed: Path | None = None,
    max_rank: int = 512,
    purpose: Purpose | None = None,
    draft_bytes: int = 0,
    extra_vocab: int = 0,
) -> Verified:
    """Write the probe file of `folder` for the engine of `model`, in a process of its own.

    With `packed`, that file is also held against one that is packed afresh into `out_dir`.  Raises
    as `pack` does.
    """
    stdout = await _helper(
        ("engine.adapters.verify", "--folder", str(folder), "--model", str(model)),
        ("--block-size", str(block_size), "--dtype", dtype, "--out", str(out_dir)),
        ("--max-rank", str(max_rank), "--draft-bytes", str(draft_bytes), *_purpose(purpose)),
        ("--probe", str(probe), "--extra-vocab", str(extra_vocab)),
        () if packed is None else ("--packed", str(packed)),
        what=f"verifying {folder}",
    )
    return msgspec.json.decode(stdout, type=Verified)


def _purpose(purpose: Purpose | None) -> tuple[str, ...]:
    """The engine's; None: as its blocks say."""
    return () if purpose is None else ("--purpose", purpose)


async def _helper(*arguments: tuple[str, ...], what: str) -> bytes:
    """Run a module of ours; what it prints.  Raises what it says of its failure."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *itertools.chain(*arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Norms of a base's weights would have BLAS start a thread on every core, beside the engine.
        env=child_environment() | dict.fromkeys(_BLAS_THREADS, "1"),
    )
    try:
        stdout, stderr = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode == 0:
        return stdout
    try:
        refusal = msgspec.json.decode(stdout, type=_Refusal)
    except msgspec.DecodeError:
        words = stderr.decode(errors="replace").strip().splitlines()
        why = words[-1] if words else f"exit status {process.returncode}"
        raise EngineError(f"{what} failed: {why}") from None
    if process.returncode == EXIT_INVALID:
        raise AdapterInvalid(refusal.reason, refusal.message, hint=refusal.hint)
    error = EngineError(refusal.message, hint=refusal.hint)
    error.code = refusal.reason
    raise error


class _Refusal(msgspec.Struct):
    """What the packer prints when it fails."""

    reason: str
    message: str
    hint: str = ""


def child_environment() -> dict[str, str]:
    """Ours, with the folder of this package first on the path: an uninstalled tree works."""
    root = str(Path(engine.__file__).parent.parent)
    rest = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else root}
