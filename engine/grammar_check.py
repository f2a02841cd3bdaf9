"""The grammar process: grammars that strangers wrote, each tried in a child that may be ended.

Goes in: a tokenizer.json, the size of its vocabulary and its end tokens as arguments; then lines of
JSON on stdin, each a grammar.  Comes out: a line of JSON for each, `[code, message]`, both empty
where the grammar can be followed.  llguidance counts its work, but not all of it: a schema of sixty
bytes (multiples of 1000003) keeps it busy for minutes and takes gigabytes, and a thread that is at
it can be neither stopped nor left behind.  A process can: the kernel ends it.  Torch-free.
"""

import contextlib
import gc
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.errors import EngineError
from engine.grammar import Grammars

#: Of processor time: what a busy machine takes beside it is not counted.
SECONDS = 2
#: Beyond what the process has when it begins.
MEMORY_BYTES = 256 << 20
TOO_MUCH = "too_much"  # the code of what was ended


def main(arguments: Sequence[str]) -> None:
    """Serve until stdin ends."""
    path, vocab_size, *ends = arguments
    try:
        grammars = Grammars(Path(path), int(vocab_size), [int(end) for end in ends])
    except EngineError as error:
        for _ in sys.stdin.buffer:
            _say(error.code, error.message)
        return
    gc.collect()
    gc.freeze()  # a child would copy every page that a collection looks at
    for line in iter(sys.stdin.buffer.readline, b""):
        _say(*_tried(grammars, line))


def _tried(grammars: Grammars, line: bytes) -> tuple[str, str]:
    """What the child said, unless it was ended before it was done."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        _try(grammars, line, there)
    os.close(there)
    with open(here, "rb") as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        return TOO_MUCH, ""
    code, message = json.loads(said)
    return code, message


def _try(grammars: Grammars, line: bytes, answer: int) -> NoReturn:
    """In the child, which ends here: by itself, or by one of its limits."""
    try:
        _limit()
        try:
            grammars.check(json.loads(line))
            said = ("", "")
        except EngineError as error:
            said = (error.code, error.message)
        os.write(answer, json.dumps(said).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _limit() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, now + MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # less is allowed already
            resource.setrlimit(what, (most, most))
    # What a library says of its end is of somebody's schema.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _say(code: str, message: str) -> None:
    sys.stdout.write(json.dumps([code, message]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
