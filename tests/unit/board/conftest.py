"""Snapshots as an engine would tell them."""

from types import SimpleNamespace

import pytest
from msgspec.structs import fields

from engine.status_messages import EngineSnapshot, PoolStatus, PrefixStatus, RevisionStatus
from lorad.wire_status import PoolPicture, Status

POOL = PoolStatus(
    total=100,
    free=40,
    kv_active=20,
    kv_cached=10,
    adapter_active=20,
    adapter_idle=10,
    block_bytes=1024,
    block_size=16,
)


def revision(rev, slot=0, state="idle", **fields):
    return RevisionStatus(rev=rev, slot=slot, state=state, **fields)


def snapshot(*revisions, pid=1, query=0, hit=0, **fields):
    return EngineSnapshot(
        **{
            "step": 1,
            "running": 0,
            "waiting": 0,
            "pool": POOL,
            "slots_total": 8,
            "slots_used": 0,
            "ram_used_bytes": 0,
            "ram_limit_bytes": 1,
            "base": RevisionStatus(rev="", state="idle"),
            "pid": pid,
            "prefix": PrefixStatus(query_tokens=query, hit_tokens=hit),
            **fields,
        },
        revisions=revisions,
    )


_ZERO = {int: 0, str: "", float: 0.0}


@pytest.fixture
def status():
    """status(**fields): of a daemon; what is not said is nothing."""
    plain = {f.name: _ZERO[f.type] for f in fields(Status) if f.required and f.type in _ZERO}
    plain |= {"adapters": {}, "inbox": None, "pool": PoolPicture()}
    return lambda **more: Status(**(plain | more))


@pytest.fixture
def told():
    """Makers: `snapshot` and `status`."""
    return SimpleNamespace(snapshot=snapshot, status=revision)
