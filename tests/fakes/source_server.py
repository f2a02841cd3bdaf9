"""Servers that adapters are fetched from, small but real: sockets, HTTP, and scripted faults.

`FileServer` serves bytes by path, with ETag, Range and If-Range.  `HubServer` adds what
huggingface-hub asks a hub for: the model's page in JSON and `resolve`, which leads for large files
to another origin, as the hub's storage does.  `log` is what was asked; `faults` what goes wrong.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: (handler, path) -> whether it answered.  Faults are used up from the front.
Fault = Callable[["Handler", str], bool]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: "FileServer"

    def do_GET(self) -> None:
        self.files.answer(self)

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, body: bytes, headers: dict[str, str], *, share: float = 1.0) -> None:
        """A file, or the range of it that was asked for; with `share` below 1 the connection ends
        after that part of what was announced."""
        start = 0
        asked = self.headers.get("Range", "")
        known = self.headers.get("If-Range", headers.get("ETag"))
        if asked.startswith("bytes=") and known == headers.get("ETag"):
            start = int(asked[6:].rstrip("-"))
            if start >= len(body):
                self.reply(416, b"", {"Content-Range": f"bytes */{len(body)}"})
                return
        part = body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for name, value in {**headers, "Content-Length": str(len(part))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if share < 1.0:
            self.wfile.write(part[: int(len(part) * share)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self.wfile.write(part)


class FileServer:
    """`files`: path -> bytes.  Use as a context manager."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etags = True
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.faults: list[Fault] = []
        handler = type("Bound", (Handler,), {"files": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, method: str = "") -> list[str]:
        """The paths that were asked for."""
        return [path for how, path, _ in self.log if how == (method or how)]

    def answer(self, handler: Handler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.log.append((handler.command, handler.path, headers))
        if self.faults and self.faults[0](handler, handler.path):
            self.faults.pop(0)
            return
        self.serve(handler, urlsplit(handler.path).path)

    def serve(self, handler: Handler, path: str) -> None:
        if path not in self.files:
            handler.reply(404, b"nothing here")
            return
        handler.send_file(self.files[path], self.headers_of(self.files[path]))

    def headers_of(self, body: bytes) -> dict[str, str]:
        return {"ETag": f'"{hashlib.md5(body).hexdigest()}"'} if self.etags else {}


class HubServer(FileServer):
    """One repository.  `commits`: commit -> name -> bytes; `refs`: branch or tag -> commit."""

    def __init__(self, repo: str, commit: str, files: dict[str, bytes]) -> None:
        super().__init__()
        self.repo = repo
        self.commits = {commit: files}
        self.refs = {"main": commit}
        self.token = ""  # that is wanted, if any
        self.gated = False  # files alone, as on the hub
        self.lies: dict[str, bytes] = {}  # name -> what is sent in the place of the file

    def serve(self, handler: Handler, path: str) -> None:
        if path.startswith("/cdn/"):
            self._storage(handler, path.removeprefix("/cdn/"))
            return
        sent = handler.headers.get("Authorization", "")
        if self.token and sent != f"Bearer {self.token}":
            handler.reply(401, b'{"error": "Invalid username or password."}')
        elif path.startswith(f"/api/models/{self.repo}/revision/"):
            self._page(handler, path.rsplit("/revision/", 1)[1])
        elif path.startswith(f"/{self.repo}/resolve/"):
            revision, name = path.split("/resolve/", 1)[1].split("/", 1)
            self._resolve(handler, revision, name)
        else:
            handler.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _page(self, handler: Handler, revision: str) -> None:
        commit = self.refs.get(revision.replace("%2F", "/"), revision)
        if commit not in self.commits:
            handler.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        page = {
            "_id": "1",
            "id": self.repo,
            "modelId": self.repo,
            "sha": commit,
            "private": False,
            "gated": "manual" if self.gated else False,
            "tags": [],
            "downloads": 0,
            "siblings": [_sibling(n, body) for n, body in self.commits[commit].items()],
        }
        handler.reply(200, json.dumps(page).encode(), {"Content-Type": "application/json"})

    def _resolve(self, handler: Handler, revision: str, name: str) -> None:
        commit = self.refs.get(revision, revision)
        if self.gated:
            handler.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name not in self.commits.get(commit, {}):
            handler.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            body = self.commits[commit][name]
            about = {"X-Repo-Commit": commit, "ETag": f'"{etag(name, body)}"'}
            if is_large(name):
                about |= {"X-Linked-ETag": about["ETag"], "X-Linked-Size": str(len(body))}
                where = f"http://localhost:{self.port}/cdn/{commit}/{name}?X-Signature=verysecret"
                handler.reply(302, b"", {**about, "Location": where})
            else:
                handler.send_file(self.lies.get(name, body), about)

    def _storage(self, handler: Handler, rest: str) -> None:
        commit, name = rest.split("/", 1)
        body = self.commits[commit][name]
        handler.send_file(self.lies.get(name, body), {"ETag": '"of-the-storage"'})


def is_large(name: str) -> bool:
    """What the hub keeps with LFS, known by its sha256; the rest by git's id."""
    return name.endswith((".safetensors", ".bin", ".model", "tokenizer.json"))


def git_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def etag(name: str, body: bytes) -> str:
    return hashlib.sha256(body).hexdigest() if is_large(name) else git_id(body)


def _sibling(name: str, body: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"rfilename": name, "size": len(body), "blobId": git_id(body)}
    if is_large(name):
        sha256 = hashlib.sha256(body).hexdigest()
        row["blobId"] = git_id(sha256.encode())
        row["lfs"] = {"sha256": sha256, "size": len(body), "pointerSize": 130}
    return row


# ----------------------------------------------------------------- faults
def on(part: str, fault: Fault, *, method: str = "GET") -> Fault:
    """`fault` for the next request whose path holds `part`."""

    def once(handler: Handler, path: str) -> bool:
        return handler.command == method and part in path and fault(handler, path)

    return once


def status(code: int, headers: dict[str, str] | None = None) -> Fault:
    def refuse(handler: Handler, path: str) -> bool:
        handler.reply(code, b"{}", headers)
        return True

    return refuse


def cut(body: bytes, share: float, headers: dict[str, str] | None = None) -> Fault:
    """Send that part of `body`, having announced all of it."""

    def short(handler: Handler, path: str) -> bool:
        handler.send_file(body, headers or {}, share=share)
        return True

    return short


def silence(seconds: float) -> Fault:
    """Send nothing for as long, then end."""

    def wait(handler: Handler, path: str) -> bool:
        time.sleep(seconds)
        handler.close_connection = True
        return True

    return wait


def hang_up(handler: Handler, path: str) -> bool:
    """End the connection without a word."""
    handler.close_connection = True
    handler.connection.shutdown(2)
    return True
