"""Whoever asks the daemon for the dashboard: in threads of its own, never on the screen's.

Goes in: what to call on a client, and what to do with the answer.  Comes out: the answer, handed to
`deliver` for the thread of the screen.  What is asked in a lane waits for what that lane does, and
only the newest waits; what is to be done is done each by itself, whatever else is slow.  Threads
are left to die with the process, so that a daemon that does not answer keeps nobody from quitting.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lorad import wire, wire_explain
from lorad.caller import ApiError, Unreachable
from lorad.wire_operate import DrainAsk, Drained, Reloaded, RequestCancelled, RunningConfig

T = TypeVar("T")


class Client(Protocol):
    """What of a LoradClient the dashboard needs."""

    def adapters(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        q: str | None = None,
        sort: str = "name",
        limit: int = 100,
        cursor: str | None = None,
    ) -> wire.AdapterPage: ...
    def adapter(self, name: str) -> wire.AdapterDetail: ...
    def explain(self, name: str) -> wire_explain.Explained: ...
    def config(self) -> RunningConfig: ...
    def load(self, *names: str, **options: Any) -> wire.Results: ...
    def evict(self, *names: str, **options: Any) -> wire.Results: ...
    def pin(self, *names: str, **options: Any) -> wire.Results: ...
    def unpin(self, *names: str, **options: Any) -> wire.Results: ...
    def patch(self, name: str, patch: wire.AdapterPatch) -> wire.AdapterDetail: ...
    def drain(self, ask: DrainAsk) -> Drained: ...
    def resume(self, name: str | None = None) -> Drained: ...
    def cancel_request(self, id: str) -> RequestCancelled: ...
    def reload(self) -> Reloaded: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What came of it: `value`, or `error` in one line with `hint`, the next command to try."""

    value: T | None = None
    error: str = ""
    hint: str = ""
    code: str = ""


class Failed(Exception):
    """It was refused in an answer that is none of HTTP's: why, in one line, and what to try."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


Call = Callable[[Client], T]
Then = Callable[[Answer[T]], None]
#: Runs something on the thread of the screen, soon.
Deliver = Callable[[Callable[[], None]], object]


class Office:
    """`connect` makes a client; each thread has its own.  `open` before the first question."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._deliver: Deliver = _nowhere
        self._lanes: dict[str, _Lane] = {}

    def open(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def close(self) -> None:
        """Answers that are still to come go nowhere."""
        self._deliver = _nowhere

    def ask(self, lane: str, call: Call[T], then: Then[T]) -> None:
        """Soon; unless something newer is asked in the same lane meanwhile."""
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(lane, self._connect)
        self._lanes[lane].put(lambda client: self._answer(client, call, then))

    def do(self, call: Call[T], then: Then[T]) -> None:
        """Now, in a thread of its own."""

        def run() -> None:
            client = self._connect()
            try:
                self._answer(client, call, then)
            finally:
                client.close()

        threading.Thread(target=run, name="lorad-top-act", daemon=True).start()

    def _answer(self, client: Client, call: Call[T], then: Then[T]) -> None:
        answer = answered(client, call)
        self._deliver(lambda: then(answer))


class _Lane:
    """One thread, and at most one question that waits for it."""

    def __init__(self, name: str, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._next: Callable[[Client], None] | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=f"lorad-top-{name}", daemon=True).start()

    def put(self, job: Callable[[Client], None]) -> None:
        with self._changed:
            self._next = job
            self._changed.notify()

    def _run(self) -> None:
        client = self._connect()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                job, self._next = self._next, None
            if job is not None:
                job(client)


def answered(client: Client, call: Call[T]) -> Answer[T]:
    """The call's value, or why there is none."""
    try:
        return Answer(call(client))
    except ApiError as error:
        return Answer(error=f"{error.code}: {error.message}", hint=error.hint, code=error.code)
    except Failed as error:
        return Answer(error=str(error), hint=error.hint, code="failed")
    except Unreachable as error:
        return Answer(error=str(error), code="unreachable")
    except Exception as error:  # the border of this thread: the screen has to say why
        return Answer(error=f"{type(error).__name__}: {error}", code="failed")


def _nowhere(run: Callable[[], None]) -> None:
    """Nobody is there any more."""
