"""The revision of an adapter: one hash over everything that decides its answers.

sha256 over the semantic config as sorted-key JSON, then every tensor as (name, dtype, shape) and
its bytes in name order, then the text files by name.  Each part is preceded by a line of JSON that
says how long it is, so two different adapters cannot run together into one stream.  No path, no
base model's name and no field without effect goes in: the same adapter saved twice is one revision.
"""

import hashlib
import json
import os
from pathlib import Path

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.manifest import AdapterManifest, Limits
from engine.adapters.safetensors_header import read_header
from engine.adapters.value_scan import read_exactly

_CHUNK_BYTES = 1 << 20


def revision_digest(folder: Path, manifest: AdapterManifest) -> str:
    """`rev` of an inspected folder, 64 hex digits.  AdapterInvalid if they were cut meanwhile."""
    digest = hashlib.sha256(_line(manifest.semantic))
    with AdapterFolder(folder) as opened:
        fd = opened.open(manifest.weights_file)
        try:
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            limits = Limits(max_bytes=manifest.file_bytes)
            for ref in sorted(read_header(fd, limits), key=lambda ref: ref.name):
                digest.update(_line([ref.name, ref.dtype, list(ref.shape)]))
                for at in range(ref.begin, ref.end, _CHUNK_BYTES):
                    size = min(_CHUNK_BYTES, ref.end - at)
                    digest.update(read_exactly(fd, at, buffer[:size]))
        finally:
            os.close(fd)
        for name in sorted(manifest.text_files):
            data = opened.read(name, Limits().max_text)
            digest.update(_line([name, len(data)]))
            digest.update(data)
    return digest.hexdigest()


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
