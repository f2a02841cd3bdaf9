"""https:, here http: to this machine: archives, folders, cuts, changes, lies and redirects."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from lorad.config import Settings
from lorad.sources import addresses, transfer
from lorad.sources.choice import fetcher_for
from lorad.sources.fetch import (
    Cancelled,
    FetchError,
    RemoteFile,
    Resolved,
    parse_reference,
)
from lorad.sources.patience import Patience
from lorad.sources.web import WebFetcher

WEIGHTS = bytes(range(256)) * 2048  # 512 KiB
ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": WEIGHTS,
    "tokenizer_config.json": b"{}",
}
QUICK = Patience(waits=(0.01, 0.01), longest=0.2)


@pytest.fixture
def server(servers: ModuleType) -> Iterator[Any]:
    with servers.FileServer() as made:
        made.files = {f"/sql/{name}": body for name, body in ADAPTER.items()}
        made.files["/sql/README.md"] = b"# hello"
        yield made


@pytest.fixture
def bring(server: Any, settings: Callable[..., Settings], folder: Path) -> Callable[..., Resolved]:
    """Resolve and fetch a path of the server into `folder`."""

    def run(path: str, *, into: Path = folder, **options: Any) -> Resolved:
        reference = parse_reference(path if "://" in path else server.url + path)
        source = WebFetcher(reference, settings(**options), patience=QUICK)
        resolved = source.resolve(reference)
        source.fetch(resolved, into, lambda done, total: None, lambda: False)
        return resolved

    return run


def tar(files: dict[str, bytes], *, mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return out.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(call: Callable[[], object]) -> FetchError:
    with pytest.raises(FetchError) as raised:
        call()
    error = raised.value
    assert "\n" not in error.message
    assert error.hint
    return error


# ----------------------------------------------------------------- folders
@pytest.mark.parametrize("path", ["/sql", "/sql/"])
def test_a_folder_is_fetched_by_the_names_that_lorad_reads(
    server: Any, bring: Callable[..., Resolved], folder: Path, path: str
) -> None:
    resolved = bring(path)
    assert contents(folder) == ADAPTER
    assert resolved.reference == server.url + path
    assert resolved.total_bytes == sum(map(len, ADAPTER.values()))
    assert not any("README" in asked for asked in server.asked())


def test_a_query_goes_with_every_file_and_into_no_message(
    server: Any, bring: Callable[..., Resolved], folder: Path, servers: ModuleType
) -> None:
    resolved = bring("/sql/?sig=verysecret")
    assert contents(folder) == ADAPTER
    assert all(path.endswith("?sig=verysecret") for path in server.asked())
    assert "verysecret" not in str(resolved)
    server.faults = [servers.on("config", servers.status(403), method="HEAD")] * 1
    server.faults.append(servers.on("config", servers.status(403)))
    error = refusal(lambda: bring("/sql/?sig=verysecret"))
    assert error.code == "source_denied"
    assert "expired" in error.message
    assert "verysecret" not in error.message + error.hint


def test_user_and_password_are_sent_and_not_shown(
    server: Any, bring: Callable[..., Resolved], servers: ModuleType
) -> None:
    server.url_with = server.url.replace("//", "//bob:hunter2@")
    resolved = bring(server.url_with + "/sql")
    assert all(h["authorization"].startswith("Basic ") for _, _, h in server.log)
    assert "hunter2" not in str(resolved)


def test_a_folder_without_an_adapter_is_not_found(bring: Callable[..., Resolved]) -> None:
    error = refusal(lambda: bring("/other"))
    assert error.code == "source_not_found"
    assert "/other" in error.message


def test_a_folder_without_weights_says_so(server: Any, bring: Callable[..., Resolved]) -> None:
    del server.files["/sql/adapter_model.safetensors"]
    error = refusal(lambda: bring("/sql"))
    assert (error.code, error.details["reason"]) == ("adapter_invalid", "E_NO_WEIGHTS")


def test_the_checksum_of_a_folder_is_of_its_weights(
    bring: Callable[..., Resolved], folder: Path
) -> None:
    right = hashlib.sha256(WEIGHTS).hexdigest()
    resolved = bring(f"/sql#sha256={right}")
    assert resolved.commit == right
    assert resolved.reference.endswith(f"#sha256={right}")
    assert contents(folder) == ADAPTER
    for path in folder.iterdir():
        path.unlink()
    error = refusal(lambda: bring(f"/sql#sha256={'0' * 64}"))
    assert error.code == "source_corrupt"
    assert "adapter_model.safetensors" not in contents(folder)


@pytest.mark.parametrize("etags", [True, False])
def test_a_file_that_is_cut_arrives_whole_nevertheless(
    server: Any,
    bring: Callable[..., Resolved],
    folder: Path,
    servers: ModuleType,
    etags: bool,
) -> None:
    server.etags = etags
    headers = server.headers_of(WEIGHTS)
    server.faults = [servers.on("safetensors", servers.cut(WEIGHTS, 0.6, headers))]
    bring("/sql")
    assert contents(folder) == ADAPTER
    again = [h.get("range") for how, path, h in server.log if how == "GET" and "model" in path]
    assert len(again) == 2
    # without an etag, what is there may belong to another version: from the start
    assert bool(again[1]) == etags


def test_a_part_that_is_there_is_gone_on_with(
    server: Any, settings: Callable[..., Settings], folder: Path, servers: ModuleType
) -> None:
    reference = parse_reference(server.url + "/sql")
    source = WebFetcher(reference, settings(), patience=QUICK)
    resolved = source.resolve(reference)
    seen: list[int] = []
    with pytest.raises(Cancelled):
        source.fetch(
            resolved,
            folder,
            lambda done, total: seen.append(done),
            lambda: seen[-1:] > [9000],
        )
    assert 0 < seen[-1] < len(WEIGHTS)
    again = WebFetcher(parse_reference(resolved.reference), settings(), patience=QUICK)
    server.log.clear()
    again.fetch(resolved, folder, lambda done, total: None, lambda: False)
    assert contents(folder) == ADAPTER
    assert not any(path[5:] == "config.json" for path in server.asked())
    assert any("range" in headers for _, _, headers in server.log)


def test_a_file_that_changes_while_it_is_fetched_is_a_conflict(
    server: Any, settings: Callable[..., Settings], folder: Path
) -> None:
    reference = parse_reference(server.url + "/sql")
    source = WebFetcher(reference, settings(), patience=QUICK)
    resolved = source.resolve(reference)
    server.files["/sql/adapter_model.safetensors"] = WEIGHTS[::-1]
    error = refusal(lambda: source.fetch(resolved, folder, lambda *_: None, lambda: False))
    assert error.code == "conflict"
    assert "adapter_model.safetensors" not in contents(folder)


# ----------------------------------------------------------------- archives
@pytest.mark.parametrize("top", ["", "sql-v1/"])
@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tgz", "zip"])
def test_an_archive_is_unpacked_with_or_without_a_top_folder(
    server: Any, bring: Callable[..., Resolved], folder: Path, kind: str, top: str
) -> None:
    files = {top + name: body for name, body in ADAPTER.items()}
    files |= {top + "README.md": b"x", top + "checkpoint-4/adapter_config.json": b"{}"}
    packed = zipped(files) if kind == "zip" else tar(files, mode="w" if kind == "tar" else "w:gz")
    server.files[f"/a.{kind}"] = packed
    digest = hashlib.sha256(packed).hexdigest()
    resolved = bring(f"/a.{kind}#sha256={digest}")
    assert contents(folder) == ADAPTER
    assert resolved.total_bytes == len(packed)
    assert resolved.reference == f"{server.url}/a.{kind}#sha256={digest}"


def test_an_archive_of_another_checksum_is_refused(
    server: Any, bring: Callable[..., Resolved], folder: Path
) -> None:
    server.files["/a.zip"] = zipped(ADAPTER)
    error = refusal(lambda: bring(f"/a.zip#sha256={'0' * 64}"))
    assert error.code == "source_corrupt"
    assert not [name for name in contents(folder) if not name.startswith(".")]


def test_a_signed_url_that_may_only_be_got_is_got(
    server: Any, bring: Callable[..., Resolved], folder: Path, servers: ModuleType
) -> None:
    server.files["/a.zip"] = zipped(ADAPTER)
    server.faults = [servers.on("/a.zip", servers.status(403), method="HEAD")]
    bring("/a.zip?X-Signature=verysecret")
    assert contents(folder) == ADAPTER


# ----------------------------------------------------------------- the server's faults
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (401, "source_denied"),
        (403, "source_denied"),
        (404, "source_not_found"),
        (410, "source_not_found"),
        (418, "source_unreachable"),
        (500, "source_unreachable"),
    ],
)
def test_what_the_server_answers_becomes_a_code(
    server: Any, bring: Callable[..., Resolved], servers: ModuleType, status: int, code: str
) -> None:
    server.faults = [
        fault
        for _ in range(9)  # a connection that breaks is tried again
        for fault in (
            servers.on("/a.zip", servers.status(status), method="HEAD"),
            servers.on("/a.zip", servers.status(status)),
        )
    ]
    if status == 500:
        server.faults = [servers.status(500)] * 9
    error = refusal(lambda: bring("/a.zip"))
    assert error.code == code
    assert "/a.zip" in error.message


def test_a_server_that_says_nothing_is_unreachable(
    server: Any, bring: Callable[..., Resolved], servers: ModuleType
) -> None:
    server.files["/a.zip"] = zipped(ADAPTER)
    server.faults = [servers.silence(0.3)] * 9
    error = refusal(lambda: bring("/a.zip", pull_timeout=0.05))
    assert error.code == "source_unreachable"
    assert "`[pull] timeout`" in error.message


def test_a_busy_server_is_waited_for_or_named(
    server: Any, bring: Callable[..., Resolved], folder: Path, servers: ModuleType
) -> None:
    server.faults = [servers.status(429, {"Retry-After": "0"})]
    bring("/sql")
    assert contents(folder) == ADAPTER
    server.faults = [servers.status(429, {"Retry-After": "100"})]
    error = refusal(lambda: bring("/sql"))
    assert (error.code, error.retry_after) == ("source_busy", 100.0)


def test_a_size_above_the_limit_is_refused_before_the_body(
    server: Any, bring: Callable[..., Resolved], servers: ModuleType
) -> None:
    server.files["/a.zip"] = b"x" * 4096
    error = refusal(lambda: bring("/a.zip", max_bytes=1000))
    assert (error.code, "max_adapter_bytes" in error.hint) == ("source_too_big", True)
    server.files["/wrong/adapter_config.json"] = b"x" * 65537
    server.files["/wrong/adapter_model.safetensors"] = b"x"
    error = refusal(lambda: bring("/wrong"))  # which no setting would let in
    assert (error.code, "max_adapter_bytes" in error.hint) == ("source_too_big", False)
    assert server.asked("GET") == []
    assert refusal(lambda: bring("/sql", max_bytes=1000)).code == "source_too_big"


def test_a_size_that_only_the_body_tells_is_refused_before_the_first_byte(
    server: Any, settings: Callable[..., Settings], folder: Path, servers: ModuleType
) -> None:
    server.files["/a.zip"] = b"x" * 4096
    reference = parse_reference(server.url + "/a.zip")
    source = WebFetcher(reference, settings(max_bytes=1000), patience=QUICK)
    resolved = Resolved(reference.text, (RemoteFile("a.zip", None),), None)
    seen: list[int] = []
    error = refusal(
        lambda: source.fetch(resolved, folder, lambda done, _: seen.append(done), lambda: False)
    )
    assert error.code == "source_too_big"
    assert "4096" in error.message
    assert seen == []


def test_a_server_that_knows_no_ranges_sends_all_of_it_again(
    server: Any, bring: Callable[..., Resolved], folder: Path, servers: ModuleType
) -> None:
    headers = server.headers_of(WEIGHTS)

    def whole(handler: Any, path: str) -> bool:
        handler.reply(200, WEIGHTS, headers)
        return True

    server.faults = [
        servers.on("safetensors", servers.cut(WEIGHTS, 0.6, headers)),
        servers.on("safetensors", whole),
    ]
    bring("/sql")
    assert contents(folder) == ADAPTER


def test_a_body_without_a_length_is_stopped_at_the_limit(
    server: Any, bring: Callable[..., Resolved], servers: ModuleType
) -> None:
    def endless(handler: Any, path: str) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        if handler.command == "GET":
            for _ in range(1000):
                try:
                    handler.wfile.write(b"x" * 65536)
                except OSError:
                    break
        return True

    server.faults = [endless, endless]
    assert refusal(lambda: bring("/a.zip", max_bytes=1 << 20)).code == "source_too_big"


# ----------------------------------------------------------------- redirects
def lead_to(target: str) -> Callable[[Any, str], bool]:
    def redirect(handler: Any, path: str) -> bool:
        handler.reply(302, b"", {"Location": target})
        return True

    return redirect


def test_a_redirect_is_followed_without_the_password(
    server: Any, bring: Callable[..., Resolved], folder: Path, servers: ModuleType
) -> None:
    server.files["/real.zip"] = zipped(ADAPTER)
    there = f"http://localhost:{server.port}/real.zip"
    server.faults = [servers.on("/a.zip", lead_to(there), method=how) for how in ("HEAD", "GET")]
    bring(server.url.replace("//", "//bob:hunter2@") + "/a.zip")
    assert contents(folder) == ADAPTER
    followed = [headers for _, path, headers in server.log if path == "/real.zip"]
    assert followed and all("authorization" not in headers for headers in followed)


def test_redirects_without_end_are_given_up(server: Any, bring: Callable[..., Resolved]) -> None:
    server.faults = [lead_to("/a.zip")] * 50
    error = refusal(lambda: bring("/a.zip"))
    assert error.code == "source_unreachable"
    assert len(server.log) <= 2 * (transfer.MAX_REDIRECTS + 1)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "http://lorad.test/a.zip", "ftp://x/y"])
def test_a_redirect_to_somewhere_else_entirely_is_refused(
    server: Any, bring: Callable[..., Resolved], target: str
) -> None:
    server.faults = [lead_to(target)] * 4
    error = refusal(lambda: bring("/a.zip"))
    assert error.code in ("source_unreachable", "bad_reference")


def test_https_never_leads_to_http() -> None:
    response = httpx.Response(302, headers={"Location": "http://127.0.0.1/a.zip"})
    error = refusal(lambda: addresses.following(response, httpx.URL("https://host/a.zip")))
    assert "from https to http" in error.message
    response = httpx.Response(302, headers={"Location": "/b.zip"})
    assert str(addresses.following(response, httpx.URL("https://u:p@host/a"))) == (
        "https://u:p@host/b.zip"
    )


# ----------------------------------------------------------------- what may be asked for
def test_plain_http_is_for_this_machine_alone_unless_allowed(
    settings: Callable[..., Settings],
) -> None:
    for host in ("example.test", "localhost.example.test", "10.0.0.1", "127.0.0.1.example.test"):
        reference = parse_reference(f"http://{host}/a.zip")
        error = refusal(lambda reference=reference: fetcher_for(reference, settings()))  # type: ignore[misc]
        assert error.code == "bad_reference"
        fetcher_for(reference, settings(pull_plain_http=True))
    for host in ("localhost", "127.0.0.1:80", "[::1]:8000", "127.9.9.9"):
        fetcher_for(parse_reference(f"http://{host}/a.zip"), settings())


def test_offline_nothing_is_asked_for(server: Any, settings: Callable[..., Settings]) -> None:
    reference = parse_reference(server.url + "/sql")
    error = refusal(lambda: fetcher_for(reference, settings(), offline=True))
    assert error.code == "source_offline"
    assert server.log == []
    # [hf] offline is of the hub; a server in the same rack may well be asked
    assert fetcher_for(reference, settings(hf_offline=True)).resolve(reference).files


def test_a_full_disk_is_called_so(
    bring: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    import errno

    from lorad.disk import mount_of
    from lorad.sources import disk

    def full(file: Any, chunk: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    assert refusal(lambda: bring("/sql")).code == "insufficient_storage"
    monkeypatch.undo()
    usage = disk.shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    error = refusal(lambda: bring("/sql"))
    assert error.code == "insufficient_storage"
    assert f"{mount_of(folder)} has 10 left" in error.message
