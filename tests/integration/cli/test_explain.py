"""explain: the two lines that answer it, the numbers below, and JSON."""

from msgspec.structs import replace

from lorad.wire_explain import Explained, ExplainedCost, ExplainedRoom, Holder

ROOM = ExplainedRoom(
    total_bytes=1 << 30,
    free_bytes=2 << 20,
    kv_active_bytes=500 << 20,
    kv_cached_bytes=0,
    kv_floor_bytes=100 << 20,
    idle_bytes=80 << 20,
    idle_adapters=1,
    free_slots=3,
    reserved_for="acme/sql",
    holders=(
        Holder(name="vip", num_bytes=160 << 20, pinned=True),
        Holder(name="busy", num_bytes=80 << 20, running=2, draining=True, tokens_left=33),
    ),
    more_holders=4,
)
COST = ExplainedCost(
    policy="cost",
    pinned=False,
    priority=50,
    uses=3.5,
    uses_a_minute=0.48,
    reuse_chance=0.38,
    return_seconds=0.0016,
    num_bytes=80 << 20,
    saved_seconds=0.6,
    loads=5,
    evictions=4,
    thrashes=2,
    held_seconds=31.0,
    place=2,
    victims=9,
)
STARVED = Explained(
    name="acme/sql",
    rev="a1" * 32,
    state="ram",
    tier="ram",
    served=False,
    why="2 of its requests wait, and there is no room for it",
    next="others make way for it",
    next_seconds=1.25,
    waiting=2,
    queue_turn=1,
    queue_turns=3,
    load_seconds=0.0016,
    room=ROOM,
    cost=COST,
)
REFUSED = Explained(
    name="bad",
    rev=None,
    state="quarantined",
    tier="-",
    served=False,
    why="it was refused: E_RANK_LIMIT: rank 600",
    next="requests get 404",
    hint="loractl show bad",
    reason="E_RANK_LIMIT",
)


def test_why_and_what_next_come_first_and_all_numbers_follow(server, loractl):
    server.api.adapters.explained = {"acme/sql": STARVED}
    done = loractl("explain", "acme/sql")
    assert (done.exit, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[:7] == [
        "name acme/sql a1a1a1a1",
        "state ram, tier ram",
        "served no",
        "why 2 of its requests wait, and there is no room for it",
        "next others make way for it (in 1.2 s)",
        "requests 0 running, 2 waiting; turn 1 of 3",
        "load 1.6 ms from where it is",
    ]
    assert "kept for acme/sql" in lines
    assert "held by vip 160M pinned" in lines
    assert "held by busy 80M draining 2 running, 33 tokens to go at most" in lines
    assert "held by 4 more" in lines
    assert "use 3.50 requests of late, 0.48 a minute; 38% likely within the next minute" in lines
    assert "makes way as number 2 of 9, held for 31s" in lines
    assert "moves 5 loads, 4 evictions, 2 loads soon after one" in lines


def test_json_has_the_numbers_as_they_are(server, loractl):
    server.api.adapters.explained = {"acme/sql": STARVED}
    told = loractl("explain", "acme/sql", "--json").json
    assert told["schema"] == "lorad/explain.v1"
    assert told["cost"]["return_seconds"] == 0.0016 and told["room"]["holders"][0]["pinned"]
    assert loractl("explain", "acme/sql", "-o", "name").out == "acme/sql\n"


def test_what_the_engine_does_not_know_has_no_numbers(server, loractl):
    server.api.adapters.explained = {"bad": REFUSED}
    said = loractl("explain", "bad").out
    assert "E_RANK_LIMIT" in said and "loractl show bad" in said
    assert "room" not in said and "cost" not in said


def test_an_unknown_name_is_exit_4_and_no_name_at_all_is_2(server, loractl):
    assert loractl("explain", "nobody").exit == 4
    assert loractl("explain", "../x").exit == 4
    assert loractl("explain").exit == 2


def test_an_adapter_that_is_called_explain_can_be_shown_and_explained(server, loractl, make_row):
    server.rows["acme/explain"] = make_row("acme/explain")
    server.api.adapters.explained = {
        "acme/explain": Explained(
            name="acme/explain", rev=None, state="idle", tier="gpu", served=True, why="w", next="n"
        )
    }
    assert loractl("show", "acme/explain", "-o", "name").out == "acme/explain\n"
    assert loractl("explain", "acme/explain", "-o", "name").out == "acme/explain\n"
    assert loractl("set", "acme/explain", "--priority", "7").exit == 0
    assert loractl("rm", "acme/explain", "--yes").exit == 0
    assert [call[:2] for call in server.calls][-2:] == [
        ("patch", "acme/explain"),
        ("remove", "acme/explain"),
    ]


def test_where_earlier_content_serves_it_says_that_the_newest_was_refused(server, loractl):
    """A folder was replaced by half a copy, and nothing was said but that the name serves."""
    old = replace(STARVED, name="old", state="idle", served=True, reason="E_TRUNCATED")
    server.api.adapters.explained = {"old": old, "bad": REFUSED}
    told = "its newest content, E_TRUNCATED: loractl show old says more"
    lines = [" ".join(line.split()) for line in loractl("explain", "old").out.splitlines()]
    assert f"refused {told}" in lines
    assert "newest content" not in loractl("explain", "bad").out  # it has none but that
