"""Following: what a daemon has to say, on and on, across its restarts.

Goes in: a way to follow it from an id on.  Comes out: items, for ever, or until the daemon stays
away for longer than `--timeout`.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from lorad.cli.output import note
from lorad.cli.session import Session

if TYPE_CHECKING:
    pass

T = TypeVar("T")

#: Seconds between attempts to find the daemon again; the last one is repeated.
RETRY = (0.25, 0.5, 1.0, 2.0)


def follow_on(
    s: Session, follow: Callable[[str], Iterator[tuple[str, T]]], last: str
) -> Iterator[T]:
    """Every item after the id `last`; raises Unreachable in the end."""
    from lorad.caller import Unreachable

    attempt, lost = 0, time.monotonic()
    while True:
        away: Unreachable | None = None
        try:
            for at, item in follow(last):
                last, attempt = at, 0
                yield item
        except Unreachable as error:
            if error.kind == "denied":
                raise
            away = error
        if attempt == 0:
            lost = time.monotonic()
            note("the daemon went away; waiting for it", s.options)
        limit = s.options.timeout
        if away is not None and limit is not None and time.monotonic() - lost >= limit:
            raise away
        pause(RETRY[min(attempt, len(RETRY) - 1)])
        attempt += 1


def pause(wait: float) -> None:
    """Before the daemon is looked for again."""
    time.sleep(wait)
