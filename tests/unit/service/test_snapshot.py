"""The one plain picture: what is said of guesses."""

from msgspec.structs import replace

from engine.status_messages import EngineSnapshot, PoolStatus, RevisionStatus
from lorad.config_sections import Model
from lorad.service.snapshot import _drafts

POOL = PoolStatus(
    total=0,
    free=0,
    kv_active=0,
    kv_cached=0,
    adapter_active=0,
    adapter_idle=0,
    block_bytes=0,
    block_size=16,
)


def snapshot() -> EngineSnapshot:
    counts = {"draft_tokens": 10, "accepted_tokens": 4}
    return EngineSnapshot(
        step=1,
        running=0,
        waiting=0,
        pool=POOL,
        slots_total=8,
        slots_used=2,
        ram_used_bytes=0,
        ram_limit_bytes=0,
        revisions=tuple(RevisionStatus(rev=rev, state="idle", **counts) for rev in ("a", "b")),
        base=RevisionStatus(rev="", state="idle", draft_tokens=7, accepted_tokens=5),
    )


def test_guesses_for_the_base_and_for_all_adapters_are_told_apart() -> None:
    told = _drafts(Model(base="/m", speculation="ngram", speculation_tokens=3), snapshot())
    assert told is not None
    assert (told.kind, told.longest) == ("ngram", 3)
    assert (told.base_draft_tokens, told.base_accepted_tokens) == (7, 5)
    assert (told.lora_draft_tokens, told.lora_accepted_tokens) == (20, 8)


def test_nothing_is_said_of_guesses_where_none_are_made_and_noughts_without_an_engine() -> None:
    model = Model(base="/m")
    assert _drafts(model, snapshot()) is None
    told = _drafts(replace(model, speculation="draft"), None)
    assert told is not None and told.base_draft_tokens == told.lora_draft_tokens == 0
