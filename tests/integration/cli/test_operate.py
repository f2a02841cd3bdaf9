"""reload, drain, resume: what is sent, what is printed, which exit status."""

import pytest

from lorad.errors import LoradError
from lorad.wire_operate import Reloaded


@pytest.fixture
def operator(server):
    return server.api.operator


def test_reload_says_what_changed_and_what_waits(operator, loractl):
    operator.reloaded = Reloaded(changed=("limits.queue",), needs_restart=("lora.slots",))
    done = loractl("reload")
    assert (done.exit, done.out) == (0, "changed: limits.queue\n")
    assert done.err == "needs a restart: lora.slots\n"
    operator.reloaded = Reloaded(needs_restart=("store.budget",))
    done = loractl("reload")
    assert (done.out, done.err) == ("nothing else changed\n", "needs a restart: store.budget\n")
    operator.reloaded = Reloaded(changed=("limits.queue",), needs_restart=("lora.slots",))
    document = loractl("reload", "--json").json
    assert (document["schema"], document["changed"]) == ("lorad/reload.v1", ["limits.queue"])


def test_reload_shows_why_it_is_refused(operator, loractl):
    operator.refusal = LoradError(
        "invalid_config", "lorad.toml:3: unknown key limits.quue", hint="did you mean queue?"
    )
    done = loractl("reload")
    assert done.exit == 2
    assert "unknown key limits.quue" in done.err and "did you mean queue?" in done.err


def test_drain_and_resume_of_one_adapter_and_of_all(operator, loractl):
    assert loractl("drain", "bible", "--timeout", "2s").out == "bible  drained\n"
    assert loractl("drain", "--cancel", "--no-wait").out == "the daemon  drained\n"
    done = loractl("resume")
    assert done.out == "the daemon  takes requests\n"
    assert done.err == "still drained: acme/sql\n"
    assert loractl("resume", "bible", "--json").json["schema"] == "lorad/drain.v1"
    asked = [(verb, a.name, a.timeout_s, a.wait, a.cancel) for verb, a in operator.asked]
    assert asked == [
        ("drain", "bible", 2.0, True, False),
        ("drain", None, 30.0, False, True),
        ("resume", None, 30.0, True, False),
        ("resume", "bible", 30.0, True, False),
    ]


def test_a_drain_that_takes_too_long_is_exit_7_with_the_next_step(operator, loractl):
    operator.refusal = LoradError(
        "deadline_exceeded", "2 requests still run after 2 s", hint="loractl drain bible --cancel"
    )
    done = loractl("drain", "bible")
    assert done.exit == 7
    assert "2 requests still run" in done.err and "--cancel" in done.err
