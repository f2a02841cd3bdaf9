"""lorad on a Ray of one machine: two replicas of a tiny model, one ingress, for all tests here.

Ray runs in processes of its own, started as an operator starts it; these tests speak to it over
HTTP alone.  It ends with everything that it started.
"""

import functools
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from lorad import wire
from lorad.client import LoradClient

_DAEMONS = Path(__file__).parents[1] / "daemon" / "conftest.py"
ROOT = Path(__file__).parents[3]
NAMES = ("a", "b", "c", "d")
PATIENCE = 60.0
SHORT, LONG = 16, 100


def _load():
    spec = importlib.util.spec_from_file_location("daemons_of_ray", _DAEMONS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_daemons = _load()
base = _daemons.base

CONFIG = """[[models]]
base = "{base}"
name = "tiny"
device = "cpu"
cpu_pool = "32MiB"
max_model_len = 4096
max_batch_tokens = 256
max_num_seqs = 8
threads = 1
deterministic = true

[lora]
slots = 8
ram_cache = "16MiB"

[shutdown]
drain_timeout = "5s"

[tcp]
admin_keys_file = "{keys}"
"""


class Cluster:
    def __init__(self, root, base):
        self.root, self.port, self.ray_port = root, free_port(), free_port()
        self.key = secrets.token_hex(16)
        keys = root / "keys"
        keys.write_text(f"operator {self.key}\n")
        keys.chmod(0o600)
        self.config = root / "lorad.toml"
        self.config.write_text(CONFIG.format(base=base, keys=keys))

    @property
    def env(self):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LORAD_", "RAY_"))}
        return {
            **clean,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            # Nobody is told how often something happens here; and that takes a process.
            "RAY_enable_metrics_collection": "0",
            "PYTHONWARNINGS": "ignore",
        }

    def loractl(self, *words):
        """What it prints."""
        key = {"LORAD_API_KEY": self.key}
        return self.run("lorad.cli.app", "-H", self.url, *words, more=key).stdout

    def run(self, *command, patience=3 * PATIENCE, more=None):
        done = subprocess.run(
            [str(Path(sys.executable).parent / command[0]), *command[1:]]
            if command[0] == "ray"
            else [sys.executable, "-m", *command],
            env={**self.env, **(more or {})},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=patience,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self):
        self.run(
            *("ray", "start", "--head", "--port", str(self.ray_port), "--num-cpus=4"),
            *("--include-dashboard=false", "--object-store-memory=80000000"),
            *("--disable-usage-stats", "--temp-dir", str(self.root / "ray")),
        )
        self.deploy()

    def deploy(self, *more):
        return self.run(
            *("lorad.cli.serve", "deploy", "ray", str(self.config)),
            *("--address", f"127.0.0.1:{self.ray_port}", "-n", "2", "--cpus", "0.5"),
            *("--catalog", str(self.root / "catalog"), "--homes", str(self.root / "homes")),
            *("--port", str(self.port), "--timeout", "2m", *more),
        )

    def stop(self):
        """Ray is killed; daemons are left to find that by themselves."""
        mine = self.processes()
        daemons = [p for p in mine if "lorad.ray.tied" in p.cmdline()]
        engines = [child for daemon in daemons for child in daemon.children(recursive=True)]
        for process in mine:
            if process not in daemons and process not in engines:
                process.kill()
        _, left = psutil.wait_procs(mine, timeout=20)
        for process in left:
            process.kill()
        return [process for process in left if process in daemons + engines]

    def processes(self):
        """By where they keep their files, and what those have started: they are nobody's
        children, and some hide what they were started with."""
        found = {}
        for process in psutil.process_iter():
            try:
                if any(str(self.root) in word for word in process.cmdline()):
                    for each in (process, *process.children(recursive=True)):
                        found[each.pid] = each
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return list(found.values())

    # ------------------------------------------------------------- what tests ask of it
    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self):
        os.environ["LORAD_API_KEY"] = self.key
        return LoradClient(self.url, timeout=PATIENCE)

    def http(self):
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def add(self, name, seed):
        folder = _daemons.write_adapter(self.root / f"up-{name}-{seed}", seed)
        with self.client() as client:
            return client.upload(folder, wire.UploadStart(name=name, replace=True))

    def body(self, model, max_tokens=SHORT, **more):
        return {
            "model": model,
            "prompt": _daemons.PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def ask(self, model, max_tokens=SHORT):
        with self.http() as http:
            return http.post("/v1/completions", json=self.body(model, max_tokens))

    def texts_of(self, model):
        """What it says, by how long it is asked to: the ends may be halves of a character."""
        return {length: self.text(model, length) for length in (SHORT, LONG)}

    def text(self, model, max_tokens=SHORT):
        answer = self.ask(model, max_tokens)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def replicas(self):
        """Those that take requests: name -> the engine's process."""
        with self.client() as client:
            (model,) = client.status().models
        return {one.name: one.engine_pid for one in model.replicas if one.state == "ready"}

    def daemon(self, replica):
        """Its process, which has started the engine; the actor's child."""
        return psutil.Process(self.replicas()[replica]).parent()

    def daemons(self):
        """Clients of each replica's own daemon."""
        for name in self.replicas():
            run = self.daemon(name).environ()["RUNTIME_DIRECTORY"]
            with LoradClient(f"unix://{run}/admin.sock") as client:
                yield client

    def holders(self, name):
        with self.client() as client:
            return client.adapter(name).adapter.replicas


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def poll():
    return functools.partial(_daemons.until, patience=PATIENCE)


@pytest.fixture(scope="session")
def cluster(base):
    # The path of Ray's own sockets has 107 bytes, of which it takes 60.
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="lr-", dir="/tmp")), base)
    try:
        cluster.start()
        cluster.texts = {}
        for seed, name in enumerate(NAMES, 1):
            cluster.add(name, seed)
            cluster.texts[name] = cluster.texts_of(name)
        yield cluster
    finally:
        left = cluster.stop()
        shutil.rmtree(cluster.root, ignore_errors=True)
    assert left == [], "daemons outlive their actors"
