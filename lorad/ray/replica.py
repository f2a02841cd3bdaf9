"""A replica: an actor around one whole daemon, which it starts, asks, watches and ends.

Goes in: `Call`s, orders of the catalog.  Comes out: the daemon's answers as they come; what the
routers look at; whether Serve should put another one in its place.  Computes nothing and owns no
request: how many run is counted, by the ingress that they are of.
"""

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ray import serve

from lorad import wire
from lorad.errors import LoradError
from lorad.fleet.catalog import open_catalog
from lorad.fleet.counting import Count
from lorad.fleet.daemon import Daemon
from lorad.fleet.line import Site
from lorad.fleet.members import Answer, Head, Lost, Order
from lorad.fleet.said import said
from lorad.ray.child import Child, Ended
from lorad.ray.messages import Call, Gone, Told, shortened
from lorad.ray.plan import plan, settings_of, wish_of
from lorad.ray.watched import Watched

#: While it waits for its daemon to be ready, it looks so often.
START_LOOK_SECONDS = 0.2
#: Those whose answers broke with the daemon are told so before its actor ends, too.
FAREWELL_SECONDS = 0.5


class Replica:
    """Serve makes it with the arguments of the application."""

    async def __init__(self, told: dict[str, Any]) -> None:  # type: ignore[misc]
        wish = wish_of(told)
        self._plan, self._name = plan(wish), str(serve.get_replica_context().replica_tag)
        self._counts: defaultdict[str, Count] = defaultdict(lambda: Count(self._name))
        self._child = Child(wish.config, Path(wish.homes), drain_seconds=self._plan.drain_seconds)
        await self._child.start()
        site = Site(self._name, str(self._child.inference), str(self._child.admin))
        self._daemon = Daemon(site, open_catalog(wish.catalog, settings_of(wish)))
        self._watched = Watched(self._daemon, self._plan.away_seconds)
        await self._become_ready()
        self._watching = asyncio.create_task(self._end_with_daemon())

    async def __del__(self) -> None:
        """Serve has waited for what was under way, and nothing comes any more."""
        if hasattr(self, "_watching"):  # else it never was ready
            self._watching.cancel()
        if hasattr(self, "_child"):
            await self._child.stop()

    async def _end_with_daemon(self) -> None:
        """Without it there is nothing to wait for: Serve finds a dead actor at once, and one that
        is not well after three looks."""
        await self._child.ended()
        await asyncio.sleep(FAREWELL_SECONDS)
        try:
            self._child.check()
        except Ended as ended:
            print(f"the replica ends: {ended}", file=sys.stderr, flush=True)
        os._exit(1)

    # ------------------------------------------------------------- requests
    async def stream(self, call: Call) -> AsyncGenerator[Head | bytes | Gone, None]:
        """A Head and bytes as they come; Gone behind them if that is not all of the answer."""
        count, began = self._counts[call.origin], False
        count.enter(call.rev)
        try:
            async with aclosing(self._daemon.stream(call.ask)) as parts:
                async for part in parts:
                    yield part
                    if not began:
                        began = True
                        count.begin(call.rev)
        except Lost as lost:
            yield Gone(self._name, lost.why)
        finally:
            count.leave(call.rev, began=began)

    async def ask(self, call: Call) -> Answer | Gone:
        """This replica, or none."""
        if call.member != self._name:
            return _no_more(call)
        try:
            return await self._daemon.ask(call.ask, seconds=call.seconds)
        except Lost as lost:
            return Gone(self._name, lost.why)

    async def take_in(self, call: Call, order: Order) -> wire.Added | Answer | Gone:
        """An Answer says why it is refused."""
        if call.member != self._name:
            return _no_more(call)
        try:
            return await self._daemon.take_in(order)
        except Lost as lost:
            return Gone(self._name, lost.why)
        except LoradError as error:
            return said(error, self._name)

    # ------------------------------------------------------------- how it is
    async def check_health(self) -> None:
        """Raises Ended, Unhealthy."""
        self._child.check()
        await self._watched.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        await self._watched.look()
        return self._told().stats()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the routers know of it before the first of its stats."""
        return self._told().stats()

    def _told(self) -> Told:
        counts = {who: count for who, count in self._counts.items() if _busy(count)}
        rank, seen = serve.get_replica_context().rank, self._watched.seen
        return Told(
            rank=str(rank.rank) if rank is not None else "",
            state=seen.state,
            reason=seen.reason,
            instance=seen.instance,
            resident=shortened(seen.look.resident),
            loading=shortened(seen.look.loading),
            free_bytes=seen.look.free_bytes,
            num_waiting={who: count.num_waiting for who, count in counts.items()},
            num_running={who: count.num_running for who, count in counts.items()},
            waiting={who: dict(count.waiting) for who, count in counts.items() if count.waiting},
        )

    async def _become_ready(self) -> None:
        """Serve routes nothing here before.  Raises Ended."""
        while (await self._watched.look()).state != "ready":
            self._child.check()
            await asyncio.sleep(START_LOOK_SECONDS)


def _busy(count: Count) -> bool:
    return bool(count.num_waiting or count.num_running)


def _no_more(call: Call) -> Gone:
    return Gone(call.member, "there is no such replica any more")
