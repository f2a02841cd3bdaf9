"""Members: the daemons behind a gateway, as all else here talks to them.  No transport.

Goes in: one request, as HTTP has it.  Comes out: its answer, whole or as it comes.  Whoever carries
requests (sockets, Ray) implements `Members`; whoever decides what is asked of whom uses it.
"""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lorad import wire
from lorad.routing import affinity

#: ready: it takes requests; away: its daemon answers, and does not; lost: it does not answer.
State = Literal["ready", "away", "lost"]

#: How long a member that is asked about itself may take, in seconds: no picture waits for more.
BRIEF_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.  `face` "admin" is for operators' routes.  Headers have lower case names, and
    none of one connection alone (host, content-length, connection ...)."""

    method: str
    path: str  # as it was asked for, quoted
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    face: Literal["inference", "admin"] = "inference"
    model: str = ""  # name@revision that the body's model means; "": the base, or no model's


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins, and which member gives it."""

    member: str
    status: int
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole one."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One daemon as it was at one moment.  `instance` is another one after each start of it; ""
    while it is not known.  `replica` is what the router looks at; by its name it is a home of
    adapters, and that may be of a place which another daemon had before."""

    name: str
    state: State
    instance: str
    replica: affinity.Replica
    reason: str = ""  # why it is not ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Have a member register, under `name`, the content that the catalog has by that digest.

    What it served under the name before stays askable as `name@revision` for `hold_seconds`.
    `rev`: the revision that this has to come to, "" if nobody knows yet.
    """

    name: str
    content: str
    rev: str = ""
    model: str = ""
    pin: bool = False
    load: bool = False
    priority: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    hold_seconds: float = 0.0
    dry_run: bool = False  # say the revision, or why it is refused, and change nothing

    def covers(self, other: "Order") -> bool:
        """Of two that are about the same revision: does this one bring about all that `other`
        wants?  A setting that an order leaves out it does not want changed."""
        return (
            self.load >= other.load
            and self.pin >= other.pin
            and self.hold_seconds >= other.hold_seconds
            and other.priority in (None, self.priority)
            and (not other.labels or dict(other.labels) == dict(self.labels))
            and other.model in ("", self.model)
        )


class Lost(Exception):
    """A member went away from under a request, or never answered.  `began`: its client may have
    seen something of the answer."""

    def __init__(self, member: str, why: str, *, began: bool = False) -> None:
        super().__init__(f"{member}: {why}")
        self.member, self.why, self.began = member, why, began


class Members(Protocol):
    """Use it from one event loop."""

    def seen(self) -> Sequence[Member]:
        """Every one that is known, in the order of their names, lost ones too."""
        ...

    async def ask(self, member: str, ask: Ask, *, seconds: float | None = BRIEF_SECONDS) -> Answer:
        """One request to one member, lost or not; whole.  Raises Lost, after `seconds` too; None
        waits for as long as it lives."""
        ...

    def stream(
        self, ask: Ask, rev: str | None, *, without: Collection[str] = ()
    ) -> AsyncGenerator[Head | bytes, None]:
        """One request to the member where `rev` belongs (None: the base), none of `without`.

        A Head, then bytes as they come.  Closing it ends the request at the member.  Raises Lost,
        with `began` once there was a Head; and LoradError engine_restarting if none is ready.
        """
        ...

    async def take_in(self, member: str, order: Order) -> wire.Added:
        """Raises Lost; LoradError as the member says it."""
        ...
