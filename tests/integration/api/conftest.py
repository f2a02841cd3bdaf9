"""The real HTTP faces on services that a test steers, and raw connections to them."""

import contextlib
import importlib.util
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad.config import KIB
from lorad.config_sections import Limits

_FAKES = Path(__file__).parents[2] / "fakes" / "api_server.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("api_server_of_integration", _FAKES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load()

#: Small, so that each bound is met within a test, and slow enough for a loaded machine.
SMALL = Limits(
    body=64 * KIB, headers=2 * KIB, connections=64, queue=32, stall_write=0.25, max_tokens=1000
)
#: Short too: only for tests of what happens when the time is up, or the house is full.
TIGHT = msgspec.structs.replace(SMALL, request_receipt=0.25, connections=12)


@pytest.fixture
def make_api(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`make_api(limits, ...)`: a server of the test's own."""
    made = []

    def make(limits: Limits = SMALL, **options: Any) -> Any:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(fakes.ApiServer(folder, limits, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="session")
def small_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = fakes.ApiServer(tmp_path_factory.mktemp("small"), SMALL, max_upload=256 * KIB)
    yield server
    server.close()


@pytest.fixture
def api(small_api: Any) -> Iterator[Any]:
    yield small_api
    small_api.reset()


@pytest.fixture(scope="session")
def tight_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = fakes.ApiServer(tmp_path_factory.mktemp("tight"), TIGHT)
    yield server
    server.close()


@pytest.fixture
def tight(tight_api: Any) -> Iterator[Any]:
    """The server that waits for nobody."""
    yield tight_api
    tight_api.reset()


class Answer:
    """One parsed HTTP response; `events` splits a stream."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.raw = raw
        self.status = int(first.split()[1]) if raw else 0
        self.headers = dict(line.lower().split(": ", 1) for line in lines)
        self.body = _unchunked(body) if "transfer-encoding" in self.headers else body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]

    @property
    def events(self) -> list[bytes]:
        return self.body.split(b"\n\n")[:-1]


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return whole


class Raw:
    """A connection that says exactly what it is told."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(str(path))

    def send(self, data: bytes) -> "Raw":
        with contextlib.suppress(BrokenPipeError):  # refused already: the answer can be read
            self.socket.sendall(data)
        return self

    def read(self) -> bytes:
        """Everything until the server hangs up."""
        got = b""
        try:
            while piece := self.socket.recv(65536):
                got += piece
        except ConnectionResetError:
            pass
        return got

    def answer(self) -> Answer:
        return Answer(self.read())

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def connect() -> Iterator[Callable[[Path], Raw]]:
    made: list[Raw] = []

    def make(path: Path) -> Raw:
        made.append(Raw(path))
        return made[-1]

    yield make
    for raw in made:
        raw.close()


@pytest.fixture
def parsed() -> Callable[[bytes], Answer]:
    """The bytes of a whole response, taken apart."""
    return Answer


@pytest.fixture
def send(connect: Callable[[Path], Raw]) -> Callable[..., Raw]:
    """One request on a connection of its own, whose answer nobody has read."""

    def one(path: Path, method: str, target: str, body: Any = None, headers: str = "") -> Raw:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body)
        content = content.encode() if isinstance(content, str) else content
        length = f"content-length: {len(content)}\r\n" if method not in ("GET", "HEAD") else ""
        head = f"{method} {target} HTTP/1.1\r\nhost: lorad\r\nconnection: close\r\n"
        return connect(path).send(f"{head}{length}{headers}\r\n".encode() + content)

    return one


@pytest.fixture
def call(send: Callable[..., Raw]) -> Callable[..., Answer]:
    """One request, and its answer."""
    return lambda *arguments, **named: send(*arguments, **named).answer()


@pytest.fixture
def ask(send: Callable[..., Raw]) -> Callable[..., Raw]:
    """`ask(api, stream=True, ...)`: a chat request that has come to the engine, which waits."""

    def ask(api: Any, headers: str = "", **more: Any) -> Raw:
        submits = len(api.engine.submits) + more.get("n", 1)
        said = [{"role": "user", "content": "hi"}]
        body = {"model": "bible", "messages": said, "max_tokens": 4, **more}
        raw = send(api.inference, "POST", "/v1/chat/completions", body, headers)
        api.until(lambda: len(api.engine.submits) == submits)
        return raw

    return ask


@pytest.fixture
def elapsed() -> Callable[[], float]:
    start = time.monotonic()
    return lambda: time.monotonic() - start
