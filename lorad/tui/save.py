"""ctrl+s: what is shown, kept as two files: the board as JSON, the screen as SVG."""

import io
import os
from pathlib import Path

import msgspec

from lorad.wire_stream import Board


def save(board: Board, svg: str, folder: Path | None = None) -> Path:
    """Both files, named after the board's time; the JSON's path.  OSError if it cannot.

    They are the owner's alone: names of adapters and clients are in them.  Nothing is overwritten.
    """
    place = folder or Path.cwd()
    digits = "".join(c for c in board.time if c.isdigit())[:14]
    stem = f"lorad-top-{digits[:8]}-{digits[8:]}"
    number, name = 1, stem
    while (place / f"{name}.json").exists() or (place / f"{name}.svg").exists():
        number += 1
        name = f"{stem}-{number}"
    document = msgspec.json.format(msgspec.json.encode(board), indent=2)
    for ending, content in ((".json", document), (".svg", svg.encode())):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        path = place / (name + ending)
        with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            try:
                _write(file, content)
            except OSError:  # half of it is of no use, and takes the room
                path.unlink(missing_ok=True)
                raise
    return place / f"{name}.json"


def _write(file: io.RawIOBase, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]
