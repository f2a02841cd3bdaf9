"""A hub that fails in every way that hubs fail: what is said, what stays, and what goes on."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from lorad.config import Settings
from lorad.sources.fetch import Cancelled, FetchError, Resolved, parse_reference
from lorad.sources.hub import HubFetcher
from lorad.sources.patience import Patience

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"
REPO = "acme/sql"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "README.md": b"# hello",
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.bin": b"pickle",
    "adapter_model.safetensors": WEIGHTS,
    "checkpoint-4/adapter_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.json": b'{"model": {}}',
    "training_args.bin": b"pickle",
}
WANTED = {
    name: FILES[name]
    for name in (
        *("adapter_config.json", "adapter_model.safetensors"),
        *("chat_template.jinja", "tokenizer.json"),
    )
}
QUICK = Patience(waits=(0.01, 0.01), longest=0.2)
TOKEN = "hf_abcdefghijklmnop"


@pytest.fixture
def hub(servers: ModuleType) -> Iterator[Any]:
    with servers.HubServer(REPO, COMMIT, dict(FILES)) as server:
        yield server


@pytest.fixture
def fetcher(hub: Any, settings: Callable[..., Settings]) -> Callable[..., HubFetcher]:
    def make(*, token: str = "", offline: bool = False, **options: Any) -> HubFetcher:
        made = settings(hf_endpoint=hub.url, **options)
        return HubFetcher(made, token=token, offline=offline, patience=QUICK)

    return make


def ref(text: str = f"hf:{REPO}") -> Any:
    return parse_reference(text)


def bring(fetcher: HubFetcher, folder: Path, text: str = f"hf:{REPO}") -> Resolved:
    resolved = fetcher.resolve(ref(text))
    # what is to be fetched may have been stored meanwhile
    resolved = msgspec.json.decode(msgspec.json.encode(resolved), type=Resolved)
    fetcher.fetch(resolved, folder, lambda done, total: None, lambda: False)
    return resolved


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(call: Callable[[], object]) -> FetchError:
    with pytest.raises(FetchError) as raised:
        call()
    error = raised.value
    assert "\n" not in error.message
    assert error.hint
    assert TOKEN not in error.message + error.hint
    assert "verysecret" not in error.message + error.hint
    return error


# ----------------------------------------------------------------- the right way
def test_a_branch_becomes_a_commit_and_the_adapters_files_arrive_alone(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    source = fetcher()
    resolved = source.resolve(ref())
    assert resolved.commit == COMMIT
    assert resolved.reference == f"hf:{REPO}@{COMMIT}"
    assert {f.name: f.size for f in resolved.files} == {n: len(b) for n, b in WANTED.items()}
    assert resolved.total_bytes == sum(map(len, WANTED.values()))
    source.fetch(resolved, folder, lambda *at: seen.append(at), lambda: False)
    assert contents(folder) == WANTED
    assert seen == sorted(seen)
    assert seen[-1] == (resolved.total_bytes, resolved.total_bytes)
    asked = [path.split("?")[0].rsplit("/", 1)[1] for path in hub.asked() if "/resolve/" in path]
    assert sorted(asked) == sorted(WANTED)


def test_a_commit_stays_itself_when_the_branch_moves_on(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path
) -> None:
    hub.commits[OTHER] = {**FILES, "adapter_model.safetensors": b"other"}
    hub.refs["main"] = OTHER
    assert fetcher().resolve(ref()).commit == OTHER
    assert bring(fetcher(), folder, f"hf:{REPO}@{COMMIT}").commit == COMMIT
    assert contents(folder) == WANTED


def test_a_second_fetch_takes_the_files_from_the_cache(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    resolved = bring(fetcher(), folder)
    again = tmp_path / "again"
    again.mkdir()
    hub.log.clear()
    fetcher().fetch(resolved, again, lambda done, total: None, lambda: False)
    assert contents(again) == WANTED
    assert hub.log == []


def test_the_cache_is_laid_out_as_the_library_reads_it(
    fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    bring(fetcher(), folder)
    cache = tmp_path / "cache"
    for name, body in WANTED.items():
        found = try_to_load_from_cache(REPO, name, cache_dir=cache, revision="main")
        assert isinstance(found, str)
        assert Path(found).read_bytes() == body
    path = hf_hub_download(REPO, "tokenizer.json", cache_dir=cache, local_files_only=True)
    assert Path(path).read_bytes() == WANTED["tokenizer.json"]
    assert not list(cache.rglob("*.lorad"))


# ----------------------------------------------------------------- tokens
def test_the_token_goes_to_the_hub_and_not_to_its_storage(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path
) -> None:
    hub.token = TOKEN
    bring(fetcher(token=TOKEN), folder)
    for _, path, headers in hub.log:
        assert ("authorization" in headers) == ("/cdn/" not in path)
    assert any("/cdn/" in path for path in hub.asked())


def test_a_token_comes_from_the_call_or_the_file_or_the_variable(
    hub: Any,
    fetcher: Callable[..., HubFetcher],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sent() -> str:
        return str(hub.log[-1][2].get("authorization", ""))

    fetcher().resolve(ref())
    assert sent() == ""
    monkeypatch.setenv("HF_TOKEN", "hf_variable")
    fetcher().resolve(ref())
    assert sent() == "Bearer hf_variable"
    file = tmp_path / "token"
    file.write_text("hf_file\n")
    fetcher(hf_token_file=str(file)).resolve(ref())
    assert sent() == "Bearer hf_file"
    fetcher(hf_token_file=str(file), token="hf_call").resolve(ref())
    assert sent() == "Bearer hf_call"


def test_a_token_file_that_holds_none_is_named(
    fetcher: Callable[..., HubFetcher], tmp_path: Path
) -> None:
    missing = refusal(lambda: fetcher(hf_token_file=str(tmp_path / "none")).resolve(ref()))
    assert str(tmp_path / "none") in missing.message
    (tmp_path / "empty").write_text("\n")
    empty = refusal(lambda: fetcher(hf_token_file=str(tmp_path / "empty")).resolve(ref()))
    assert empty.code == missing.code == "source_denied"
    strange = refusal(lambda: fetcher(token="hf_ümlaut\nX-Other: 1").resolve(ref()))
    assert strange.code == "source_denied"
    assert "ümlaut" not in strange.message


def test_without_a_token_a_private_repository_is_denied(
    hub: Any, fetcher: Callable[..., HubFetcher]
) -> None:
    hub.token = TOKEN
    error = refusal(lambda: fetcher().resolve(ref()))
    assert error.code == "source_denied"
    assert "wants a token" in error.message
    wrong = refusal(lambda: fetcher(token="hf_wrong").resolve(ref()))
    assert wrong.code == "source_denied"
    assert "does not accept the token" in wrong.message
    assert "hf_wrong" not in wrong.message + wrong.hint


def test_a_gated_repository_is_called_gated_though_its_page_may_be_read(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path
) -> None:
    hub.gated = True
    error = refusal(lambda: bring(fetcher(), folder))
    assert error.code == "source_denied"
    assert "gated" in error.message
    assert f"{hub.url}/{REPO}" in error.hint
    assert contents(folder) == {}


# ----------------------------------------------------------------- what is not there
def test_a_repository_that_is_not_there(fetcher: Callable[..., HubFetcher]) -> None:
    error = refusal(lambda: fetcher().resolve(ref("hf:acme/other")))
    assert error.code == "source_not_found"
    assert "hf:acme/other" in error.message


def test_a_revision_that_is_not_there(fetcher: Callable[..., HubFetcher]) -> None:
    error = refusal(lambda: fetcher().resolve(ref(f"hf:{REPO}@v9")))
    assert error.code == "source_not_found"
    assert "v9" in error.message


def test_a_repository_without_an_adapter_says_what_is_there_instead(
    hub: Any, fetcher: Callable[..., HubFetcher]
) -> None:
    hub.commits[COMMIT] = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    pickle = refusal(lambda: fetcher().resolve(ref()))
    assert (pickle.code, pickle.details["reason"]) == ("adapter_invalid", "E_PICKLE")
    hub.commits[COMMIT] = {
        "checkpoint-4/adapter_config.json": b"{}",
        "checkpoint-4/adapter_model.safetensors": b"",
    }
    nested = refusal(lambda: fetcher().resolve(ref()))
    assert nested.details["reason"] == "E_NESTED"
    assert "checkpoint-4" in nested.message + nested.hint
    hub.commits[COMMIT] = {"model.gguf": b""}
    assert refusal(lambda: fetcher().resolve(ref())).details["reason"] == "E_GGUF"


def test_a_repository_that_is_too_large_is_refused_before_its_first_byte(
    hub: Any, fetcher: Callable[..., HubFetcher]
) -> None:
    error = refusal(lambda: fetcher(max_bytes=1000).resolve(ref()))
    assert error.code == "source_too_big"
    assert not any("/resolve/" in path for path in hub.asked())


# ----------------------------------------------------------------- the network
def test_no_network_is_named_and_the_cache_pointed_at(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path
) -> None:
    bring(fetcher(), folder)
    nowhere = "http://127.0.0.1:9"  # discard: nobody listens
    error = refusal(lambda: fetcher_at(fetcher, nowhere).resolve(ref()))
    assert error.code == "source_unreachable"
    assert nowhere in error.message
    assert error.retryable
    assert "--offline" in error.hint
    assert (
        "--offline"
        not in refusal(lambda: fetcher_at(fetcher, nowhere).resolve(ref("hf:acme/never"))).hint
    )


def fetcher_at(fetcher: Callable[..., HubFetcher], endpoint: str) -> HubFetcher:
    made = fetcher()
    made._hub.endpoint = endpoint
    return made


def test_a_server_that_is_no_hub_is_called_so(
    hub: Any, fetcher: Callable[..., HubFetcher], servers: ModuleType
) -> None:
    def portal(handler: Any, path: str) -> bool:
        handler.reply(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        return True

    hub.faults = [portal]
    error = refusal(lambda: fetcher().resolve(ref()))
    assert error.code == "source_unreachable"
    assert "no hub" in error.message


def test_a_page_that_lies_about_its_commit_is_no_hubs(
    hub: Any, fetcher: Callable[..., HubFetcher]
) -> None:
    hub.commits["../../etc"] = dict(FILES)
    hub.refs["main"] = "../../etc"
    assert "no hub" in refusal(lambda: fetcher().resolve(ref())).message


def test_too_many_requests_are_waited_out_as_the_hub_asks(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path, servers: ModuleType
) -> None:
    hub.faults = [
        servers.on("/api/", servers.status(429, {"Retry-After": "0.1"})),
        servers.on("/resolve/", servers.status(429, {"Retry-After": "0.1"})),
    ]
    bring(fetcher(), folder)
    assert contents(folder) == WANTED
    assert hub.faults == []


def test_a_hub_that_asks_for_more_patience_than_there_is_is_called_busy(
    hub: Any, fetcher: Callable[..., HubFetcher], servers: ModuleType
) -> None:
    # Often enough: a connection that breaks is tried again.
    hub.faults = [servers.status(429, {"Retry-After": "120"})] * 9
    error = refusal(lambda: fetcher().resolve(ref()))
    assert (error.code, error.retry_after) == ("source_busy", 120.0)
    assert error.retryable
    hub.faults = [servers.status(429, {"RateLimit": '"api";r=0;t=55'})] * 9
    assert refusal(lambda: fetcher().resolve(ref())).retry_after == 55.0


def test_a_hub_that_fails_for_a_moment_is_asked_again(
    hub: Any, fetcher: Callable[..., HubFetcher], servers: ModuleType
) -> None:
    hub.faults = [servers.status(503)]
    assert fetcher().resolve(ref()).commit == COMMIT
    hub.faults = [servers.status(500)] * 9
    error = refusal(lambda: fetcher().resolve(ref()))
    assert error.code == "source_unreachable"
    assert "500" in error.message


def test_a_connection_cut_at_sixty_percent_goes_on_from_there(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path, servers: ModuleType
) -> None:
    hub.faults = [servers.on("/cdn/", servers.cut(WEIGHTS, 0.6))]
    bring(fetcher(), folder)
    assert contents(folder) == WANTED
    ranges = [headers.get("range") for _, path, headers in hub.log if "/cdn/" in path]
    begun = [int(r[6:-1]) for r in ranges if r]
    assert begun and 0.5 * len(WEIGHTS) < begun[0] <= 0.6 * len(WEIGHTS)


def test_what_arrived_before_the_network_went_away_serves_the_next_pull(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path, servers: ModuleType
) -> None:
    broken = [servers.on("/cdn/", servers.hang_up)] * 3
    hub.faults = [servers.on("/cdn/", servers.cut(WEIGHTS, 0.6)), *broken]
    error = refusal(lambda: bring(fetcher(), folder))
    assert error.code == "source_unreachable"
    assert "adapter_model.safetensors" not in contents(folder)
    hub.faults = []
    hub.log.clear()
    for path in folder.iterdir():  # another staging folder, after a restart
        path.unlink()
    bring(fetcher(), folder)
    assert contents(folder) == WANTED
    asked = [h.get("range") for _, path, h in hub.log if "/cdn/" in path and "model" in path]
    assert len(asked) == 1 and asked[0]


def test_cancelling_ends_within_the_file_and_keeps_what_arrived(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    source = fetcher()
    resolved = source.resolve(ref())
    seen: list[int] = []
    with pytest.raises(Cancelled):
        source.fetch(
            resolved,
            folder,
            lambda done, total: seen.append(done),
            lambda: bool(seen[50:] or [s for s in seen if s > 100_000]),
        )
    assert 0 < seen[-1] < len(WEIGHTS)
    parts = list((tmp_path / "cache").rglob("*.lorad"))
    assert parts and parts[0].stat().st_size > 0
    hub.log.clear()
    source.fetch(resolved, folder, lambda done, total: None, lambda: False)
    assert contents(folder) == WANTED
    assert any("range" in headers for _, _, headers in hub.log)


def test_a_file_with_another_checksum_is_refused_and_not_kept(
    hub: Any, fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):  # git's id, sha256
        body = FILES[name]
        hub.lies = {name: body[:-1] + b"!"}
        error = refusal(lambda: bring(fetcher(), folder))
        assert error.code == "source_corrupt"
        assert name in error.message
        assert name not in contents(folder)
    hub.lies = {}
    bring(fetcher(), folder)
    assert contents(folder) == WANTED


def test_a_damaged_cache_is_not_believed(
    fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    resolved = bring(fetcher(), folder)
    blobs = list((tmp_path / "cache").rglob("blobs/*"))
    large = next(b for b in blobs if b.stat().st_size == len(WEIGHTS))
    large.write_bytes(WEIGHTS[:-1] + b"!")
    again = tmp_path / "again"
    again.mkdir()
    offline = fetcher(offline=True)
    assert (
        refusal(lambda: offline.fetch(resolved, again, lambda *_: None, lambda: False)).code
        == "source_offline"
    )
    fetcher().fetch(resolved, again, lambda *_: None, lambda: False)
    assert contents(again) == WANTED
    assert large.read_bytes() == WEIGHTS


def test_two_pulls_of_one_file_download_it_once(
    hub: Any, fetcher: Callable[..., HubFetcher], tmp_path: Path, servers: ModuleType
) -> None:
    def slowly(handler: Any, path: str) -> bool:
        time.sleep(0.3)  # the other one waits for the lock by then
        hub.serve(handler, path.partition("?")[0])
        return True

    hub.faults = [servers.on("safetensors?", slowly)]
    folders = [tmp_path / "one", tmp_path / "two"]
    source = fetcher()
    resolved = source.resolve(ref())
    failed: list[BaseException] = []

    def pull(folder: Path) -> None:
        try:
            fetcher().fetch(resolved, folder, lambda *_: None, lambda: False)
        except BaseException as error:
            failed.append(error)

    threads = []
    for folder in folders:
        folder.mkdir()
        threads.append(threading.Thread(target=pull, args=(folder,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [contents(folder) for folder in folders] == [WANTED, WANTED]
    assert sum("/cdn/" in p and "adapter_model" in p for p in hub.asked("GET")) == 1


# ----------------------------------------------------------------- offline
@pytest.mark.parametrize("how", ["variable", "setting", "call"])
def test_offline_the_cache_serves_without_a_request(
    hub: Any,
    fetcher: Callable[..., HubFetcher],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    bring(fetcher(), folder)
    hub.log.clear()
    again = tmp_path / "again"
    again.mkdir()
    if how == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = fetcher(hf_offline=how == "setting", offline=how == "call")
    for text in (f"hf:{REPO}", f"hf:{REPO}@main", f"hf:{REPO}@{COMMIT}"):
        assert source.resolve(ref(text)).commit == COMMIT
    assert bring(source, again).total_bytes == sum(map(len, WANTED.values()))
    assert contents(again) == WANTED
    assert hub.log == []


@pytest.mark.parametrize(
    ("how", "named"),
    [("variable", "HF_HUB_OFFLINE"), ("setting", "[hf] offline"), ("call", "--offline")],
)
def test_offline_a_miss_names_the_cache_and_what_keeps_lorad_offline(
    hub: Any,
    fetcher: Callable[..., HubFetcher],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    named: str,
) -> None:
    if how == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = fetcher(hf_offline=how == "setting", offline=how == "call")
    error = refusal(lambda: source.resolve(ref()))
    assert error.code == "source_offline"
    assert named in error.message
    assert str(tmp_path / "cache") in error.message
    assert hub.log == []


def test_offline_half_an_adapter_is_a_miss(
    fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    bring(fetcher(), folder)
    next((tmp_path / "cache").rglob("snapshots/*/adapter_model.safetensors")).unlink()
    assert refusal(lambda: fetcher(offline=True).resolve(ref())).code == "source_offline"


def test_a_link_out_of_the_cache_is_not_followed(
    fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    bring(fetcher(), folder)
    secret = tmp_path / "secret"
    secret.write_text("{}")
    link = next((tmp_path / "cache").rglob("snapshots/*/adapter_config.json"))
    link.unlink()
    link.symlink_to(secret)
    assert refusal(lambda: fetcher(offline=True).resolve(ref())).code == "source_offline"


def test_a_branch_is_remembered_by_whoever_fetches_it(
    fetcher: Callable[..., HubFetcher], folder: Path
) -> None:
    resolved = fetcher().resolve(ref(f"hf:{REPO}@main"))
    fetcher().fetch(resolved, folder, lambda *_: None, lambda: False)
    assert fetcher(offline=True).resolve(ref()).commit == COMMIT


def test_the_librarys_usual_cache_is_looked_at_too(
    fetcher: Callable[..., HubFetcher], folder: Path, tmp_path: Path
) -> None:
    bring(fetcher(), folder)
    (tmp_path / "cache").rename(tmp_path / "usual")
    again = tmp_path / "again"
    again.mkdir()
    bring(fetcher(offline=True), again)
    assert contents(again) == WANTED


# ----------------------------------------------------------------- secrets
def test_no_log_line_holds_a_token_or_a_signature(
    hub: Any,
    fetcher: Callable[..., HubFetcher],
    folder: Path,
    servers: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from lorad import logs

    logs.set_level("debug")
    caplog.set_level(logging.DEBUG)
    hub.token = TOKEN
    hub.faults = [servers.on("/cdn/", servers.status(403))]
    refusal(lambda: bring(fetcher(token=TOKEN), folder))
    hub.faults = [servers.on("/cdn/", servers.cut(WEIGHTS, 0.5))]
    bring(fetcher(token=TOKEN), folder)
    assert contents(folder) == WANTED
    assert TOKEN not in caplog.text
    assert "verysecret" not in caplog.text


def test_plain_http_to_another_machine_is_refused(settings: Callable[..., Settings]) -> None:
    error = refusal(lambda: HubFetcher(settings(hf_endpoint="http://hub.test")).resolve(ref()))
    assert error.code == "bad_reference"
    assert "plain_http" in error.hint


def test_the_endpoint_may_come_from_the_environment(
    hub: Any, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    assert HubFetcher(settings()).resolve(ref()).commit == COMMIT
