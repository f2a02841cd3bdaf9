"""`lorad deploy ray` at a cluster that refuses, dies or listens elsewhere: one line each."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from lorad.cli.serve import app
from lorad.ray.pending import missing


class Cluster:
    """As much of Ray as deploying looks at.  `fails`: what it raises, by the call's name."""

    def __init__(self):
        self.fails, self.ran, self.host, self.port = {}, [], "127.0.0.1", 8000
        self.state, self.waits = "RUNNING", [""]
        self.deployments, self.resources = {}, {"CPU": 8.0}

    def call(self, name):
        if name in self.fails:
            raise self.fails[name]
        self.ran.append(name)

    def status(self):
        self.call("status")
        value = SimpleNamespace(value=self.state)
        found = SimpleNamespace(status=value, message="", deployments=self.deployments)
        return SimpleNamespace(applications={"lorad": found})

    def why_not_ready(self):
        said = self.waits.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def modules(self):
        ray, serve = ModuleType("ray"), ModuleType("ray.serve")
        context, ours = ModuleType("ray.serve.context"), ModuleType("lorad.ray.app")
        ray.serve = serve
        ray.cluster_resources = lambda: self.resources
        ray.init = lambda **given: self.call("init")
        ray.shutdown = lambda: self.call("shutdown")
        serve.start = lambda **given: self.call("start")
        serve.run_many = lambda *given, **more: self.call("run_many")
        serve.RunTarget = SimpleNamespace
        serve.status = self.status
        result = SimpleNamespace(result=lambda timeout_s: self.why_not_ready())
        handle = SimpleNamespace(why_not_ready=SimpleNamespace(remote=lambda: result))
        serve.get_app_handle = lambda app: handle
        context._get_global_client = lambda: SimpleNamespace(http_config=self)
        ours.build = lambda arguments: arguments
        return {m.__name__: m for m in (ray, serve, context, ours)}


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lorad.ray.deploying.POLL_SECONDS", 0.001)
    return made


@pytest.fixture
def deploy(tmp_path, cluster):
    file = tmp_path / "lorad.toml"
    file.write_text('[[models]]\nbase = "/model"\n')

    def run(*more):
        asked = ["deploy", "ray", str(file), "--catalog", "/shared/adapters", "--elsewhere", *more]
        result = CliRunner().invoke(app, asked)
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        return result.exit_code, result.stderr

    return run


def test_it_ends_when_it_takes_requests_whatever_its_ingress_died_of_meanwhile(deploy, cluster):
    cluster.waits = [RuntimeError("the actor died\nlong"), TimeoutError(), "no replica", ""]
    status, said = deploy()
    assert (status, cluster.waits) == (0, [])
    assert "its ingress does not answer: the actor died\n" in said
    assert "its ingress does not answer: TimeoutError\n" in said


@pytest.mark.parametrize("call", ["init", "start", "run_many", "status"])
@pytest.mark.parametrize("error", [RuntimeError, OSError, AssertionError])
def test_what_ray_raises_is_one_line_with_the_next_step(deploy, cluster, call, error):
    cluster.fails[call] = error("why not\n  and a long traceback")
    status, said = deploy()
    assert status == 1 and "why not" in said and "traceback" not in said
    assert said.splitlines()[-1].startswith("  try: ")
    assert ("shutdown" in cluster.ran) == (call != "init")


def test_serve_that_listens_elsewhere_is_not_told_to_listen_here(deploy, cluster):
    """It would stay open to other machines, though the deployment is said to be on loopback."""
    cluster.host = "0.0.0.0"
    status, said = deploy()
    assert status == 1 and "at 0.0.0.0:8000, and stays there" in said
    assert "run_many" not in cluster.ran
    cluster.host, cluster.port = "127.0.0.1", 9000
    assert deploy()[0] == 1 and deploy("--port", "9000")[0] == 0


def deployment(status, message="", **states):
    status = SimpleNamespace(value=status)
    return SimpleNamespace(status=status, message=message, replica_states=states)


def test_replicas_that_wait_for_a_card_are_told_while_it_waits_and_in_the_error(deploy, cluster):
    cluster.state = "DEPLOYING"
    cluster.deployments = {"replica": deployment("UPDATING", STARTING=2)}
    status, said = deploy("--timeout", "20ms", "-n", "2")
    waits = "2 replicas wait for 1 GPU each; the cluster has none: "
    assert status == 1 and said.startswith(f"lorad: deploying {waits}--gpus 0, or device")
    assert f"error: lorad is not running after 0.02 s: deploying {waits}" in said
    assert said.splitlines()[-1] == "  try: it goes on; look with: serve status"
    cluster.resources = {"CPU": 8.0, "GPU": 2.0}
    cluster.deployments["ingress"] = deployment("UPDATING", "1 replicas take\n  long", STARTING=1)
    assert "deploying 1 replicas take long\n" in deploy("--timeout", "20ms", "-n", "2")[1]


def test_ctrl_c_says_that_it_goes_on_and_how_to_look_or_end_it(deploy, cluster):
    cluster.fails["status"] = KeyboardInterrupt()
    status, said = deploy()
    assert status == 130 and "shutdown" in cluster.ran
    assert said.splitlines() == [
        "lorad: error: interrupted; lorad goes on without this command",
        "  try: look with: serve status, or end it all: serve shutdown",
    ]
    del cluster.fails["status"]
    cluster.fails["start"] = KeyboardInterrupt()
    assert "may be deployed, or not yet" in deploy()[1]


@pytest.mark.parametrize(
    ("states", "asked", "cluster", "told"),
    [
        ({"STARTING": 1}, {"GPU": 1.0}, {"GPU": 1.0}, ""),  # it loads
        ({"STARTING": 1, "RUNNING": 1}, {"GPU": 2.0}, {"GPU": 3.0}, "1 replica waits for 2 GPU;"),
        ({"STARTING": 3}, {"GPU": 0.0, "CPU": 4.0}, {"CPU": 4.0}, "2 replicas wait for 4 CPU each"),
        ({"STARTING": 3}, {"GPU": 0.5}, {"GPU": 1.0}, "1 replica waits for 0.5 GPU; the cluster"),
        ({"RUNNING": 2, "STOPPING": 9}, {"GPU": 1.0}, {}, ""),
    ],
)
def test_what_is_missing_is_what_replicas_ask_beyond_the_cluster(states, asked, cluster, told):
    said = missing(states, asked, cluster)
    assert said.startswith(told) and bool(said) == bool(told)
