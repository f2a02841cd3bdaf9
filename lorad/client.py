"""The client of a running lorad: what `loractl`, the demo and tests use, and nothing of the server.

Goes in: where the daemon is (`unix:///path/admin.sock`, a bare path, or `http://host:port`).  Comes
out: `wire` Structs; `Unreachable` when nobody answers, with the reason told apart; `ApiError` when
the daemon refuses.  `openai` gives an openai-python client of any major version over the socket.
Importing it is cheap: httpx and openai are imported when first needed.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from lorad import wire, wire_explain, wire_status
from lorad.caller import TIMEOUT_SECONDS, ApiError, Caller, Unreachable
from lorad.client_openai import openai
from lorad.spelling import is_reference
from lorad.wire_operate import (
    DrainAsk,
    Drained,
    LogLine,
    LogPage,
    Reloaded,
    RequestCancelled,
    RollbackAsk,
    RunningConfig,
)
from lorad.wire_operations import Operation, OperationPage, PullPlan, PullStart
from lorad.wire_registry import (
    RegistryCheck,
    RegistryExport,
    RegistryImport,
    RegistryImported,
)
from lorad.wire_stream import Board, Delta

__all__ = ["ApiError", "LoradClient", "Unreachable", "openai"]

T = TypeVar("T")

_UPLOAD_BYTES = 1 << 20
_ADMIN = "/admin/v1"
#: By the name of the event; others may come one day.
_BOARD_MESSAGES: dict[str, Any] = {"board": Board, "delta": Delta, "event": wire.EventItem}


class LoradClient:
    """Blocking, one connection pool, not for several threads.  Close it, or use it in `with`.

    Every method may raise Unreachable and ApiError.
    """

    def __init__(self, host: str | os.PathLike[str], *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._caller = Caller(host, timeout)
        self.host = self._caller.host

    def __enter__(self) -> "LoradClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()

    # ----------------------------------------------------------------- any route
    def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str | int] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        """One call; `body` is encoded as JSON.  The bytes of a successful answer."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if content is None else {"content-type": "application/json"}
        with self._caller.open(
            method, path, content=content, headers=headers, query=query, timeout=timeout
        ) as response:
            return response.read()

    def get(self, path: str, kind: type[T], query: Mapping[str, str | int] | None = None) -> T:
        return msgspec.json.decode(self.request("GET", path, query=query), type=kind)

    def post(self, path: str, body: object, kind: type[T], *, timeout: float | None = None) -> T:
        answer = self.request("POST", path, body=body, timeout=timeout)
        return msgspec.json.decode(answer, type=kind)

    # ----------------------------------------------------------------- both sockets
    def ping(self) -> None:
        """Return if the daemon's loop runs."""
        self.request("GET", "/livez")

    def ready(self) -> str:
        """ "" when requests are taken, else the code of the reason."""
        try:
            self.request("GET", "/readyz")
        except ApiError as error:
            if error.status != 503:
                raise
            return error.code
        return ""

    def version(self) -> wire_status.Version:
        return self.get("/version", wire_status.Version)

    # ----------------------------------------------------------------- pictures (admin.sock)
    def metrics(self) -> str:
        """All metrics, in Prometheus' text format."""
        return self.request("GET", "/metrics").decode()

    def status(self) -> wire_status.Status:
        return self.get(f"{_ADMIN}/status", wire_status.Status)

    def slots(self) -> wire.SlotPage:
        return self.get(f"{_ADMIN}/slots", wire.SlotPage)

    def adapters(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        q: str | None = None,
        sort: str = "name",
        limit: int = 100,
        cursor: str | None = None,
    ) -> wire.AdapterPage:
        """One page; ask again with its `cursor` until that is None."""
        asked = {"state": state, "tenant": tenant, "model": model, "q": q}
        asked |= {"cursor": cursor, "sort": sort}
        query: dict[str, str | int] = {k: v for k, v in asked.items() if v is not None}
        return self.get(f"{_ADMIN}/adapters", wire.AdapterPage, query | {"limit": limit})

    def every_adapter(self, **filters: Any) -> Iterator[wire.Adapter]:
        """All pages of `adapters`, one after the other."""
        cursor: str | None = None
        while True:
            page = self.adapters(cursor=cursor, **filters)
            yield from page.items
            cursor = page.cursor
            if cursor is None:
                return

    def adapter(self, name: str) -> wire.AdapterDetail:
        """Also of one that is called `something/explain`, which is a route of its own."""
        return self.get(_adapter_path(name), wire.AdapterDetail, {"show": 1})

    def explain(self, name: str) -> wire_explain.Explained:
        """Why it is or is not served now."""
        return self.get(f"{_adapter_path(name)}/explain", wire_explain.Explained)

    def recent_events(self, *, since: int | None = None, limit: int = 100) -> wire.EventPage:
        query: dict[str, str | int] = {"limit": limit}
        if since is not None:
            query["since"] = since
        return self.get(f"{_ADMIN}/events", wire.EventPage, query)

    def follow_events(self, last_event_id: str = "") -> Iterator[tuple[str, wire.EventItem]]:
        """(id to resume from, event) until the daemon ends; an item `gap`: some were missed."""
        return self._follow("events", last_event_id, wire.EventItem)

    def recent_logs(self, *, limit: int = 200) -> LogPage:
        return self.get(f"{_ADMIN}/logs", LogPage, {"limit": limit})

    def follow_logs(self, last_id: str = "") -> Iterator[tuple[str, LogLine]]:
        """(id to resume from, line) until the daemon ends."""
        return self._follow("logs", last_id, LogLine)

    # ----------------------------------------------------------------- live (admin.sock)
    def board(self) -> Board:
        """All that a dashboard shows, as it is now."""
        return self.get(f"{_ADMIN}/board", Board)

    def follow_board(
        self, interval: float = 1.0, last_event_id: str = ""
    ) -> Iterator[tuple[str, Board | Delta | wire.EventItem]]:
        """(id to resume from, message) until the daemon ends; `lorad.board_apply` applies them.

        `interval`: seconds between two deltas, 0.2 to 10.  A board may come again at any time.
        """
        headers = _stream_headers(last_event_id)
        with self._caller.open(
            "GET", f"{_ADMIN}/stream", headers=headers, query={"interval": interval}, stream=True
        ) as response:
            for event_id, name, data in response.messages():
                last_event_id = event_id or last_event_id
                if (kind := _BOARD_MESSAGES.get(name)) is not None:
                    yield last_event_id, msgspec.json.decode(data, type=kind)

    # ----------------------------------------------------------------- wishes (admin.sock)
    def load(self, *names: str, **options: Any) -> wire.Results:
        """`options` are the fields of `wire.Names`, here and below."""
        return self._wish("load", names, options)

    def evict(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("evict", names, options)

    def pin(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("pin", names, options)

    def unpin(self, *names: str, **options: Any) -> wire.Results:
        return self._wish("unpin", names, options)

    def reload(self) -> Reloaded:
        """As SIGHUP, with the errors: raises ApiError invalid_config."""
        return self.post(f"{_ADMIN}/reload", {}, Reloaded)

    def config(self) -> RunningConfig:
        """The settings in effect, and what waits for a restart."""
        return self.get(f"{_ADMIN}/config", RunningConfig)

    def drain(self, ask: DrainAsk) -> Drained:
        """Returns when nothing runs; ApiError deadline_exceeded when something still does."""
        patience = ask.timeout_s + TIMEOUT_SECONDS
        return self.post(f"{_ADMIN}/drain", ask, Drained, timeout=patience)

    def cancel_request(self, id: str) -> RequestCancelled:
        """End one request, by its id on the board; ApiError not_found if it is not there."""
        answer = self.request("DELETE", f"{_ADMIN}/requests/{quote(id, safe='')}")
        return msgspec.json.decode(answer, type=RequestCancelled)

    def resume(self, name: str | None = None) -> Drained:
        return self.post(f"{_ADMIN}/resume", DrainAsk(name=name), Drained)

    def verify(self, *names: str, **options: Any) -> wire.Verifications:
        wish = wire.Names(names=names, **options)
        patience = wish.timeout_s * max(len(names), 1) + TIMEOUT_SECONDS  # one after another
        return self.post(f"{_ADMIN}/verify", wish, wire.Verifications, timeout=patience)

    def patch(self, name: str, patch: wire.AdapterPatch) -> wire.AdapterDetail:
        answer = self.request("PATCH", _adapter_path(name), body=patch)
        return msgspec.json.decode(answer, type=wire.AdapterDetail)

    def remove(self, name: str, *, keep_files: bool = False) -> wire.Removed:
        query = {"keep_files": "true" if keep_files else "false"}
        answer = self.request("DELETE", _adapter_path(name), query=query)
        return msgspec.json.decode(answer, type=wire.Removed)

    def rollback(self, ask: RollbackAsk, *, timeout: float = 600.0) -> wire.Added:
        """Of a gateway: a name means an earlier revision again, everywhere.  ApiError
        deadline_exceeded when it goes on after `timeout`; a daemon answers not_found."""
        ask = msgspec.structs.replace(ask, timeout_s=timeout)
        patience = timeout + TIMEOUT_SECONDS
        return self.post(f"{_ADMIN}/rollback", ask, wire.Added, timeout=patience)

    def gc(self, *, dry_run: bool = False, timeout_s: float = 600.0) -> wire.Garbage:
        """Remove from the store what nobody needs, or say what that would be."""
        return self.post(
            f"{_ADMIN}/gc", wire.GcAsk(dry_run=dry_run), wire.Garbage, timeout=timeout_s
        )

    def check_registry(self) -> RegistryCheck:
        return self.get(f"{_ADMIN}/registry/check", RegistryCheck)

    def backup_registry(self, *, timeout: float = 600.0) -> bytes:
        """A database of one moment: the whole file."""
        return self.request("GET", f"{_ADMIN}/registry/backup", timeout=timeout)

    def export_registry(self) -> RegistryExport:
        return self.get(f"{_ADMIN}/registry/export", RegistryExport)

    def import_registry(self, ask: RegistryImport, *, timeout: float = 600.0) -> RegistryImported:
        """One after another; a body of more than some thousand lines is refused."""
        return self.post(f"{_ADMIN}/registry/import", ask, RegistryImported, timeout=timeout)

    def upload(
        self, folder: Path, start: wire.UploadStart, *, timeout: float = 600.0
    ) -> wire.Added:
        """Send the files of `folder` that the daemon reads, and have them added.

        A README, checkpoints and the like stay behind.  `timeout` is for the adding, in seconds.
        FileNotFoundError or another OSError when the folder cannot be read.
        """
        there = sorted(p for p in folder.iterdir() if p.is_file())
        opened = self.post(f"{_ADMIN}/uploads", start, wire.UploadOpen)
        path = f"{_ADMIN}/uploads/{opened.upload_id}"
        try:
            for file in (p for p in there if p.name in opened.files):
                self._put(f"{path}/files/{quote(file.name, safe='')}", file)
            commit = wire.UploadCommit(timeout_s=timeout)
            # The daemon answers within the time; the connection waits a little longer.
            patience = timeout + TIMEOUT_SECONDS
            return self.post(f"{path}/commit", commit, wire.Added, timeout=patience)
        except BaseException:
            self._forget(path)
            raise

    # ----------------------------------------------------------------- operations (admin.sock)
    def pull(self, start: PullStart, *, timeout: float = TIMEOUT_SECONDS) -> Operation:
        """Begin it; what the source says comes later, in `operation`."""
        return self.post(f"{_ADMIN}/pulls", start, Operation, timeout=timeout)

    def plan_pull(self, start: PullStart, *, timeout: float = TIMEOUT_SECONDS) -> PullPlan:
        """What it would fetch; asks the source."""
        start = msgspec.structs.replace(start, dry_run=True)
        return self.post(f"{_ADMIN}/pulls", start, PullPlan, timeout=timeout)

    def operations(self, *, live: bool = False, limit: int = 100) -> OperationPage:
        query: dict[str, str | int] = {"live": "true" if live else "false", "limit": limit}
        return self.get(f"{_ADMIN}/operations", OperationPage, query)

    def operation(self, id: str, *, wait: float = 0.0) -> Operation:
        """As it is, or as it is once it has ended or `wait` seconds have passed, 30 at most."""
        query: dict[str, str | int] = {"wait_ms": int(wait * 1000)}
        patience = wait + TIMEOUT_SECONDS  # the daemon answers in time, the connection waits longer
        answer = self.request("GET", _operation_path(id), query=query, timeout=patience)
        return msgspec.json.decode(answer, type=Operation)

    def cancel_operation(self, id: str) -> Operation:
        answer = self.request("DELETE", _operation_path(id))
        return msgspec.json.decode(answer, type=Operation)

    # ----------------------------------------------------------------- inference.sock
    def stream(
        self, path: str, body: object, *, timeout: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed OpenAI answer; an error event raises ApiError.

        `timeout`, in seconds, is for all of it: Unreachable after that.
        """
        content = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        with self._caller.open(
            "POST", path, content=content, headers=headers, timeout=timeout, stream=True
        ) as response:
            for _, data in response.events():
                if data == "[DONE]":
                    return
                chunk: dict[str, Any] = msgspec.json.decode(data)
                if "error" in chunk:
                    raise ApiError(200, msgspec.convert(chunk["error"], wire.ErrorBody))
                yield chunk

    # ----------------------------------------------------------------- details
    def _follow(self, what: str, last_id: str, kind: type[T]) -> Iterator[tuple[str, T]]:
        headers = _stream_headers(last_id)
        with self._caller.open("GET", f"{_ADMIN}/{what}", headers=headers, stream=True) as response:
            for event_id, data in response.events():
                last_id = event_id or last_id
                yield last_id, msgspec.json.decode(data, type=kind)

    def _wish(self, verb: str, names: tuple[str, ...], options: dict[str, Any]) -> wire.Results:
        wish = wire.Names(names=names, **options)
        # The daemon answers within the wish's own time; the connection waits a little longer.
        timeout = wish.timeout_s + TIMEOUT_SECONDS
        return self.post(f"{_ADMIN}/{verb}", wish, wire.Results, timeout=timeout)

    def _put(self, path: str, file: Path) -> None:
        with file.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            headers = {"content-length": str(size), "content-type": "application/octet-stream"}
            pieces = iter(lambda: source.read(_UPLOAD_BYTES), b"")
            with self._caller.open("PUT", path, content=pieces, headers=headers) as response:
                response.read()

    def _forget(self, path: str) -> None:
        """Best effort: the daemon discards what nobody continues."""
        try:
            self.request("DELETE", path)
        except (ApiError, Unreachable):
            return


def _stream_headers(last_id: str) -> dict[str, str]:
    headers = {"accept": "text/event-stream"}
    return headers | {"last-event-id": last_id} if last_id else headers


def _adapter_path(name: str) -> str:
    safe = "" if is_reference(name) else "/@"  # `//` of s3:// would be taken for one
    return f"{_ADMIN}/adapters/{quote(name, safe=safe)}"


def _operation_path(id: str) -> str:
    return f"{_ADMIN}/operations/{quote(id, safe='')}"
