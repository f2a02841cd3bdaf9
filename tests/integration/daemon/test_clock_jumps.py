"""The wall clock jumps by a day, and back by two: nothing expires, nothing waits."""

import ast
import json
import os
from pathlib import Path

import pytest

#: Where the wall clock may be read: to be shown or written down, or against what a server said or
#: what was written down by an earlier process (pulls.py: how long downloads given up are kept;
#: callers.py: until when an old key is good; audit.py: rows since when; shared_uploads.py: of
#: another gateway's uploads, which were given up a day ago).
SHOWN = {
    "lorad/demo.py",
    "lorad/assembly.py",
    "lorad/metrics/adapters.py",
    "lorad/registry/offline.py",
    "lorad/registry/registry.py",
    "lorad/service/generation.py",
    "lorad/service/adapters.py",
    "lorad/service/audit.py",
    "lorad/service/callers.py",
    "lorad/service/engine_link.py",
    "lorad/service/events.py",
    "lorad/service/pulls.py",
    "lorad/sources/patience.py",
    "lorad/text/template.py",
    "lorad/fleet/catalog.py",
    "lorad/fleet/shared_uploads.py",
    "lorad/cli/output.py",
    "lorad/cli/events.py",
    "lorad/api/pool_answers.py",
    "lorad/board/machine.py",  # how old a process is, for its share of a core
    "lorad/tracing/spans.py",
    "lorad/tui/record.py",
}
DAY = 86400.0
ROOT = Path(__file__).parents[3]

#: Every Python process of the daemon reads how far its wall clock is off.
SITECUSTOMIZE = """
import time
_time = time.time

def jumping():
    with open({offset!r}) as file:
        return _time() + float(file.read() or 0)

time.time = jumping
"""


@pytest.fixture
def daemon(make_daemon, tmp_path, monkeypatch):
    daemon = make_daemon()
    daemon.offset = tmp_path / "offset"
    daemon.offset.write_text("0")
    patch = SITECUSTOMIZE.format(offset=str(daemon.offset))
    (tmp_path / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT)))))
    monkeypatch.setenv("PYTHONPATH", path)
    yield daemon.start()
    assert daemon.stop() == 0, daemon.tail()


def jump(daemon, seconds):
    fresh = daemon.offset.with_suffix(".new")
    fresh.write_text(str(seconds))
    fresh.rename(daemon.offset)


@pytest.mark.slow
def test_streams_residents_and_the_inbox_do_not_notice_a_clock_that_jumps(daemon, poll):
    daemon.upload("clock/pinned", 1, pin=True)
    daemon.upload("clock/resident", 2, load=True)
    control = daemon.text("clock/resident", 400)
    body = daemon.body("clock/resident", 400, stream=True)
    parts, when = [], daemon.adapter("clock/resident").last_used_at
    with daemon.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        for n, line in enumerate(answer.iter_lines()):
            if n in (20, 200):
                jump(daemon, DAY if n == 20 else -DAY)
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                parts += [choice["text"] for choice in chunk["choices"]]
    assert "".join(parts) == control
    assert daemon.is_ready()
    for offset in (DAY, -DAY):
        jump(daemon, offset)
        assert daemon.text("clock/pinned") and daemon.text("clock/resident", 400) == control
        assert daemon.adapter("clock/resident").state == "idle"
    daemon.inbox.mkdir(parents=True, exist_ok=True)
    daemon.drop("clock/late", 3)
    poll(lambda: daemon.adapter("clock/late"), "the inbox to be looked at")
    daemon.wait_state("clock/late", "registered")
    types = {event.type for event in daemon.events()}
    assert not types & {"engine.stalled", "engine.died", "slot.evict", "slot.drain"}
    assert when is None or daemon.adapter("clock/resident").last_used_at != when


def test_timers_follow_the_monotonic_clock():
    """The wall clock is read in a few places that only show it."""
    found = set()
    for package in ("engine", "lorad"):
        for path in (ROOT / package).rglob("*.py"):
            if any(_reads_the_wall(node) for node in ast.walk(ast.parse(path.read_text()))):
                found.add(str(path.relative_to(ROOT)))
    assert found <= SHOWN, "let it follow time.monotonic, or say here why it need not"


def _reads_the_wall(node) -> bool:
    match node:
        case ast.Attribute(ast.Name("time"), "time" | "time_ns"):
            return True
        case ast.Attribute(_, "now" | "utcnow" | "today"):
            return isinstance(node.value, ast.Name | ast.Attribute) and "date" in ast.unparse(node)
        case ast.ImportFrom("time", names):
            return any(name.name in ("time", "time_ns") for name in names)
    return False
