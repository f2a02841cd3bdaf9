"""GrammarChecker: asks the grammar process whether an answer can follow a grammar.

Goes in: a grammar of `engine/grammar.py`.  Comes out: nothing, or why not, in bounded time whatever
the grammar is.  Starts the process when the first grammar comes, and anew where it ended.  Blocks:
it is called on threads, each of which has a process of its own.  Knows no requests.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.client import child_environment
from engine.errors import EngineError, GrammarInvalid, error_of
from engine.grammar_check import SECONDS, TOO_MUCH

#: A machine that is busy with other things gives a process its processor's time in so long.
PATIENCE_SECONDS = 30.0


class TooMuchWork(GrammarInvalid):
    """It would take more time or memory than one grammar may."""


class GrammarChecker:
    """For one tokenizer.json, of which ids below `vocab_size` are drawn.  Its `path` may change for
    that of a copy."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.path = path
        self._sizes = (str(vocab_size), *map(str, eos_token_ids))
        self._lock = threading.Lock()
        self._free: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def check(self, grammar: str) -> None:
        """Raises GrammarInvalid, TooMuchWork; EngineError where the process was lost."""
        process = self._take()
        try:
            code, message = _ask(process, grammar)
        except (OSError, ValueError) as error:
            self._end(process)
            raise EngineError("the process that checks grammars has ended") from error
        self._give_back(process)
        if code == TOO_MUCH:
            raise TooMuchWork(f"it was not compiled within {SECONDS} s; make it simpler")
        if code:
            raise (
                GrammarInvalid(message) if code == GrammarInvalid.code else error_of(code, message)
            )

    def close(self) -> None:
        """End the processes; whoever waits for one is told."""
        with self._lock:
            self._closed = True
            for process in self._all:
                _kill(process)
            while self._free:
                self._forget(self._free.pop())

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._free:
                process = self._free.pop()
                if process.poll() is None:
                    return process
                self._forget(process)
            if self._closed:
                raise EngineError("lorad is stopping")
            process = subprocess.Popen(
                [sys.executable, "-m", "engine.grammar_check", str(self.path), *self._sizes],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment() | {"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # it is ended together with its child
            )
            self._all.add(process)
            return process

    def _give_back(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(process)
                return
        self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            _kill(process)
            self._forget(process)

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._all.discard(process)


def _ask(process: subprocess.Popen[bytes], grammar: str) -> tuple[str, str]:
    """OSError or ValueError where no answer came."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(grammar).encode() + b"\n")
    process.stdin.flush()
    ready = select.poll()  # `select.select` knows no descriptor beyond the 1024th
    ready.register(process.stdout, select.POLLIN)
    if not ready.poll(PATIENCE_SECONDS * 1000):
        raise TimeoutError("no answer")
    code, message = json.loads(process.stdout.readline())
    return code, message


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
