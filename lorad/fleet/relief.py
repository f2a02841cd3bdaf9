"""Relief: when a member joins, some of who waits at fuller ones is sent there.

Goes in: the members, looked at once a second.  Comes out: to each that has more than its share of
all sequences, a word to send on those that came last and have got nothing.  Their gateway hears
that as a refusal, and asks another member, as it does with any.  Owns no request.
"""

import asyncio
import contextlib
import logging
import math

import msgspec

from lorad.errors import LoradError
from lorad.fleet.asking import V1
from lorad.fleet.members import Ask, Lost, Member, Members
from lorad.fleet.taking import read
from lorad.wire_operate import Shed, ShedAsk

log = logging.getLogger("lorad.fleet")

LOOK_SECONDS = 1.0


class Relief:
    """Await `run`; several gateways may do so at once, as each says what is to be left."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._ready: frozenset[tuple[str, str]] = frozenset()  # at the last look

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Once.  Where nobody was ready before, as when this gateway begins, nobody has joined."""
        ready = [member for member in self._members.seen() if member.state == "ready"]
        now = frozenset((member.name, member.instance) for member in ready)
        joined = self._ready and now - self._ready
        self._ready = now
        if not joined:
            return
        share = math.ceil(sum(member.replica.load for member in ready) / len(ready))
        fuller = [one for one in ready if one.replica.load > share and one.replica.num_waiting]
        await asyncio.gather(*(self._relieve(one, share) for one in fuller))

    async def _relieve(self, member: Member, share: int) -> None:
        """Down to its share.  One that cannot, or is older than this route, keeps what it has."""
        body = msgspec.json.encode(ShedAsk(load=share))
        with contextlib.suppress(Lost, LoradError):
            ask = Ask("POST", f"{V1}/shed", body=body, face="admin")
            shed = read(await self._members.ask(member.name, ask), Shed)
            if shed.requests:
                log.info("%s sends %d requests on: a member joined", member.name, shed.requests)
