"""The verifier: an adapter's own files -> what it must do, for the engine to be held against.

Goes in: a stored folder, the base, a layout's numbers.  Comes out: a probe file (`probe.py`), with
every module's effect computed in float32 straight from lora_A, lora_B and the configuration, none
of it by way of a packed file; the digest of the folder as it is now; and, if asked, how the packed
file differs from one that is packed afresh.  A gain (DoRA) is the packer's own arithmetic done
again.  numpy alone; one process for each verification, of low priority.

    python -m engine.adapters.verify --folder F --model BASE --block-size 16 --dtype float32 \
        --out DIR --probe FILE [--packed FILE]

prints a `Verified` as JSON on stdout; failures are told as `pack.py` tells them.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.manifest import FLOAT_DTYPES, AdapterManifest, Limits, PairTensors, TensorRef
from engine.adapters.pack import NICENESS, options_of, pack_as_told, purpose_of, tell_failure
from engine.adapters.peft import inspect, revision_digest
from engine.adapters.placed import Owners
from engine.adapters.probe import ROWS, Floats, ProbeItem, ProbeModule, ProbeWriter
from engine.adapters.value_scan import read_exactly
from engine.errors import EngineError
from engine.layout import GROUPS, MODULE_ID, BlockLayout, PlacedModule, RowRun, place
from engine.models.bases import read_base
from engine.verify_messages import MAX_FINDINGS, Finding, Verified

SEED = 20


def write_probe(
    folder: Path,
    manifest: AdapterManifest,
    layout: BlockLayout,
    probe: Path,
    rev: str,
    packed: Path | None = None,
) -> None:
    """Write what `manifest`'s modules do to random rows.  `packed`: a fresh packed file, for gains.

    Raises AdapterInvalid, OSError.
    """
    writer, source = ProbeWriter(), _Source(folder, manifest.weights_file, layout, packed)
    with source:
        placed = {(m.layer, m.module): m for m in place(manifest.modules, layout).modules}
        tensors = {
            (m.layer, m.module): t for m, t in zip(manifest.modules, manifest.tensors, strict=True)
        }
        items = tuple(_items(writer, source, placed, tensors))
    with open(probe, "xb") as file:
        writer.write(file, rev, layout.dtype, items)


def _items(
    writer: ProbeWriter,
    source: "_Source",
    placed: dict[tuple[int, str], PlacedModule],
    tensors: dict[tuple[int, str], PairTensors],
) -> Iterator[ProbeItem]:
    """Every (layer, group), those without a module too: nothing must happen there."""
    layout, random = source.layout, np.random.default_rng(SEED)
    for group, names in GROUPS.items():
        dims = [layout.shapes.dims[MODULE_ID[name]] for name in names]
        x = exact(random.standard_normal((ROWS, dims[0][0]), np.float32), layout.dtype)
        at, still = writer.add(x), writer.add(np.zeros((ROWS, sum(d for _, d in dims)), np.float32))
        for layer in range(layout.shapes.num_layers):
            modules, start, moved = [], [], False
            for name, (_, width) in zip(names, dims, strict=True):
                y = np.zeros((ROWS, width), np.float32)
                if (layer, name) in placed:
                    module = placed[layer, name]
                    delta = source.delta(module, tensors[layer, name], x)
                    if module.gain:  # it acts on y too: one as large as the delta
                        y = random.standard_normal((ROWS, width), np.float32)
                        y = exact(y * np.float32(np.abs(delta).max()), layout.dtype)
                        delta, moved = source.gain(module) * (y + delta), True
                    modules.append(ProbeModule(name, width, writer.add(delta)))
                start.append(y)
            y_at = writer.add(np.concatenate(start, axis=1)) if moved else still
            yield ProbeItem(layer, group, at, dims[0][0], tuple(modules), y_at)


class _Source:
    """Reads the adapter's own tensors as float32."""

    def __init__(
        self, folder: Path, weights_file: str, layout: BlockLayout, packed: Path | None
    ) -> None:
        self.layout = layout
        self._file = weights_file
        self._folder = AdapterFolder(folder)
        self._packed = -1 if packed is None else os.open(packed, os.O_RDONLY | os.O_CLOEXEC)
        self._weights = -1

    def __enter__(self) -> None:
        self._folder.__enter__()
        self._weights = self._folder.open(self._file)

    def __exit__(self, *error: Any) -> None:
        os.close(self._weights)
        self._folder.__exit__(*error)
        if self._packed >= 0:
            os.close(self._packed)

    def delta(self, module: PlacedModule, tensors: PairTensors, x: Floats) -> Floats:
        """(ROWS, d_out): scaling * (B A x + bias)."""
        assert tensors.b is not None, "rows that replace others are in no layer"
        y = (x @ self._floats(tensors.a).T @ self._floats(tensors.b).T).astype(np.float32)
        if tensors.bias is not None:
            y = y + self._floats(tensors.bias)
        return y * np.float32(module.scaling)

    def gain(self, module: PlacedModule) -> Floats:
        """(d_out,), as the packer computes it."""
        high, low = (self._packed_row(module.b, module.b.rows - i) for i in (2, 1))
        return high + low

    def _floats(self, ref: TensorRef) -> Floats:
        raw = read_exactly(self._weights, ref.begin, memoryview(bytearray(ref.end - ref.begin)))
        values = floats(raw, FLOAT_DTYPES[ref.dtype])
        if ref.transposed:
            return values.reshape(ref.shape[1], -1).T[ref.first : ref.first + ref.shape[0]]
        return values.reshape(ref.shape)

    def _packed_row(self, run: RowRun, row: int) -> Floats:
        piece = next(p for p in run.pieces if p.first <= row < p.first + p.rows)
        at = piece.block * self.layout.block_bytes + piece.offset
        at += (row - piece.first) * run.stride
        size = run.width * self.layout.itemsize
        raw = read_exactly(self._packed, at, memoryview(bytearray(size)))
        return floats(raw, self.layout.dtype)


