"""The packer: an inspected adapter folder -> `packed-<layout>.bin`, once, at registration.

Goes in: the folder, its manifest and a block layout.  Comes out: a file of exactly num_blocks x
block_bytes, in which every row lies where `layout.place` says, in the arena's dtype; and the
PackedManifest that the engine is told.  One module is in memory at a time.  The file appears under
its name only when it is whole and on disk, its checksums beside it (`checksums.py`).  numpy alone:
no torch, so the process starts quickly.

Where several ranks share the base, the file has a stream for each, one behind the other, and sizes
in the manifest are those of one (`models/shard.py`).

Where a module has a gain (DoRA), the base's weights are read too, module by module; and of an end
that the adapter replaces only rows are packed that differ from the base's.  The file is for these
weights alone then, and its name and layout say so (`layout.stream_id`).

    python -m engine.adapters.pack --folder F --model BASE --block-size 16 --dtype float32 --out DIR

prints the PackedManifest as JSON on stdout, and how much the layout added on stderr.  On failure
stdout has one object {"reason", "message", "hint"}, and the status is 8 (the adapter is at fault),
9 (no room on the disk) or 1 (the files cannot be read or written).
"""

import argparse
import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from engine.adapters import checksums
from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.manifest import AdapterManifest, Limits
from engine.adapters.peft import inspect, revision_digest
from engine.adapters.rows import AdapterRows, BaseRows, Words
from engine.adapters.tokenizer_files import TOKENIZER
from engine.errors import AdapterInvalid, EngineError
from engine.layout import (
    ITEMSIZE,
    BlockLayout,
    PlacedModule,
    Placement,
    RowRun,
    needs_base,
    place,
    stream_id,
)
from engine.messages import PackedManifest, Purpose
from engine.models.base_files import BaseFiles
from engine.models.bases import namer, read_base
from engine.models.shard import Shard, split
from engine.models.spec import ModelSpec

EXIT_FAILED, EXIT_INVALID, EXIT_NO_ROOM = 1, 8, 9
#: Packing must not take the cores from serving.
NICENESS = 10


def pack_folder(
    folder: Path,
    manifest: AdapterManifest,
    layout: BlockLayout,
    out_dir: Path,
    rev: str,
    *,
    base: BaseRows | None = None,
    whole: ModelSpec | None = None,
) -> PackedManifest:
    """Write the packed file of `manifest` into `out_dir`, replacing one that is there.  `base` may
    be left out where no module has a gain; `whole` is the base's spec where the layout is of one
    rank among several, each of which has a stream of its own in the file.  Raises AdapterInvalid,
    or OSError from writing; in either case nothing is left behind."""
    placement = place(manifest.modules, layout)
    stream = stream_id(layout.id, base.id if base is not None else "", manifest.modules)
    final = out_dir / f"packed-{stream}.bin"
    _sweep(final)
    # The process id keeps two packers of the same revision out of each other's file.
    staged = out_dir / f"{final.name}.{os.getpid()}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(staged, flags, 0o640)
    try:
        # Reserved at once, so that a full disk is noticed before any work; reserved bytes are zero.
        stream_bytes = placement.num_blocks * layout.block_bytes
        os.posix_fallocate(out, 0, layout.shards * stream_bytes)
        with AdapterFolder(folder) as opened:
            source = opened.open(manifest.weights_file)
            try:
                if whole is None:
                    rows = AdapterRows(source, layout, base, manifest)
                    _write_stream(out, placement, manifest, rows)
                else:
                    wide = replace(layout, shapes=whole.shapes)
                    rows = AdapterRows(source, wide, base, manifest)
                    shards = [Shard(whole, rank, layout.shards) for rank in range(layout.shards)]
                    _write_shards(out, placement, manifest, rows, shards)
            finally:
                os.close(source)
        os.fsync(out)
        # First: a packed file without its checksums is taken for an unfinished one.
        checksums.write(checksums.path_of(final), checksums.sums_of(out, layout.block_bytes))
        os.rename(staged, final)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    finally:
        os.close(out)
    _sync_folder(out_dir)
    return PackedManifest(
        rev=rev,
        path=str(final.absolute()),
        layout=stream,
        num_blocks=placement.num_blocks,
        true_bytes=placement.true_bytes,
        max_rank=manifest.rank,
        changes_kv=manifest.changes_kv,
        modules=manifest.modules,
        alora_tokens=manifest.alora_tokens,
        num_tokens=manifest.num_tokens,
        tokenizer=_tokenizer(folder, manifest),
    )


