"""One HTTP call to a daemon: over a Unix socket or TCP, with httpx's errors told apart.

Goes in: a host and the parts of a request.  Comes out: bytes, lines, or events of an answer;
`Unreachable` when nobody answers, `ApiError` when the daemon refuses.  Knows no route.  httpx is
imported when the first Caller is made.
"""

import errno
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec

from lorad import wire

Why = Literal["denied", "stale", "absent", "loading", "lost"]

TIMEOUT_SECONDS = 30.0
#: The server sends a comment every 15 s; a stream that is silent for this long is dead.
SILENCE_SECONDS = 120.0
#: No message of a daemon's is near it; who sends more without an end of line is none.
MAX_LINE_BYTES = 64 << 20

_WHY: dict[int, Why] = {
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.ECONNREFUSED: "stale",
    errno.ENOENT: "absent",
    errno.ENOTDIR: "absent",
}
_SENTENCES: dict[Why, str] = {
    "denied": "permission denied",
    "stale": "nobody listens on the socket (a stale file of a daemon that is gone)",
    "absent": "there is no socket: lorad is not running, or listens elsewhere",
    "loading": "it holds the socket but does not answer yet",
    "lost": "the connection broke before the answer was whole",
}


#: The key for a daemon at http://.
KEY_VARIABLE = "LORAD_API_KEY"


class Unreachable(Exception):
    """Nobody answered at `host`; `kind` says why."""

    def __init__(self, host: str, kind: Why) -> None:
        super().__init__(f"cannot reach lorad at {host}: {_SENTENCES[kind]}")
        self.host = host
        self.kind = kind


class ApiError(Exception):
    """The daemon refused; `code` is a row of `lorad.errors.TABLE`."""

    def __init__(self, status: int, body: wire.ErrorBody) -> None:
        super().__init__(body.message)
        self.status = status
        self.code = body.code
        self.message = body.message
        self.param = body.param
        self.hint = body.details.get("hint", "")
        self.details = {key: value for key, value in body.details.items() if key != "hint"}


class Caller:
    """One connection pool.  `host` is as shown to people.

    It sends the key of LORAD_API_KEY: command lines are seen by everybody.
    """

    def __init__(self, host: str | os.PathLike[str], timeout: float) -> None:
        _import_httpx()
        import httpx

        key = os.environ.get(KEY_VARIABLE, "")
        self.host, base_url, self._uds = address(host)
        self._answered = not self._uds
        # The certificates of all authorities, 20 ms of reading, are for https alone.
        secure = base_url.startswith("https:")
        transport = httpx.HTTPTransport(uds=self._uds, verify=secure) if self._uds else None
        self._http = httpx.Client(
            base_url=base_url,
            transport=transport,
            timeout=timeout,
            trust_env=False,
            verify=secure,
            headers={"authorization": f"Bearer {key}"} if key else {},
        )

    def close(self) -> None:
        self._http.close()

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        content: Any = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str | int | float] | None = None,
        timeout: float | None = None,
        stream: bool = False,
    ) -> Iterator["Answer"]:
        """The answer to one call, closed at the end of `with`.

        `timeout`, in seconds: how long it may be silent; of a stream, how long it may take in all.
        Unreachable after that.
        """
        import httpx

        wait: Any = httpx.USE_CLIENT_DEFAULT if timeout is None else timeout
        if stream:
            silence = SILENCE_SECONDS if timeout is None else min(timeout, SILENCE_SECONDS)
            wait = httpx.Timeout(TIMEOUT_SECONDS, read=silence)
        try:
            request = self._http.build_request(
                method, path, content=content, headers=headers, params=query, timeout=wait
            )
        except httpx.InvalidURL as error:
            raise _unsayable(error) from None
        self._look()
        self._answered = not self._uds
        began = time.monotonic()
        with _told(self.host):
            response = self._http.send(request, stream=True)
        try:
            self._answered = True
            answer = Answer(self.host, response)
            if response.is_error:
                raise _api_error(response.status_code, answer.read())
            if stream and timeout is not None:
                with _cut(response, timeout - (time.monotonic() - began)):
                    yield answer
            else:
                yield answer
        finally:
            response.close()

    def _look(self) -> None:
        """Is anybody there?  httpcore leaves the socket of a failed connect open, we do not."""
        if self._answered:
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self._uds)
            except OSError as error:
                raise Unreachable(self.host, _why(error)) from error


