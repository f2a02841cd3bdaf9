"""Revision: one revision as the engine keeps it, and the Journal of what happens to revisions.

Goes in: transitions and outcomes.  Comes out: AdapterEvents and Answers, in the order in which
they happened.  The record decides nothing; `adapters/residency.py` does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.adapters.slots import SlotRow
from engine.adapters.states import State, check
from engine.messages import AdapterEvent, Answer, PackedManifest
from engine.recency import Usage


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A Load command that is not answered yet."""

    command_id: int
    tier: Literal["gpu", "ram"]


@dataclass(frozen=True, slots=True)
class Drain:
    """Why a revision takes no new requests.  Past `deadline` its running requests are aborted."""

    cause: str
    deadline: float | None
    room_for: str | None = None  # the starving revision that gets the room


@dataclass(slots=True, eq=False)
class Revision:
    """All that is known of one revision.  Seconds are the injected clock's."""

    manifest: PackedManifest
    priority: int
    pinned: bool
    since: float  # entered `state`
    usage: Usage  # outlives its stays on the GPU: what was used often is known when it is back
    state: State = State.REGISTERED
    row: SlotRow | None = None
    leases: int = 0
    demand: int = 0  # the highest priority among its queued requests
    removing: bool = False
    reading: bool = False
    copying: bool = False
    cut_short: bool = False  # its copy was cancelled: whatever ends, the blocks are not whole
    wanted_since: float | None = None
    blocked_since: float | None = None  # no attempt since then to claim its blocks found room
    hungry_since: float | None = None  # requests are queued since then, and none runs
    drain: Drain | None = None
    loads: list[PendingLoad] = field(default_factory=list)
    evicts: list[int] = field(default_factory=list)
    removes: list[int] = field(default_factory=list)
    evict_to_disk: bool = False
    #: The load to the GPU that is under way: since when, and where from.
    load_began: float | None = None
    load_source: Literal["disk", "ram"] = "ram"
    num_loads: int = 0
    num_evictions: int = 0
    num_thrashes: int = 0
    made_way: float | None = None  # left the GPU for want of room
    left_copy: bool = False  # host memory had it when it left the GPU, and it was not back yet
    loaded_at: float | None = None
    last_used: float | None = None
    error: str = ""
    rev: str = field(init=False)
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.rev, self.num_blocks = self.manifest.rev, self.manifest.num_blocks

    @property
    def identity(self) -> str:
        """Under which its KV is cached."""
        return self.rev if self.manifest.changes_kv else "base"

    @property
    def running(self) -> int:
        """Requests with rows running."""
        return self.row.refs if self.row else 0

    @property
    def resident(self) -> bool:
        """On the GPU, whole."""
        return self.row is not None and self.row.ready

    @property
    def waiting(self) -> int:
        """Requests that are queued."""
        return self.leases - self.running

    @property
    def leaving(self) -> bool:
        """Somebody asked for it to go, and is owed an answer."""
        return bool(self.evicts or self.removes)

    @property
    def goal(self) -> Literal["gpu", "ram"] | None:
        """The tier that somebody waits for it to reach."""
        if self.row is not None:
            return None
        if self.leases:  # nobody runs without a row
            return "gpu"
        if not self.loads:
            return None
        return "gpu" if any(load.tier == "gpu" for load in self.loads) else "ram"

    @property
    def load_cause(self) -> str:
        """Why it is being brought up."""
        if self.loads:
            return "pin" if self.pinned else "load"
        return "request"


class Journal:
    """What residency has to tell: events, and answers to commands."""

    def __init__(self, clock: Callable[[], float], block_bytes: int) -> None:
        self._clock = clock
        self._block_bytes = block_bytes
        self._events: list[AdapterEvent] = []
        self._answers: list[Answer] = []

    def move(
        self,
        revision: Revision,
        after: State,
        cause: str,
        message: str = "",
        *,
        away: float | None = None,
        source: Literal["", "disk", "ram"] = "",
    ) -> None:
        """Take a revision through one transition of `states.TRANSITIONS`.

        `away` and `source`: see the event.
        """
        before, now = revision.state, self._clock()
        began = revision.load_began if source else None
        check(before, after)
        self._events.append(
            AdapterEvent(
                rev=revision.rev,
                before=before,
                after=after,
                cause=cause,
                slot=revision.row.slot if revision.row else None,
                seconds=now - revision.since,
                num_bytes=revision.num_blocks * self._block_bytes,
                message=message,
                away_seconds=away,
                source=source,
                load_seconds=0.0 if began is None else now - began,
            )
        )
        revision.state, revision.since = after, now

    def answer(self, command_id: int, code: str = "", message: str = "") -> None:
        """The one answer to a command."""
        self._answers.append(Answer(command_id=command_id, code=code, message=message))

    def answer_loads(self, revision: Revision, code: str = "", message: str = "") -> None:
        """Every pending Load of `revision` ends."""
        for load in revision.loads:
            self.answer(load.command_id, code, message)
        revision.loads.clear()

    def answer_evicts(self, revision: Revision, code: str = "", message: str = "") -> None:
        """Every pending Evict of `revision` ends."""
        for command_id in revision.evicts:
            self.answer(command_id, code, message)
        revision.evicts.clear()
        revision.evict_to_disk = False

    def answer_removes(self, revision: Revision, code: str = "", message: str = "") -> None:
        """Every pending RemoveRevision of `revision` ends."""
        for command_id in revision.removes:
            self.answer(command_id, code, message)
        revision.removes.clear()

    def take_events(self) -> list[AdapterEvent]:
        """Transitions since the last call."""
        events, self._events = self._events, []
        return events

    def take_answers(self) -> list[Answer]:
        """Answers since the last call."""
        answers, self._answers = self._answers, []
        return answers
