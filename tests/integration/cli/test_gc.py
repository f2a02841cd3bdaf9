"""gc: it says first, asks when it should, and removes what it named."""

import pytest

from lorad import wire

GARBAGE = (
    wire.GarbageItem(kind="revision", rev="a1" * 32, num_bytes=2 << 20, why="no name serves it"),
    wire.GarbageItem(kind="packed", rev="b2" * 32, layout="0123", num_bytes=1 << 20, why="old"),
)


@pytest.fixture
def garbage(server):
    server.api.adapters.garbage = GARBAGE
    return server


def test_a_dry_run_lists_what_would_go_and_asks_for_nothing_else(garbage, loractl):
    done = loractl("gc", "--dry-run")
    assert done.exit == 0
    heading, *lines = done.out.splitlines()
    assert heading.split() == ["REV", "WHAT", "SIZE", "WHY"]
    assert [line.split()[:3] for line in lines] == [
        ["a1a1a1a1", "revision", "2M"],
        ["b2b2b2b2", "packed", "1M"],
    ]
    assert done.err.strip() == "3M would be removed; the store holds 3M"
    assert garbage.calls == [("gc", True)]


def test_without_a_terminal_it_needs_yes_and_removes_nothing(garbage, loractl):
    done = loractl("gc")
    assert done.exit == 2 and "needs --yes" in done.err
    assert garbage.calls == [("gc", True)]


def test_with_yes_it_removes(garbage, loractl):
    done = loractl("gc", "--yes")
    assert done.exit == 0 and "3M removed" in done.err
    assert garbage.calls == [("gc", True), ("gc", False)]


def test_where_there_is_nothing_it_asks_for_no_yes(server, loractl):
    done = loractl("gc")
    assert done.exit == 0 and done.err.strip() == "nothing to remove; the store holds 3M"


def test_json_is_the_documents_own_schema(garbage, loractl):
    document = loractl("gc", "--dry-run", "--json").json
    assert (document["schema"], document["dry_run"]) == ("lorad/gc.v1", True)
    assert [item["kind"] for item in document["items"]] == ["revision", "packed"]
    assert document["num_bytes"] == 3 << 20 and document["items"][0]["rev"] == "a1" * 32