def _tokenizer(folder: Path, manifest: AdapterManifest) -> str:
    """Of what only adds tokens to the base's there is no file."""
    there = manifest.own_tokenizer and TOKENIZER in manifest.text_files
    return str(folder.absolute() / TOKENIZER) if there else ""


def _write_stream(
    out: int, placement: Placement, manifest: AdapterManifest, rows: AdapterRows
) -> None:
    for placed, tensors in zip(placement.modules, manifest.tensors, strict=True):
        _write(out, rows.a(placed, tensors), placed.a, rows.layout.block_bytes)
        _write(out, rows.b(placed, tensors), placed.b, rows.layout.block_bytes)


def _write_shards(
    out: int,
    placement: Placement,
    manifest: AdapterManifest,
    rows: AdapterRows,
    shards: Sequence[Shard],
) -> None:
    """Every rank's stream, module by module: what all of them have of it is read once."""
    size = rows.layout.block_bytes
    for placed, tensors in zip(placement.modules, manifest.tensors, strict=True):
        a, b = rows.a(placed, tensors), rows.b(placed, tensors)
        for shard in shards:
            first = shard.rank * placement.num_blocks
            own_a, own_b = cut_pair(a, b, placed, shard)
            _write(out, own_a, placed.a, size, first)
            _write(out, own_b, placed.b, size, first)


def cut_pair(a: Words, b: Words, placed: PlacedModule, shard: Shard) -> tuple[Words, Words]:
    """The A rows and B-wide rows of one rank: see `models/shard.py`.  What ranks add up has its
    bias on the first alone."""
    if outputs := shard.outputs(placed.module):
        b = b[:, slice(*outputs)]
    if inputs := shard.inputs(placed.module):
        a = a[:, slice(*inputs)]
        if placed.bias and shard.rank:
            b = b.copy()
            b[placed.rank] = 0
    return a, b


def _write(fd: int, rows: Words, run: RowRun, block_bytes: int, first: int = 0) -> None:
    """Lay the rows (rank, width) at the places of `run`, behind the `first` blocks of the file;
    bytes between rows are zero."""
    if run.folds > 1:
        rows = np.pad(rows, ((0, 0), (0, run.folds * run.width - rows.shape[1])))
        rows = rows.reshape(run.rows, run.width)
    width_bytes = run.width * rows.itemsize
    for piece in run.pieces:
        buffer = np.zeros((piece.rows, run.stride), np.uint8)
        part = np.ascontiguousarray(rows[piece.first : piece.first + piece.rows])
        buffer[:, :width_bytes] = part.view(np.uint8)
        _write_all(fd, buffer.data.cast("B"), (first + piece.block) * block_bytes + piece.offset)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


def _sweep(final: Path) -> None:
    """Remove what packers left that were killed: their process is gone, their file is not."""
    for path in final.parent.glob(f"{final.name}.*.tmp"):
        if not Path("/proc", path.name.split(".")[-2]).exists():
            path.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def stored_ratio(packed: PackedManifest, layout: BlockLayout) -> float:
    """Stored bytes over true bytes: what whole blocks and row borders cost."""
    return packed.num_blocks * layout.block_bytes / packed.true_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """The packer process; returns its exit status."""
    options = _parse(arguments)
    os.nice(NICENESS)
    try:
        packed, layout = pack_as_told(options)
    except (EngineError, OSError) as error:
        return tell_failure(error)
    stored = packed.num_blocks * layout.block_bytes * layout.shards
    ratio = stored_ratio(packed, layout)
    print(f"stored {stored} bytes, true {packed.true_bytes}, ratio {ratio:.3f}", file=sys.stderr)
    print(msgspec.json.encode(packed).decode())
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return options_of("pack", "Packer.").parse_args(arguments)


