"""Real clients against a real daemon, and against faces whose services a test steers.

`make test-clients` installs what is needed below `build/clients`, and runs these.  A test whose
client is not installed is skipped.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lorad.api.app import inference_tcp_app
from lorad.api.server import HttpServer, bind_tcp
from lorad.api.tcp import TcpKeys
from lorad.config_sections import Limits
from lorad.errors import LoradError
from lorad.key_file import read as read_keys

ROOT = Path(__file__).parents[2]
NODE = Path(os.environ.get("LORAD_CLIENTS", ROOT / "build" / "clients")) / "node"
KEY, ADMIN_KEY = "client-" * 6, "operator" * 5
MESSAGES = [{"role": "user", "content": "Say it."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
#: Calls as Hermes writes them.
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content"
    " }}{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}assistant:"
)


def _load(path: str) -> Any:
    name = f"{Path(path).stem}_of_clients"
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load("fakes/api_server.py")
daemons = _load("integration/daemon/conftest.py")
base, make_daemon = daemons.base, daemons.make_daemon


@dataclass(frozen=True)
class Door:
    """One way in.  `url` without a slash at its end; `socket` where that is the way."""

    url: str
    key: str
    socket: Path | None = None

    @property
    def env(self) -> dict[str, str]:
        """For a process that knocks here."""
        where = {"LORAD_SOCKET": str(self.socket)} if self.socket else {}
        return {**where, "LORAD_URL": self.url, "LORAD_API_KEY": self.key}

    def http(self) -> httpx.Client:
        """Without any SDK."""
        transport = httpx.HTTPTransport(uds=str(self.socket)) if self.socket else None
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(
            base_url=self.url, headers=headers, transport=transport, timeout=60, trust_env=False
        )


# ----------------------------------------------------------------- a real daemon
@pytest.fixture(scope="session")
def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(scope="module")
def daemon(make_daemon: Any, free_ports: tuple[int, int]) -> Iterator[Any]:
    """`tiny` with `acme/sql` and `tooled`, on both sockets and, with keys, on TCP."""
    daemon = make_daemon()
    for name, key in (("api", KEY), ("admin", ADMIN_KEY)):
        (daemon.root / name).write_text(f"{key}\n")
        (daemon.root / name).chmod(0o600)
    daemon.configure(
        f"""
