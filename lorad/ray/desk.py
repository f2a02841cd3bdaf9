"""Desk: what the request router and the ingress of one process say to each other.

Serve makes the router, out of a copy of its module, and runs it on a thread of its own; nothing of
it can be reached from an ingress.  So both look here, by application and deployment.  Each field
has one writer, and what the other does with it is one step.
"""

from collections import deque
from collections.abc import Sequence

from lorad.fleet.members import Member

_desks: dict[tuple[str, str], "Desk"] = {}


class Desk:
    def __init__(self) -> None:
        self.members: Sequence[Member] = ()  # as they were at the last change; the router's
        self.news: deque[str] = deque()  # ids of calls that have begun to be answered; the ingress'
        #: Where a call was sent last; the router's, until the ingress takes it out.
        self.where: dict[str, str] = {}


def desk(app: str, deployment: str) -> Desk:
    return _desks.setdefault((app, deployment), Desk())
