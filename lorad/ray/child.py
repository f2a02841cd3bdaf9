"""The daemon of a replica: a process of its own, which never outlives the actor that started it.

Goes in: the text of a lorad.toml, a folder on this node for homes.  Comes out: a daemon with state,
store and sockets of its own.  Its stdin is one end of a pipe: when that closes, for whatever
reason, it ends (`tied.py`).
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from lorad.ray.homes import Home, free

#: What a replica's daemon must not share with another one of its node, or has no use for.
_OVERRIDES = {
    "LORAD_INFERENCE__SOCKET": "",
    "LORAD_ADMIN__SOCKET": "",
    "LORAD_REGISTRY__DIR": "",
    "LORAD_STORE__DIR": "",
    "LORAD_METRICS__TCP": "",
    "LORAD_TCP__ENABLED": "false",
    "LORAD_TCP__ADMIN_BIND": "",
    "LORAD_WATCH__MODE": "off",
}
#: Exit status: another daemon holds the state directory.  Its actor died a moment ago.
LOCK_HELD = 6
#: Of the path of a socket, which has 107 bytes.
MOST_PATH = 107 - len("/inference.sock")
#: Lines of its log that are kept, to say why it did not start.
TAIL = 20
#: After the drain: farewells, the engine's end, the last writes.
CLOSE_SECONDS = 30.0
POLL_SECONDS = 0.05


class Ended(Exception):
    """The daemon ended by itself; says with what, and its last words."""


class Child:
    """One daemon.  Await `start` once; `stop` drains it."""

    def __init__(self, config: str, homes: Path, *, drain_seconds: float = 30.0) -> None:
        self._config, self._homes, self._drain_seconds = config, homes, drain_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._home: Home | None = None
        self._run = Path()
        self._elsewhere: Path | None = None  # that, where it is in no home
        self._tail: deque[str] = deque(maxlen=TAIL)

    @property
    def inference(self) -> Path:
        return self._run / "inference.sock"

    @property
    def admin(self) -> Path:
        return self._run / "admin.sock"

    def check(self) -> None:
        """Raises Ended if it does not run."""
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            words = " | ".join(self._tail) or "it said nothing"
            raise Ended(f"the daemon ended with {status}: {words}")

    async def start(self) -> None:
        """Returns with both sockets there: it may load its base for minutes yet.  Raises Ended."""
        for home in free(self._homes, "home"):
            self._home = home
            self._spawn(home.path)
            if await self._listens():
                return
            self._release()  # of an actor that was killed: its daemon has not ended yet
        raise Ended(f"every home in {self._homes} is taken")

    async def ended(self) -> None:
        """Returns when it runs no more."""
        while self._process is not None and self._process.poll() is None:
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """What runs may end within the drain's time."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            patience = self._drain_seconds + CLOSE_SECONDS
            try:
                await asyncio.to_thread(process.wait, patience)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        self._release()

    # ------------------------------------------------------------- inside
    def _release(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._elsewhere is not None:
            shutil.rmtree(self._elsewhere, ignore_errors=True)
        if self._home is not None:
            self._home.release()
        self._process = self._home = self._elsewhere = None

    def _spawn(self, home: Path) -> None:
        self._run = run_folder(home)
        self._elsewhere = self._run if self._run.parent != home else None
        file = home / "lorad.toml"
        file.write_text(self._config)
        self._tail.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lorad.ray.tied", "--config", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(os.environ, home, self._run),
        )
        assert self._process.stderr is not None
        threading.Thread(target=self._hear, args=(self._process.stderr,), daemon=True).start()

    def _hear(self, log: IO[bytes]) -> None:
        """Its log goes into the actor's, which Ray keeps and rotates."""
        for line in log:
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            print(text, file=sys.stderr, flush=True)

    async def _listens(self) -> bool:
        """False: the home is held by a daemon that has not ended yet."""
        while not (self.inference.exists() and self.admin.exists()):
            assert self._process is not None
            if (status := self._process.poll()) is not None:
                if status == LOCK_HELD:
                    return False
                self.check()
            await asyncio.sleep(POLL_SECONDS)
        return True


def run_folder(home: Path) -> Path:
    """For its sockets: in its home, if their paths are short enough there."""
    run = home / "run"
    if len(os.fsencode(run)) > MOST_PATH:
        return Path(tempfile.mkdtemp(prefix="lorad-"))
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(mode=0o700)
    return run


def environment(env: Mapping[str, str], home: Path, run: Path) -> dict[str, str]:
    """Of the daemon: the node's, Ray's choice of GPUs among it, with folders of its own.  What
    lorad is told by variables on this node still counts, except for what replicas cannot share."""
    places = {
        "STATE_DIRECTORY": str(home / "state"),
        "CACHE_DIRECTORY": str(home / "cache"),
        "CONFIGURATION_DIRECTORY": str(home / "etc"),
        "RUNTIME_DIRECTORY": str(run),
    }
    return {**env, **_OVERRIDES, **places}
