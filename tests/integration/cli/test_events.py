"""`loractl events`: the newest, the wanted, and those to come across a restart."""

import json
import shutil
import signal

import pytest
from msgspec.structs import replace

from lorad.cli.events import _columns
from lorad.service.events import EventRing
from lorad.wire import EventItem, EventPage


@pytest.fixture
def publish(server):
    """Into a ring of its own."""
    ring = server.api.deps.events
    for number in range(20):
        server.api.run(lambda n=number: ring.publish("slot.load", name=f"n{n}@a1a1a1a1"))
    return lambda *args, **fields: server.api.run(lambda: ring.publish(*args, **fields))


def ids(done):
    return [event["id"] for event in done.json["items"]]


def test_the_newest_come_oldest_first(server, loractl, publish):
    last = publish("pin.set", name="bible", message="hi\x1b").id
    assert ids(loractl("events", "--limit", "3", "--json")) == [last - 2, last - 1, last]
    table = loractl("events", "-n", "1").out.splitlines()
    assert table[0].split() == ["TIME", "TYPE", "NAME", "REV", "CAUSE", "MESSAGE"]
    assert table[1].split()[2:] == ["pin.set", "bible", "-", "-", "hi?"]
    assert loractl("events", "--limit", "2", "-o", "name").out == f"{last - 1}\n{last}\n"


def test_which_of_several_engines_it_was_is_a_column_where_any_event_says_so(loractl, publish):
    assert "REPLICA" not in loractl("events").out
    publish("engine.died", level="error", message="it is gone", replica="1")
    publish("adapter.added", name="bible")
    heading, died, added = loractl("events", "-n", "2").out.splitlines()
    assert heading.split()[4:] == ["REPLICA", "CAUSE", "MESSAGE"]
    assert died.split()[5] == "1" and added.split()[5] == "-"
    assert loractl("events", "-n", "2", "--json").json["items"][0]["replica"] == "1"


def test_a_follower_without_that_column_reads_it_in_the_message():
    event = EventItem(id=1, time="", type="engine.ready", replica="1", message="cuda, bfloat16")
    (*_, message) = _columns(EventPage(items=(), instance_id=""), wide=False)
    assert message.cell(event) == "replica 1: cuda, bfloat16"
    assert message.cell(replace(event, message="")) == "replica 1"
    assert message.cell(replace(event, replica="")) == "cuda, bfloat16"


def test_a_message_is_never_cut_and_says_when_it_is_no_mere_information(
    loractl, publish, monkeypatch
):
    reason = "adapter_model.safetensors: size 1000, header says 54392"
    publish("adapter.rejected", level="warn", name="acme/broken", message=reason)
    monkeypatch.setattr("lorad.cli.output.terminal_width", lambda: 60)
    assert loractl("events", "--limit", "1").out.endswith(f"  warn: {reason}\n")


def test_filters_look_at_all_events_and_not_at_the_newest_few(server, loractl, publish):
    first = publish("pin.set", name="bible").id
    publish("slot.load", name="bible@b2b2b2b2")
    for _ in range(3):
        publish("slot.evict", name="devil@d4d4d4d4")
    assert ids(loractl("events", "--type", "pin", "--limit", "1", "--json")) == [first]
    assert ids(loractl("events", "--adapter", "bible", "--json")) == [first, first + 1]
    assert ids(loractl("events", "--after", str(first + 3), "--json")) == [first + 4]
    assert loractl("events", "--since", "1h", "--json").json["items"]
    assert loractl("events", "--since", "0s", "--json").json["items"] == []
    assert loractl("events", "--since", "10").exit == 0
    assert loractl("events", "--since", "soon").exit == 2
    assert loractl("events", "-f", "--json").exit == 2


def test_a_type_that_no_event_has_is_a_slip_and_the_nearest_is_named(server, loractl, publish):
    done = loractl("events", "--type", "adapter.aded")
    assert done.exit == 2 and "did you mean adapter.added?" in done.err
    done = loractl("events", "-f", "--type", "zzz")
    assert done.exit == 2 and "adapter, config, daemon" in done.err
    assert loractl("events", "--type", "adapter.").exit == 0


@pytest.fixture
def follow(make_server, process, tmp_path):
    """`follow(...)`: (a daemon to restart, the process, what it says next)."""
    folder = tmp_path / "d"
    folder.mkdir()
    server = make_server(folder)
    server.api.run(lambda: server.api.events.publish("first"))

    def start(*argv):
        running = process("events", "-f", "-o", "jsonl", *argv, host=server.admin)
        return server, running, lambda: json.loads(running.stdout.readline())

    return start


def restart(server, make_server):
    """Another daemon on the same sockets."""
    server.close()
    for left in server.admin.parent.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return make_server(server.admin.parent)


def test_following_goes_on_in_a_new_daemon_after_a_gap(follow, make_server):
    server, running, read = follow()
    assert read()["type"] == "first"
    server.api.run(lambda: server.api.events.publish("second"))
    assert read()["type"] == "second"
    fresh = restart(server, make_server)
    fresh.api.run(lambda: setattr(fresh.api.events, "instance_id", "i2"))
    fresh.api.run(lambda: fresh.api.events.publish("third"))
    seen = [read()["type"]]
    while seen[-1] != "third":
        seen.append(read()["type"])
    assert seen == ["gap", "third"]
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert (running.returncode, err) == (130, b"")


def test_following_a_daemon_that_is_the_same_misses_and_repeats_nothing(follow):
    server, running, read = follow("--type", "pin")
    for number in range(3):
        server.api.run(lambda n=number: server.api.events.publish("slot.load"))
        server.api.run(lambda n=number: server.api.events.publish("pin.set", message=str(n)))
    assert [read()["message"] for _ in range(3)] == ["0", "1", "2"]
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130


def test_following_gives_up_after_its_timeout(follow):
    server, running, read = follow("--timeout", "300ms")
    read()
    server.close()
    server.admin.unlink(missing_ok=True)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 3
    assert json.loads(err)["error"]["code"] == "unreachable"


def test_a_follower_in_a_terminal_is_told_that_the_daemon_went_away(follow, process):
    server, running, _ = follow("-o", "table", "--timeout", "300ms")
    assert b"TIME" in running.stdout.readline()
    running.stdout.readline()
    server.close()
    _, err = running.communicate(timeout=30)
    assert err.decode().splitlines()[0] == "the daemon went away; waiting for it"


def test_the_ring_of_these_tests_is_the_real_one(server):
    assert isinstance(server.api.deps.events, EventRing)