def floats(raw: memoryview, dtype: str) -> Floats:
    """Bytes of little-endian numbers as float32, exactly."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(raw, {"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float32)


def exact(values: Floats, dtype: str) -> Floats:
    """Values near these that `dtype` holds exactly."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) & np.uint32(0xFFFF_0000)).view(np.float32)
    return values


def compare_packed(
    fresh: Path, packed: Path, manifest: AdapterManifest, layout: BlockLayout, rev: str
) -> Verified:
    """Hold a packed file against a fresh one, byte by byte."""
    owners, findings, different = Owners(place(manifest.modules, layout)), [], 0
    size = fresh.stat().st_size
    if packed.stat().st_size != size:
        message = f"{packed.name} has {packed.stat().st_size} bytes, its source makes {size}"
        return Verified(rev=rev, findings=(Finding(what="packed", message=message),))
    with open(fresh, "rb") as ours, open(packed, "rb") as theirs:
        for block in range(size // layout.block_bytes):
            pair = [np.frombuffer(f.read(layout.block_bytes), np.uint8) for f in (ours, theirs)]
            for stretch, count in owners.differing(block, pair[0], pair[1]):
                different += count
                message = f"{count} bytes of {stretch.factor} differ from what its source makes"
                findings.append(
                    Finding(
                        what="packed", layer=stretch.layer, module=stretch.module, message=message
                    )
                )
    return Verified(
        rev=rev,
        bytes_checked=size,
        bytes_different=different,
        findings=tuple(findings[:MAX_FINDINGS]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The verifier process; returns its exit status."""
    parser = options_of("verify", "Verifier.")
    parser.add_argument("--probe", type=Path, required=True, help="the file to write")
    parser.add_argument("--packed", type=Path, help="a packed file to hold against a fresh one")
    options = parser.parse_args(arguments)
    os.nice(NICENESS)
    try:
        verified = _verify(options)
    except (EngineError, OSError) as error:
        return tell_failure(error)
    print(msgspec.json.encode(verified).decode())
    return 0


def _verify(options: argparse.Namespace) -> Verified:
    purpose = options.purpose or purpose_of(options.block_size)
    spec = read_base(options.model, purpose, extra_vocab=options.extra_vocab)
    limits = Limits(max_rank=options.max_rank, max_bytes=sys.maxsize)
    layout = spec.block_layout(
        block_size=options.block_size, dtype=options.dtype, draft_bytes=options.draft_bytes
    )
    manifest = inspect(options.folder, spec, limits, served_dtype=options.dtype, base=options.model)
    rev = revision_digest(options.folder, manifest)
    fresh = None
    if options.packed is not None or any(m.gain for m in manifest.modules):
        fresh = Path(pack_as_told(options)[0].path)
    write_probe(options.folder, manifest, layout, options.probe, rev, fresh)
    verified = Verified(rev=rev)
    if fresh is not None and options.packed is not None:
        verified = compare_packed(fresh, options.packed, manifest, layout, rev)
    return msgspec.structs.replace(
        verified, num_tokens=manifest.num_tokens, own_tokenizer=manifest.own_tokenizer
    )


if __name__ == "__main__":
    sys.exit(main())
