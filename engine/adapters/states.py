"""Adapter states and the transitions between them, as data.

Shared by the engine, which moves revisions between tiers, and by `lorad`, which stores three of
the states and shows all of them.  Torch-free and stateless: `check` is the only behaviour.
"""

from enum import StrEnum


class State(StrEnum):
    """Where a revision stands.  Printed as it is."""

    REMOTE = "remote"  # known by reference, files not here yet
    REGISTERED = "registered"  # validated and packed in the store; no weights in memory
    RAM = "ram"  # in the host cache
    LOADING = "loading"  # on its way up: file to host, or host to GPU
    ACTIVE = "active"  # resident, with running requests
    IDLE = "idle"  # resident, without
    DRAINING = "draining"  # resident, ends what it has and takes no more
    QUARANTINED = "quarantined"  # refused, with a reason code
    MISSING = "missing"  # its files are gone


STORED = frozenset({State.REGISTERED, State.QUARANTINED, State.MISSING})
RESIDENT = frozenset({State.ACTIVE, State.IDLE, State.DRAINING})

#: from -> every state that may follow.  Anything else is our own fault, and raises.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.REMOTE: frozenset({State.REGISTERED, State.QUARANTINED, State.MISSING}),
    State.REGISTERED: frozenset(
        {State.LOADING, State.RAM, State.QUARANTINED, State.MISSING, State.REMOTE}
    ),
    State.RAM: frozenset({State.LOADING, State.REGISTERED, State.MISSING, State.QUARANTINED}),
    State.LOADING: frozenset({State.IDLE, State.ACTIVE, State.RAM, State.REGISTERED}),
    State.ACTIVE: frozenset({State.IDLE, State.DRAINING}),
    State.IDLE: frozenset({State.ACTIVE, State.DRAINING, State.RAM, State.REGISTERED}),
    State.DRAINING: frozenset({State.ACTIVE, State.IDLE, State.RAM, State.REGISTERED}),
    State.QUARANTINED: frozenset({State.REGISTERED, State.MISSING}),
    State.MISSING: frozenset({State.REGISTERED, State.QUARANTINED, State.REMOTE}),
}


def check(before: State, after: State) -> None:
    """Raise AssertionError unless `before -> after` is in the table: traffic cannot cause it."""
    assert after in TRANSITIONS[before], f"illegal adapter transition {before} -> {after}"