class Answer:
    """The body of a successful answer."""

    def __init__(self, host: str, response: Any) -> None:
        self._host, self._response = host, response

    def read(self) -> bytes:
        with _told(self._host):
            body: bytes = self._response.read()
            return body

    def lines(self) -> Iterator[str]:
        """Split at newlines only: JSON may hold other line ends."""
        held = b""
        with _told(self._host):
            for piece in self._response.iter_bytes():
                *whole, held = (held + piece).split(b"\n")
                for line in whole:
                    yield line.decode()
                if len(held) > MAX_LINE_BYTES:
                    raise Unreachable(self._host, "lost")

    def events(self) -> Iterator[tuple[str, str]]:
        """(id, data) of every server-sent event; comments are skipped."""
        for event_id, _, data in self.messages():
            yield event_id, data

    def messages(self) -> Iterator[tuple[str, str, str]]:
        """(id, name, data) of every server-sent event."""
        event_id = kind = ""
        data: list[str] = []
        for line in self.lines():
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line and data:
                yield event_id, kind, "\n".join(data)
                event_id, kind, data = "", "", []
            elif name == "data":
                data.append(value)
            elif name == "id" and value.isascii() and value.isprintable():  # it will be a header
                event_id = value
            elif name == "event":
                kind = value


def _import_httpx() -> None:
    """Without its own command line, which imports rich and pygments: half of its time."""
    if "httpx" in sys.modules:
        return
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("httpx")
    finally:
        del sys.modules["httpx._main"]


def address(host: str | os.PathLike[str]) -> tuple[str, str, str]:
    """(as shown to people, base URL, socket path or "")."""
    text = os.fspath(host)
    if text.startswith(("http://", "https://")):
        return text, text, ""
    path = text.removeprefix("unix://")
    return f"unix://{path}", "http://lorad", path


@contextmanager
def _cut(response: Any, seconds: float) -> Iterator[None]:
    """After so long the connection is shut, which wakes who reads from it: a server that sends
    nothing but its comments is not silent."""
    connection: socket.socket | None = response.extensions["network_stream"].get_extra_info(
        "socket"
    )
    if connection is None:
        yield
        return
    timer = threading.Timer(max(seconds, 0.0), _shut, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _told(host: str) -> Iterator[None]:
    """httpx's errors as Unreachable."""
    import httpx

    try:
        yield
    except (httpx.TransportError, httpx.DecodingError) as error:
        garbled = httpx.ProtocolError | httpx.DecodingError
        broken = isinstance(error, httpx.NetworkError | garbled)
        lost = broken and not isinstance(error, httpx.ConnectError)
        raise Unreachable(host, "lost" if lost else _why(error)) from error


def _why(error: BaseException) -> Why:
    """The errno, which httpx keeps at the bottom of a chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _WHY:
            return _WHY[cause.errno]
        cause = cause.__cause__ or cause.__context__
    return "loading"


def _unsayable(error: Exception) -> ApiError:
    """A name of a hundred thousand letters is nobody's; it need not be asked for."""
    words = f"this cannot be asked for: {error}"
    return ApiError(400, wire.ErrorBody(message=words, type="invalid", code="invalid_value"))


def _api_error(status: int, body: bytes) -> ApiError:
    try:
        refused = ApiError(status, msgspec.json.decode(body, type=wire.ErrorEnvelope).error)
        # The server tells of a header; who uses this client has the variable.
        refused.hint = refused.hint.replace("authorization: Bearer KEY", "LORAD_API_KEY=KEY")
        return refused
    except msgspec.DecodeError:
        message = f"the server answered {status} without an explanation"
        return ApiError(
            status, wire.ErrorBody(message=message, type="server_error", code="internal_error")
        )
