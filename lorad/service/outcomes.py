"""Outcomes: one wish for several names, and what became of each.

Goes in: names, and what is to be done for one of them.  Comes out: a result a name, in their order.
One that fails keeps no other back; work goes on when the caller leaves or runs out of time, and is
an operation from then on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engine.adapters.states import State
from lorad import wire
from lorad.errors import LoradError
from lorad.service.lineup import Lineup
from lorad.service.names import Names
from lorad.service.tasks import Tasks

#: (verb, name, what of it runs on) -> the id of an operation that tells what became of it.
OnLeft = Callable[[str, str, "asyncio.Task[LoradError | None]"], Awaitable[str]]


async def _nobody(verb: str, name: str, task: "asyncio.Task[LoradError | None]") -> str:
    return ""


class Outcomes:
    """`refresh` makes what is shown next show a change."""

    def __init__(
        self,
        names: Names,
        models: Lineup,
        tasks: Tasks,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.on_left: OnLeft = _nobody
        self._names, self._models = names, models
        self._tasks, self._refresh = tasks, refresh

    async def of(
        self,
        verb: str,
        names: wire.Names,
        one: Callable[[str], Awaitable[None]],
        every: Sequence[str] | None = None,
    ) -> wire.Results:
        """Of `every`, or of the names in the wish; all at once.  invalid_value if it has none."""
        chosen = list(dict.fromkeys(names.names if every is None else every))
        if not chosen and every is None:
            raise LoradError("invalid_value", "names is empty", param="names")
        items = await asyncio.gather(*(self._item(verb, name, one, names) for name in chosen))
        await self._refresh()
        return wire.Results(items=tuple(items))

    async def _item(
        self, verb: str, name: str, one: Callable[[str], Awaitable[None]], names: wire.Names
    ) -> wire.ItemResult:
        """One name's outcome.  Work goes on when the caller leaves or runs out of time."""
        task, operation = None, ""
        try:
            self._names.known(name)
            if not names.dry_run:
                task = self._tasks.spawn(_caught(one(name)))
                if names.wait:
                    async with asyncio.timeout(names.timeout_s):
                        error = await asyncio.shield(task)
                    if error is not None:
                        raise error
                else:
                    operation = await self.on_left(verb, name, task)
        except LoradError as error:
            return wire.ItemResult(
                name=name,
                ok=False,
                code=error.code,
                message=error.message,
                hint=error.hint,
                details=error.details,
            )
        except TimeoutError:
            assert task is not None
            operation = await self.on_left(verb, name, task)
            return wire.ItemResult(
                name=name,
                ok=False,
                code="deadline_exceeded",
                message=f"not done after {names.timeout_s:g} s; it goes on",
                hint=f"loractl op show {operation}" if operation else f"loractl show {name}",
                operation=operation,
            )
        entry = self._names.catalog.get(name)
        rev = entry.rev if entry is not None else None
        record = self._names.registry.get(name)
        state = State.QUARANTINED if record is None else record.stored_state
        if rev:
            state = self._models.of(rev).revisions.tier(rev)
        return wire.ItemResult(
            name=name, ok=True, state=state.value, rev=rev or "", operation=operation
        )


async def _caught(work: Awaitable[None]) -> LoradError | None:
    """An expected error is a result here: the caller may have gone."""
    try:
        await work
    except LoradError as error:
        return error
    return None
