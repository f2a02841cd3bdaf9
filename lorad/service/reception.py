"""Reception: what every request takes before it runs, and gives back when it has ended.

Goes in: a model's name, who asks, and how much is wanted.  Comes out: a `Guest`, which holds the
request's place at the door, the lease that fixes its revision, and its tenant's spending; or a
LoradError, and then nothing is held.  Knows neither text nor what the engine does with it.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from lorad.errors import LoradError
from lorad.service.door import Door, Place
from lorad.service.gate import STOPPING, Gate
from lorad.service.rates import Rates, Spending
from lorad.service.seams import Adapters, AsNamed, Finder, Limits, Resolved
from lorad.service.tenants import ANYBODY, Account, Caller, Forbidden, unknown
from lorad.spelling import is_reference


class Guest:
    """One request that was let in.  `name` and `rev` None: the base model, `model`.

    `fail`, once somebody has set it, ends the request with an error; `leave` gives everything back,
    once however often it is called.
    """

    def __init__(
        self,
        resolved: Resolved,
        account: Account,
        place: Place,
        spending: Spending | None,
        gone: Callable[["Guest"], None],
    ) -> None:
        self.name, self.rev, self.model = resolved.name, resolved.rev, resolved.model
        self.account = account
        self.place, self.spending = place, spending
        self.fail: Callable[[LoradError], None] | None = None
        self._gone: Callable[[Guest], None] | None = gone

    def leave(self) -> None:
        """The request is over."""
        gone, self._gone = self._gone, None
        if gone is not None:
            gone(self)


class Reception:
    """`doors` hold back, `rates` counts by tenant, `gate` turns away; those inside are counted by
    name.  Event loop only."""

    def __init__(
        self,
        adapters: Adapters,
        *,
        limits: Limits,
        finder: Finder | None = None,
        gate: Gate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rates = Rates(clock)
        #: By model: sequences that its engine has not answered yet.
        self.doors: dict[str, Door] = {}
        self.limits = limits
        self._adapters, self._clock = adapters, clock
        self._finder: Finder = finder or AsNamed()
        self._gate = gate or Gate()
        self._guests: dict[Guest, None] = {}  # the oldest first
        self._of: Counter[str | None] = Counter()  # guests by name
        self._finding = 0
        self._fewer = asyncio.Event()  # set, and replaced, when one has left

    def limit(self, limits: Limits) -> None:
        """For requests that come from now on."""
        self.limits = limits
        for door in self.doors.values():
            door.limit(limits)

    # ----------------------------------------------------------------- in
    def check_open(self) -> None:
        """Raise draining while nothing is let in."""
        self._gate.check_open()

    def named(self, model: str) -> str:
        """The adapter's own name, where `model` is a reference to one that is here."""
        return self._finder.known(model)

    def resolve(self, model: str, caller: Caller = ANYBODY) -> Resolved:
        """What `model` means now; raises what `find` would, which may pull it first."""
        return self._resolved(self.named(_allowed(model, caller)), caller)

    async def find(
        self, model: str, caller: Caller = ANYBODY, deadline: float | None = None
    ) -> Resolved:
        """What `model` means, by `deadline` on the clock if it has to be pulled.  Raises
        model_not_found, and draining for one that is held."""
        return self._resolved(await self._find(_allowed(model, caller), deadline), caller)

    def admit(
        self,
        resolved: Resolved,
        account: Account,
        count: int,
        *,
        deadline: float,
        starts_per_second: float = 0.0,
    ) -> Guest:
        """Let `count` sequences in.  Raises queue_full, tenant_rate_limited."""
        self.rates.check(account.tenant)
        with contextlib.ExitStack() as undo:
            place = self._door(resolved.model).enter(
                (account.tenant.name, resolved.rev, account.priority),
                count,
                seconds=deadline - self._clock(),
                starts_per_second=starts_per_second,
                most=account.tenant.queue,
            )
            undo.callback(place.close)
            if resolved.rev is not None:
                self._adapters.lease(resolved.rev)
            undo.pop_all()
        spending = self.rates.begin(account.tenant)
        guest = Guest(resolved, account, place, spending, self._leave)
        self._of[guest.name] += 1
        self._guests[guest] = None
        return guest

    @contextlib.contextmanager
    def leased(self, rev: str | None) -> Iterator[None]:
        """The revision's files stay meanwhile."""
        if rev is not None:
            self._adapters.lease(rev)
        try:
            yield
        finally:
            if rev is not None:
                self._adapters.release(rev)

    # ----------------------------------------------------------------- who is inside
    @property
    def active(self) -> int:
        """Requests that were accepted and have not ended, those that wait for a pull included."""
        return len(self._guests) + self._finding

    def running(self, name: str | None = None) -> int:
        """Guests of that adapter; None: `active`."""
        return self.active if name is None else self._of[name]

    async def wait_until_idle(self, seconds: float, name: str | None = None) -> bool:
        """True once none is left, False after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.running(name):
                    await self._fewer.wait()
        return not self.running(name)

    def cancel(self, code: str, message: str, name: str | None = None) -> int:
        """End all, or those of one adapter, with an error that their clients get to see; how
        many."""
        chosen = [g for g in self._guests if g.fail is not None and name in (None, g.name)]
        for guest in chosen:
            assert guest.fail is not None
            guest.fail(LoradError(code, message))
        return len(chosen)

    def drain(self) -> None:
        """From now on new requests answer 503 `draining`; running ones go on."""
        self._gate.closed = STOPPING

    @property
    def waiting(self) -> int:
        """Sequences that have had no answer yet."""
        return sum(door.waiting for door in self.doors.values())

    # ----------------------------------------------------------------- inside
    def _resolved(self, name: str, caller: Caller) -> Resolved:
        """By the revision that the caller's gateway has for it; a name that has one is left alone,
        and what is unknown is so by the name that was asked for."""
        if not caller.rev or "@" in name:
            return self._adapters.resolve(name)
        try:
            return self._adapters.resolve(f"{name}@{caller.rev}")
        except LoradError as error:
            if error.code != "model_not_found":
                raise
            raise unknown(name) from None

    def _door(self, model: str) -> Door:
        """Models wait for engines of their own: one that is swamped keeps nobody from another."""
        if (door := self.doors.get(model)) is None:
            door = self.doors[model] = Door(self.limits, self._clock)
        return door

    async def _find(self, model: str, deadline: float | None) -> str:
        """The name behind a model.  Who waits for a pull counts as active, but stands in no queue:
        nobody who could run is kept out."""
        if not is_reference(model):
            return model
        seconds = self.limits.deadline if deadline is None else deadline - self._clock()
        self._finding += 1
        try:
            return await self._finder.find(model, seconds)
        finally:
            self._finding -= 1
            self._note_fewer()

    def _leave(self, guest: Guest) -> None:
        if guest.spending is not None:
            guest.spending.end()
        del self._guests[guest]
        self._of[guest.name] -= 1
        if not self._of[guest.name]:
            del self._of[guest.name]
        if guest.rev is not None:
            self._adapters.release(guest.rev)
        guest.place.close()
        self._note_fewer()

    def _note_fewer(self) -> None:
        fewer, self._fewer = self._fewer, asyncio.Event()
        fewer.set()


def _allowed(model: str, caller: Caller) -> str:
    """`model`, unless it is not for this caller: then it is as unknown as any other name, and takes
    as long to be, whether it exists or not."""
    if not caller.may(model):
        raise Forbidden(model, caller.who)
    return model
