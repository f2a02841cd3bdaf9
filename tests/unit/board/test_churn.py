"""Ten minutes of loads and evictions, against a list of all of them."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import AdapterEvent
from lorad.board.churn import RECENT, RecentChurn

NAMES = {"r1": ("sql", True), "r2": ("bible", True), "old": ("sql", False)}
BEGAN = 1234.5
some = settings(max_examples=40, deadline=None)


def load(rev, source="disk", **fields):
    plain = {"before": "loading", "after": "idle", "cause": "request", "source": source}
    return AdapterEvent(rev=rev, **(plain | {"num_bytes": 10, "load_seconds": 0.5} | fields))


def leave(rev, cause="cost"):
    return AdapterEvent(rev=rev, before="idle", after="ram", cause=cause)


happenings = st.lists(
    st.tuples(
        st.floats(0.0, 200.0),
        st.sampled_from(["r1", "r2", "old", "unknown"]),
        st.sampled_from(["load", "thrash", "cost", "starvation", "remove"]),
    ),
    max_size=40,
)


@some
@given(happenings, st.floats(0.0, 700.0))
def test_buckets_hold_what_happened_in_their_ten_seconds(happenings, wait):
    churn, now, seen = RecentChurn(NAMES.get, BEGAN), BEGAN, []
    for pause, rev, what in happenings:
        now += pause
        if what in ("load", "thrash"):
            churn.take(load(rev, away_seconds=1.0 if what == "thrash" else None), now)
        else:
            churn.take(leave(rev, what), now)
        seen.append((int(now // 10), rev, what))
    now += wait
    told, last = churn.look(now), int(now // 10)
    recent = [s for s in seen if s[0] > last - 60]
    loads = [s for s in recent if s[2] in ("load", "thrash")]
    by_bucket = Counter(s[0] for s in loads)
    assert told.loads == tuple(by_bucket[n] for n in range(last - 59, last + 1))
    assert sum(told.evictions) == len(recent) - len(loads)
    assert told.thrashes == sum(s[2] == "thrash" for s in loads)
    assert told.load_bytes == 10 * len(loads)
    assert sum(told.reasons.values()) == sum(told.evictions)
    names = Counter(NAMES.get(s[1], (s[1],))[0] for s in loads)
    assert dict(told.top) == dict(names)


def test_reasons_are_an_operators_words():
    churn = RecentChurn(NAMES.get, 0.0)
    for rev, cause in (("r1", "starvation"), ("old", "remove"), ("r1", "remove"), ("r2", "lru")):
        churn.take(leave(rev, cause), 1.0)
    assert churn.look(2.0).reasons == {"drain": 1, "replace": 1, "remove": 1, "lru": 1}


def test_the_newest_loads_come_first_with_what_they_took():
    churn = RecentChurn(NAMES.get, 0.0)
    for second in range(RECENT + 5):
        churn.take(load("r1", "ram", num_bytes=second), float(second))
    recent = churn.look(30.0).recent
    assert len(recent) == RECENT
    assert (recent[0].num_bytes, recent[0].ago_seconds, recent[0].source) == (24, 6.0, "ram")


def test_other_transitions_are_no_churn():
    churn = RecentChurn(NAMES.get, 0.0)
    churn.take(AdapterEvent(rev="r1", before="idle", after="active", cause="request"), 1.0)
    churn.take(AdapterEvent(rev="r1", before="active", after="draining", cause="manual"), 1.0)
    told = churn.look(1.0)
    assert not sum(told.loads) and not sum(told.evictions) and not told.reasons
