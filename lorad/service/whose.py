"""Whose: sequences of a revision that has several names, shared out to those that asked for them.

Goes in: the requests that have not ended, and what the engine says of a revision.  Comes out: the
same of one of its names.  The engine knows no names, and equal content is one revision: where it
has one name, all is that name's and nobody is looked at.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

from msgspec import structs

from engine.status_messages import RevisionStatus
from lorad.service.live import Live, Running

Asked = Counter[tuple[str, str]]  # revision, name -> requests


class Whose:
    """At one moment.  `crowd` is looked at once, when it is first needed."""

    def __init__(self, crowd: Iterable[tuple[Running, Live]]) -> None:
        self._crowd = crowd

    def of(self, name: str, status: RevisionStatus, names: Sequence[str]) -> RevisionStatus:
        """What runs and waits of `name`, one of all the `names` of the revision.

        Over all of them it adds up to what the engine says: requests that have got something run,
        the others run or wait."""
        if len(names) < 2 or not (status.running or status.waiting):
            return status
        begun, others = self._asked
        first = [begun[status.rev, each] for each in names]
        then = [others[status.rev, each] for each in names]
        sure = min(status.running, sum(first))
        more = _shared_out(status.running - sure, then if any(then) else first)
        running = [a + b for a, b in zip(_shared_out(sure, first), more, strict=True)]
        left = [max(a - b, 0) for a, b in zip(then, more, strict=True)]
        waiting = _shared_out(status.waiting, next(filter(any, (left, then)), first))
        place = list(names).index(name)
        return structs.replace(status, running=running[place], waiting=waiting[place])

    @cached_property
    def _asked(self) -> tuple[Asked, Asked]:
        """Those that have got something, and those that have not."""
        begun, others = Asked(), Asked()
        for running, live in self._crowd:
            if live.name is not None and running.rev is not None:
                (begun if running.begun else others)[running.rev, live.name] += 1
        return begun, others


def _shared_out(count: int, weights: Sequence[int]) -> list[int]:
    """`count` in whole parts as near to the weights as there are; all the first's if there are no
    weights, as who has asked is gone already."""
    whole = sum(weights)
    if not whole:
        return [count, *(0 for _ in weights[1:])]
    parts = [count * weight // whole for weight in weights]
    most_owed = sorted(range(len(weights)), key=lambda n: -(count * weights[n] % whole))
    for n in most_owed[: count - sum(parts)]:
        parts[n] += 1
    return parts