[tcp]
enabled = true
bind = "127.0.0.1:{free_ports[0]}"
api_keys_file = "{daemon.root}/api"
admin_bind = "127.0.0.1:{free_ports[1]}"
admin_keys_file = "{daemon.root}/admin"
"""
    )
    daemon.inbox.mkdir(parents=True)
    tooled = daemons.write_adapter(daemon.root / "tooled", 2)
    (tooled / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    tooled.rename(daemon.inbox / "tooled")
    daemon.start(ready=False)
    daemons.until(daemon.is_ready, daemon.tail, patience=300)
    daemon.upload("acme/sql", 1)
    daemon.wait_state("tooled", "registered", "ram", "idle", "active")
    daemon.admin_url = f"http://127.0.0.1:{free_ports[1]}"
    yield daemon
    assert daemon.stop() == 0, daemon.tail()


@pytest.fixture(scope="module", params=["socket", "tcp"])
def door(request: pytest.FixtureRequest, daemon: Any, free_ports: tuple[int, int]) -> Door:
    if request.param == "socket":
        return Door("http://lorad", "none", daemon.inference)
    return Door(f"http://127.0.0.1:{free_ports[0]}", KEY)


@pytest.fixture(scope="module")
def expected(daemon: Any) -> dict[str, Any]:
    """What any client should see, asked for without one."""
    with Door("http://lorad", "none", daemon.inference).http() as http:
        asked = {"model": "acme/sql", "max_tokens": 12, "temperature": 0}
        chat = http.post("/v1/chat/completions", json=asked | {"messages": MESSAGES}).json()
        plain = http.post("/v1/completions", json=asked | {"prompt": "Once"}).json()
    text = chat["choices"][0]["message"]["content"]
    return {
        "models": ["tiny", "acme/sql", "tooled"],
        "chat": text,
        "rev": chat["system_fingerprint"].rpartition("-")[2],
        "streamed": text,
        "usage": [chat["usage"]["prompt_tokens"], 12],
        "plain": plain["choices"][0]["text"],
        "logprobs": [12, 2],
        "called": "paint",
        "missing": [404, "model_not_found"],
        "wrong": [400, "temperature"],
        "stranger": [401, "invalid_api_key"],
    }


@pytest.fixture
def check_tour(expected: dict[str, Any], door: Door) -> Callable[[dict[str, Any]], None]:
    """Holds what one client made of all that it was shown against `expected`."""

    def check(seen: dict[str, Any]) -> None:
        for key in ("colour", "argument"):  # the model's choice
            assert seen.pop(key) in ("red", "green"), key
        wanted = dict(expected)
        if door.socket is not None:  # who may use the socket needs no key
            del wanted["stranger"]
        assert seen == wanted

    return check


@pytest.fixture(scope="session")
def given() -> SimpleNamespace:
    """What every client asks with."""
    return SimpleNamespace(
        messages=MESSAGES, format=FORMAT, tool=TOOL, key=KEY, admin_key=ADMIN_KEY, node=NODE
    )


# ----------------------------------------------------------------- steered faces
class Steered:
    """Both doors of an ApiServer; the engine behind it is told to refuse, hang or answer."""

    def __init__(self, folder: Path) -> None:
        self.api = fakes.ApiServer(folder, Limits(queue=64, max_tokens=200))
        keys = folder / "keys"
        keys.write_text(f"{KEY}\n")
        keys.chmod(0o600)
        listener = bind_tcp("127.0.0.1:0")
        port = listener.getsockname()[1]
        app = inference_tcp_app(
            self.api.deps, TcpKeys(inference=read_keys(str(keys), "tcp.api_keys_file"))
        )
        limits = self.api.limits
        self.tcp = HttpServer(
            app,
            listener,
            receipt_seconds=limits.request_receipt,
            idle_seconds=limits.idle,
            connections=limits.connections,
            header_bytes=limits.headers,
            on_refused=self.api.deps.note_refused,
        )
        self.api.run(self.tcp.start)
        self.doors = {
            "socket": Door("http://lorad", "none", self.api.inference),
            "tcp": Door(f"http://127.0.0.1:{port}", KEY),
        }
        self.attempts: list[float] = []

    def refuse(self, code: str, times: int, retry_after: float | None = None) -> None:
        """The next `times` requests end in `code`; those after are answered."""
        self.attempts = []

        def check() -> None:
            self.attempts.append(time.monotonic())
            if len(self.attempts) <= times:
                raise LoradError(code, "not now", retry_after=retry_after)

        self.api.engine.check = check

    def reset(self) -> None:
        vars(self.api.engine).pop("check", None)
        self.api.reset()

    def close(self) -> None:
        self.api.run(self.tcp.stop, 0.2)
        self.api.close()


@pytest.fixture(scope="session")
def steered_faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    faces = Steered(tmp_path_factory.mktemp("steered"))
    yield faces
    faces.close()


@pytest.fixture
def steered(steered_faces: Steered) -> Iterator[Steered]:
    yield steered_faces
    steered_faces.reset()


@pytest.fixture(params=["socket", "tcp"])
def steered_door(request: pytest.FixtureRequest, steered: Steered) -> Door:
    return steered.doors[request.param]


#: code, how often it is answered, how often the client asks: waits are as long as lorad says.
RETRIES = [
    ("queue_full", 1, 2),
    ("tenant_rate_limited", 1, 2),
    ("loading_base", 1, 2),
    ("draining", 9, 2),
    ("conflict", 9, 1),
    ("no_room", 9, 1),
    ("internal_error", 9, 1),
]


@pytest.fixture(params=RETRIES, ids=lambda row: row[0])
def check_retries(
    request: pytest.FixtureRequest, steered: Steered
) -> Callable[[Callable[[], object]], None]:
    """Takes what asks once, with one retry, and returns its failure's code, or None."""
    code, times, asked = request.param

    def check(ask: Callable[[], object]) -> None:
        steered.refuse(code, times, retry_after=1.0)
        failed = ask()
        assert len(steered.attempts) == asked
        if asked == 2:
            waited = steered.attempts[1] - steered.attempts[0]
            assert waited > 0.9, "Retry-After: 1 was not obeyed"
        assert failed == (None if times < asked else code)

    return check


# ----------------------------------------------------------------- node
@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """node(script, door, **env): run a script of `node/`; the JSON that it prints last."""
    if not shutil.which("node") or not (NODE / "node_modules" / "openai").is_dir():
        pytest.skip("openai-node is not installed: make test-clients")

    def run(script: str, door: Door, **more: str) -> Any:
        path = Path(__file__).parent / "node" / script
        copy = NODE / path.name  # imports are looked up beside a module
        shutil.copy(path, copy)
        done = subprocess.run(
            ["node", str(copy)],
            env={**os.environ, **door.env, **more},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run
