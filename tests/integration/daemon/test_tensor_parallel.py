"""A daemon whose model is shared by two processes: the same answers, and one that dies."""

import os
import signal
from pathlib import Path

import pytest


def configure(daemon, line):
    daemon.configure()
    text = daemon.config.read_text().replace("deterministic = true", line)
    daemon.config.write_text(text)


def ranks_of(daemon):
    """Ids of the processes beside the first one."""
    with daemon.client() as client:
        pid = client.status().engine_pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_two_ranks_answer_as_one_and_come_back_when_one_of_them_dies(make_daemon, poll):
    daemon = make_daemon()
    configure(daemon, "")
    daemon.start()
    daemon.upload("first", 1)
    before = {name: daemon.text(name) for name in ("tiny", "first")}
    assert daemon.stop() == 0

    configure(daemon, "tensor_parallel = 2")
    daemon.start()
    daemon.upload("second", 2)
    assert {name: daemon.text(name) for name in before} == before  # packed anew, for two
    assert daemon.text("second") not in before.values()
    with daemon.client() as client:
        [verdict] = client.verify("first").items
    assert not verdict.ok and "tensor_parallel" in verdict.message

    [other] = ranks_of(daemon)
    os.kill(other, signal.SIGKILL)
    poll(lambda: not daemon.is_ready(), "the loss to be noticed")
    daemon.wait_ready()
    assert ranks_of(daemon) not in ([], [other])
    assert {name: daemon.text(name) for name in before} == before
    assert "rank 1 has died: signal 9" in daemon.log.read_text()
    assert daemon.stop() == 0


@pytest.mark.late
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("tensor_parallel = 3", "models.tensor_parallel = 3: the model does not divide by it"),
        ("pipeline_parallel = 2", "models.pipeline_parallel = 2: layers are not spread"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(make_daemon, line, why):
    daemon = make_daemon()
    configure(daemon, line)
    status, told = daemon.refused()
    assert status == 2 and why in told and len(told.strip().splitlines()) <= 2