def options_of(program: str, description: str) -> argparse.ArgumentParser:
    """What a process that packs is told."""
    parser = argparse.ArgumentParser(
        prog=f"python -m engine.adapters.{program}", description=description
    )
    parser.add_argument("--folder", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--block-size", type=int, required=True, help="tokens a block, 0 = no KV")
    parser.add_argument("--draft-bytes", type=int, default=0, help="a block's, for a draft model")
    parser.add_argument("--dtype", choices=sorted(ITEMSIZE), required=True, help="the arena's")
    parser.add_argument("--out", type=Path, required=True, help="where the packed file goes")
    parser.add_argument("--purpose", choices=get_args(Purpose), help="the engine's")
    parser.add_argument("--max-rank", type=int, default=Limits().max_rank)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the base")
    parser.add_argument("--extra-vocab", type=int, default=0, help="token ids behind the base's")
    return parser


def pack_as_told(options: argparse.Namespace) -> tuple[PackedManifest, BlockLayout]:
    """Pack `options.folder` into `options.out`.  Raises as `pack_for_base` does."""
    return pack_for_base(
        options.folder,
        options.model,
        options.out,
        block_size=options.block_size,
        dtype=options.dtype,
        max_rank=options.max_rank,
        purpose=options.purpose,
        draft_bytes=options.draft_bytes,
        ranks=options.ranks,
        extra_vocab=options.extra_vocab,
    )


def purpose_of(block_size: int) -> Purpose:
    """Of an engine whose blocks hold so many tokens, where nobody says."""
    return "generate" if block_size else "pool"


def pack_for_base(
    folder: Path,
    model: Path,
    out: Path,
    *,
    block_size: int,
    dtype: str,
    max_rank: int,
    purpose: Purpose | None = None,
    draft_bytes: int = 0,
    ranks: int = 1,
    extra_vocab: int = 0,
) -> tuple[PackedManifest, BlockLayout]:
    """Pack a PEFT adapter's `folder` for the base in `model`, into `out`.

    `block_size` in tokens, 0 = the engine pools and has no KV; `dtype` the arena's; `draft_bytes`
    of a block are a draft model's; `purpose` is the engine's, None: as its blocks say; `ranks` how
    many processes share the base, `extra_vocab` how many token ids adapters may bring.  Raises as
    `pack_folder` and `inspect` do.
    """
    spec = read_base(model, purpose or purpose_of(block_size), extra_vocab=extra_vocab)
    # Whoever filed the folder has bounded its size already.
    limits = Limits(max_rank=max_rank, max_bytes=sys.maxsize)
    whole = spec if ranks > 1 and isinstance(spec, ModelSpec) else None
    served = spec if whole is None else split(whole, ranks)
    layout = served.block_layout(block_size=block_size, dtype=dtype, draft_bytes=draft_bytes)
    manifest = inspect(folder, spec, limits, served_dtype=dtype, base=model)
    rev = revision_digest(folder, manifest)
    with contextlib.ExitStack() as stack:
        base = None
        if needs_base(manifest.modules):
            base = BaseRows(stack.enter_context(BaseFiles(model, namer(spec))), spec)
        return pack_folder(folder, manifest, layout, out, rev, base=base, whole=whole), layout


def pack_into(
    folder: Path,
    model: Path,
    store: Path,
    *,
    block_size: int,
    dtype: str,
    max_rank: int,
    purpose: Purpose | None = None,
    draft_bytes: int = 0,
    ranks: int = 1,
    extra_vocab: int = 0,
) -> PackedManifest:
    """The same into a folder of its own below `store`, which is called by the revision and made if
    need be; it is not there before it is whole.  Beside the packed file is a tokenizer of the
    adapter's own."""
    store.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=store, prefix="packing-"))
    try:
        manifest, _ = pack_for_base(
            folder,
            model,
            staged,
            block_size=block_size,
            dtype=dtype,
            max_rank=max_rank,
            purpose=purpose,
            draft_bytes=draft_bytes,
            ranks=ranks,
            extra_vocab=extra_vocab,
        )
        if manifest.tokenizer:  # the folder is somebody's, who may remove it
            shutil.copyfile(manifest.tokenizer, staged / TOKENIZER)
        final = store / manifest.rev
        if final.exists():  # perhaps packed for another layout
            for file in staged.iterdir():
                file.rename(final / file.name)
        else:
            staged.rename(final)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    tokenizer = str(final / TOKENIZER) if manifest.tokenizer else ""
    path = str(final / Path(manifest.path).name)
    return msgspec.structs.replace(manifest, path=path, tokenizer=tokenizer)


def tell_failure(error: EngineError | OSError) -> int:
    """Say it on stdout, as the module's head promises; the exit status."""
    if isinstance(error, EngineError):
        reason = error.reason if isinstance(error, AdapterInvalid) else error.code
        status = EXIT_INVALID if isinstance(error, AdapterInvalid) else EXIT_FAILED
        return _fail(status, reason, error.message, error.hint)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or move the store: `[store] dir`"
        return _fail(EXIT_NO_ROOM, "no_room", f"no room for the packed file: {error}", hint)
    hint = "check the store's folder and its permissions"
    return _fail(EXIT_FAILED, "load_failed", f"packing failed: {error}", hint)


def _fail(status: int, reason: str, message: str, hint: str) -> int:
    print(msgspec.json.encode({"reason": reason, "message": message, "hint": hint}).decode())
    return status


if __name__ == "__main__":
    sys.exit(main())
