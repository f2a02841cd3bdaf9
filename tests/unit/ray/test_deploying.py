"""`lorad deploy ray` at a cluster that refuses, dies or listens elsewhere: one line each."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from lorad.cli.serve import app


class Cluster:
    """As much of Ray as deploying looks at.  `fails`: what it raises, by the call's name."""

    def __init__(self):
        self.fails, self.ran, self.host, self.port = {}, [], "127.0.0.1", 8000
        self.state, self.waits = "RUNNING", [""]

    def call(self, name):
        if name in self.fails:
            raise self.fails[name]
        self.ran.append(name)

    def status(self):
        self.call("status")
        value = SimpleNamespace(value=self.state)
        found = SimpleNamespace(status=value, message="", deployments={})
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
        asked = ["deploy", "ray", str(file), "--catalog", "/shared/adapters", *more]
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
