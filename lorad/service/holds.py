"""Holds: replaced revisions that can still be asked for as `name@digest`, for a while.

Goes in: a gateway's wish, before it has a name moved here.  Comes out: until the gateway lets go,
or its time is over, that revision under that name; a lease keeps it meanwhile.  Nothing of it
outlives the daemon: whoever asks for what is not held is told that there is no such model.
"""

import asyncio
from collections.abc import Callable


class Holds:
    """`lease` and `release` are those of AdapterService."""

    def __init__(self, lease: Callable[[str], None], release: Callable[[str], None]) -> None:
        self._lease, self._release = lease, release
        self._held: dict[str, dict[str, asyncio.TimerHandle]] = {}  # name -> revision -> its end

    def hold(self, name: str, rev: str, seconds: float) -> None:
        """From now on for so long, however long it was held before."""
        held = self._held.setdefault(name, {})
        if (timer := held.get(rev)) is not None:
            timer.cancel()
        else:
            self._lease(rev)
        loop = asyncio.get_running_loop()
        held[rev] = loop.call_later(seconds, self._let_go, name, rev)

    def let_go(self, name: str) -> None:
        """Of all that is held under it."""
        for rev in list(self._held.get(name, ())):
            self._let_go(name, rev)

    def of(self, name: str) -> tuple[str, ...]:
        return tuple(self._held.get(name, ()))

    def find(self, name: str, digest: str) -> str | None:
        """The one that begins so."""
        return next((rev for rev in self._held.get(name, ()) if rev.startswith(digest)), None)

    def _let_go(self, name: str, rev: str) -> None:
        held = self._held[name]
        held.pop(rev).cancel()
        if not held:
            del self._held[name]
        self._release(rev)
