"""What `soak.py` does to a daemon: requests that end or are given up, and an operator's whims.

Goes in: a daemon with its folders, and a seed.  Comes out: counts of what was done and of what was
refused, by code.  Every client is a thread with a connection pool of its own; what one of them
hears that it should not is kept for the verdict, and the others go on.
"""

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import checkout  # noqa: F401
from daemon_rig import MODEL_NAME, DaemonRig

from lorad import wire
from lorad.client import ApiError, LoradClient, Unreachable

#: Answers that this traffic may have: an adapter is gone, draining, has no room, came twice.
EXPECTED = {
    "model_not_found",
    "adapter_not_found",
    "draining",
    "adapter_busy",
    "no_room",
    "pinned",
    "conflict",
    "timeout",
    "overloaded",
    "queue_full",
    "rate_limit_exceeded",
    "load_failed",
    "cancelled",
}
#: Contents that a name may have: few, so that the store does not grow for ever.
CONTENTS = 24
PROMPT_WORDS = 24
#: An operator's pause between two whims, seconds.
PAUSE = 0.05


class Traffic:
    """`names` adapters under `clients` threads and one operator, from `start` to `stop`."""

    def __init__(self, daemon: DaemonRig, names: int, clients: int, seed: int) -> None:
        self.daemon = daemon
        self.names = [f"soak-{n:03d}" for n in range(names)]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        work: list[Callable[[random.Random, LoradClient], None]] = [self._ask] * clients
        self._threads = [
            threading.Thread(target=self._loop, args=(random.Random(f"{seed}-{n}"), act, socket))
            for n, (act, socket) in enumerate(
                [*((act, daemon.inference) for act in work), (self._meddle, daemon.admin)]
            )
        ]

    def prepare(self) -> None:
        """Every name gets a content."""
        for number, name in enumerate(self.names):
            self._upload(self.daemon.client, name, number % CONTENTS, replace=False)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Everybody ends what it is at."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _loop(
        self, draw: random.Random, act: Callable[[random.Random, LoradClient], None], socket: Path
    ) -> None:
        with LoradClient(f"unix://{socket}", timeout=60.0) as client:
            while not self._stop.is_set():
                try:
                    act(draw, client)
                except ApiError as error:
                    self._refused(error)
                except Unreachable as error:
                    self.wrong.append(f"unreachable: {error}")
                    self._stop.wait(1.0)

    def _refused(self, error: ApiError) -> None:
        self.counts[f"refused_{error.code}"] += 1
        if error.code not in EXPECTED:
            self.wrong.append(f"{error.status} {error.code}: {error.message}")

    # ------------------------------------------------------------- applications
    def _ask(self, draw: random.Random, client: LoradClient) -> None:
        """A streamed completion on any adapter, or the base; one in four is given up on the way."""
        name = draw.choice([MODEL_NAME, *self.names])
        length, tokens = draw.randint(1, PROMPT_WORDS), draw.randint(1, 48)
        body = {
            "model": name,
            "prompt": [draw.randrange(3, 400) for _ in range(length)],
            "max_tokens": tokens,
            "temperature": draw.choice((0.0, 1.0)),
            "stream": True,
        }
        leave_at = draw.randrange(tokens) if draw.random() < 0.25 else None
        chunks = client.stream("/v1/completions", body)
        for number, _ in enumerate(chunks):
            if leave_at is not None and number >= leave_at:
                chunks.close()  # type: ignore[attr-defined]
                self.counts["aborted"] += 1
                return
        self.counts["served"] += 1

    # ------------------------------------------------------------- the operator
    def _meddle(self, draw: random.Random, client: LoradClient) -> None:
        self._stop.wait(PAUSE)
        name = draw.choice(self.names)
        whims = ("load", "evict", "pin", "unpin", "unpin", "replace", "remove", "priority", "gc")
        [whim] = draw.choices(whims, weights=(6, 8, 2, 2, 2, 3, 1, 1, 0.3))
        self.counts[whim] += 1
        match whim:
            case "load":
                self._judge(client.load(name, tier=draw.choice(("gpu", "ram")), timeout_s=20.0))
            case "evict":
                to, now = draw.choice(("ram", "disk")), draw.random() < 0.3
                self._judge(client.evict(name, to=to, now=now, force=True, timeout_s=20.0))
            case "pin":
                self._judge(client.pin(name, timeout_s=20.0))
            case "unpin":
                self._judge(client.unpin(name, timeout_s=20.0))
            case "replace":
                self._upload(client, name, draw.randrange(CONTENTS), replace=True)
            case "remove":
                client.remove(name)
                self._upload(client, name, draw.randrange(CONTENTS), replace=False)
            case "priority":
                client.patch(name, wire.AdapterPatch(priority=draw.randrange(101)))
            case "gc":
                client.gc()

    def _judge(self, results: wire.Results) -> None:
        for item in results.items:
            if not item.ok:
                self.counts[f"refused_{item.code}"] += 1
                if item.code not in EXPECTED:
                    self.wrong.append(f"{item.name}: {item.code} {item.message}")

    def _upload(self, client: LoradClient, name: str, content: int, *, replace: bool) -> None:
        folder = self.daemon.root / f".upload-{name}"
        self.daemon.write_adapter(folder, content)
        try:
            client.upload(folder, wire.UploadStart(name=name, replace=replace), timeout=60.0)
        finally:
            shutil.rmtree(folder)
