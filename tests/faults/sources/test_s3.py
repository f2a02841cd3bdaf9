"""s3: against a server that speaks the S3 API (moto's), with a proxy before it that fails."""

import hashlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from lorad.config import Settings
from lorad.sources.choice import fetcher_for
from lorad.sources.fetch import Cancelled, FetchError, parse_reference
from lorad.sources.patience import Patience
from lorad.sources.s3 import S3Fetcher

WEIGHTS = bytes(range(256)) * 2048  # 512 KiB
PART = 5 << 20  # bytes, the least that S3 allows of a part but the last
ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": WEIGHTS,
    "tokenizer_config.json": b"{}",
}
QUICK = Patience(waits=(0.01, 0.01), longest=0.2)
SECRET = "verysecretkey"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def client(moto: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=moto,
        region_name="us-east-1",
        aws_access_key_id="somebody",
        aws_secret_access_key=SECRET,
    )


@pytest.fixture
def store(moto: str, client: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an emptied store; credentials are in the environment, as boto3 wants them."""
    httpx.post(f"{moto}/moto-api/reset", verify=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client.create_bucket(Bucket="models")
    for name, body in ADAPTER.items():
        client.put_object(Bucket="models", Key=f"lora/sql/{name}", Body=body)
    client.put_object(Bucket="models", Key="lora/sql/optimizer.pt", Body=b"pickle")
    client.put_object(Bucket="models", Key="lora/sql/checkpoint-4/adapter_config.json", Body=b"{}")
    client.put_object(Bucket="models", Key="lora/sql-v2/adapter_config.json", Body=b"{}")
    return client


@pytest.fixture
def proxy(servers: ModuleType, moto: str) -> Iterator[Any]:
    """A server that passes requests on to the store, after its faults."""

    class Proxy(servers.FileServer):  # type: ignore[name-defined,misc]
        def serve(self, handler: Any, path: str) -> None:
            headers = {k: v for k, v in handler.headers.items() if k.lower() != "host"}
            answer = passed_on.request(handler.command, moto + handler.path, headers=headers)
            dropped = ("connection", "server", "date", "transfer-encoding")
            kept = {k.title(): v for k, v in answer.headers.items() if k not in dropped}
            handler.reply(answer.status_code, answer.content, kept)

    with httpx.Client(verify=False) as passed_on, Proxy() as server:
        yield server


@pytest.fixture
def source(store: Any, proxy: Any, settings: Callable[..., Settings]) -> Callable[..., S3Fetcher]:
    def make(**options: Any) -> S3Fetcher:
        made = settings(s3_endpoint=proxy.url, s3_region="us-east-1", **options)
        return S3Fetcher(made, patience=QUICK)

    return make


def ref(text: str = "s3://models/lora/sql") -> Any:
    return parse_reference(text)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(call: Callable[[], object]) -> FetchError:
    with pytest.raises(FetchError) as raised:
        call()
    error = raised.value
    assert "\n" not in error.message
    assert error.hint
    assert SECRET not in error.message + error.hint
    return error


def bring(source: S3Fetcher, folder: Path, text: str = "s3://models/lora/sql") -> Any:
    resolved = source.resolve(ref(text))
    source.fetch(resolved, folder, lambda done, total: None, lambda: False)
    return resolved


def test_the_adapters_objects_of_a_prefix_arrive_alone(
    source: Callable[..., S3Fetcher], folder: Path
) -> None:
    seen: list[int] = []
    fetcher = source()
    resolved = fetcher.resolve(ref())
    assert resolved.total_bytes == sum(map(len, ADAPTER.values()))
    assert resolved.reference == f"s3://models/lora/sql#etags={resolved.commit}"
    fetcher.fetch(resolved, folder, lambda done, total: seen.append(done), lambda: False)
    assert contents(folder) == ADAPTER
    assert seen == sorted(seen)
    assert seen[-1] == resolved.total_bytes


def test_endpoint_and_region_may_come_from_the_environment(
    store: Any, moto: str, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert fetcher_for(ref(), settings()).resolve(ref()).commit


def test_another_version_has_another_digest_and_is_a_conflict_for_the_old(
    store: Any, source: Callable[..., S3Fetcher]
) -> None:
    before = source().resolve(ref())
    assert source().resolve(ref(before.reference)) == before
    store.put_object(Bucket="models", Key="lora/sql/tokenizer_config.json", Body=b'{"a": 1}')
    after = source().resolve(ref())
    assert after.commit != before.commit
    error = refusal(lambda: source().resolve(ref(before.reference)))
    assert error.code == "conflict"
    assert after.commit in error.message


def test_an_object_that_changes_after_it_was_listed_is_a_conflict(
    store: Any, source: Callable[..., S3Fetcher], folder: Path
) -> None:
    fetcher = source()
    resolved = fetcher.resolve(ref())
    store.put_object(Bucket="models", Key="lora/sql/adapter_config.json", Body=b"{}")
    error = refusal(lambda: fetcher.fetch(resolved, folder, lambda *_: None, lambda: False))
    assert error.code == "conflict"
    assert contents(folder).keys() <= {".adapter_config.json.partial"}


def test_an_object_uploaded_in_parts_arrives_whole(
    store: Any, source: Callable[..., S3Fetcher], folder: Path
) -> None:
    key = {"Bucket": "models", "Key": "lora/sql/adapter_model.safetensors"}
    upload = store.create_multipart_upload(**key)["UploadId"]
    parts = []
    for number, body in enumerate((bytes(PART), WEIGHTS), 1):
        made = store.upload_part(**key, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"ETag": made["ETag"], "PartNumber": number})
    store.complete_multipart_upload(**key, UploadId=upload, MultipartUpload={"Parts": parts})
    resolved = bring(source(), folder)
    assert next(f.etag for f in resolved.files if f.size == PART + len(WEIGHTS)).endswith('-2"')
    assert contents(folder) == {**ADAPTER, "adapter_model.safetensors": bytes(PART) + WEIGHTS}


def test_a_prefix_of_several_pages_is_read_to_its_end(
    store: Any, source: Callable[..., S3Fetcher], proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = source()
    whole = fetcher._client.list_objects_v2
    monkeypatch.setattr(
        fetcher._client, "list_objects_v2", lambda **asked: whole(**asked, MaxKeys=2)
    )
    resolved = fetcher.resolve(ref())
    assert {f.name for f in resolved.files} == set(ADAPTER)
    listings = [path for path in proxy.asked("GET") if "list-type" in path]
    assert len(listings) >= 3
    assert all("delimiter=%2F" in path for path in listings)  # nothing of what lies deeper


def test_a_sha256_that_the_store_keeps_is_checked(
    store: Any, source: Callable[..., S3Fetcher], folder: Path, proxy: Any, servers: ModuleType
) -> None:
    store.put_object(
        Bucket="models",
        Key="lora/sql/adapter_model.safetensors",
        Body=WEIGHTS,
        ChecksumAlgorithm="SHA256",
    )
    fetcher = source()
    resolved = fetcher.resolve(ref())
    weights = next(f for f in resolved.files if f.size == len(WEIGHTS))
    assert weights.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    lie = WEIGHTS[:-1] + b"!"
    proxy.faults = [servers.on("safetensors", servers.cut(lie, 1.0, {"ETag": weights.etag}))]
    error = refusal(lambda: fetcher.fetch(resolved, folder, lambda *_: None, lambda: False))
    assert error.code == "source_corrupt"
    assert "adapter_model.safetensors" not in contents(folder)
    fetcher.fetch(resolved, folder, lambda *_: None, lambda: False)
    assert contents(folder) == ADAPTER


def test_a_connection_that_is_cut_goes_on_where_it_was(
    source: Callable[..., S3Fetcher], folder: Path, proxy: Any, servers: ModuleType
) -> None:
    fetcher = source()
    resolved = fetcher.resolve(ref())
    weights = next(f for f in resolved.files if f.size == len(WEIGHTS))
    proxy.faults = [servers.on("safetensors", servers.cut(WEIGHTS, 0.6, {"ETag": weights.etag}))]
    fetcher.fetch(resolved, folder, lambda *_: None, lambda: False)
    assert contents(folder) == ADAPTER
    ranges = [h["range"] for _, path, h in proxy.log if "safetensors" in path and "range" in h]
    assert len(ranges) == 1 and int(ranges[0][6:-1]) > len(WEIGHTS) // 2


def test_cancelling_ends_within_the_object_and_the_next_call_goes_on(
    source: Callable[..., S3Fetcher], folder: Path, proxy: Any
) -> None:
    fetcher = source()
    resolved = fetcher.resolve(ref())
    seen: list[int] = []
    with pytest.raises(Cancelled):
        fetcher.fetch(
            resolved, folder, lambda done, _: seen.append(done), lambda: seen[-1:] > [100_000]
        )
    assert seen[-1] < len(WEIGHTS)
    assert "adapter_model.safetensors" not in contents(folder)
    proxy.log.clear()
    fetcher.fetch(resolved, folder, lambda *_: None, lambda: False)
    assert contents(folder) == ADAPTER
    assert any("range" in headers for _, _, headers in proxy.log)


def test_what_is_not_there_is_named(source: Callable[..., S3Fetcher]) -> None:
    bucket = refusal(lambda: source().resolve(ref("s3://nothing/lora/sql")))
    prefix = refusal(lambda: source().resolve(ref("s3://models/lora/none")))
    assert bucket.code == prefix.code == "source_not_found"
    assert "bucket" in bucket.message
    weights = refusal(lambda: source().resolve(ref("s3://models/lora/sql-v2")))
    assert (weights.code, weights.details["reason"]) == ("adapter_invalid", "E_NO_WEIGHTS")


def test_a_denial_says_which_rights_it_takes(
    source: Callable[..., S3Fetcher], proxy: Any, servers: ModuleType
) -> None:
    def deny(handler: Any, path: str) -> bool:
        body = f"<Error><Code>AccessDenied</Code><Message>{SECRET}</Message></Error>"
        handler.reply(403, body.encode(), {"Content-Type": "application/xml"})
        return True

    proxy.faults = [deny]
    error = refusal(lambda: source().resolve(ref()))
    assert error.code == "source_denied"
    assert "AccessDenied" in error.message
    assert "s3:GetObject" in error.hint


def test_without_credentials_the_variables_are_named(
    store: Any, source: Callable[..., S3Fetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_bucket_acl(Bucket="models", ACL="public-read")
    for name in ADAPTER:
        store.put_object_acl(Bucket="models", Key=f"lora/sql/{name}", ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = refusal(lambda: source().resolve(ref()))
    assert error.code == "source_denied"
    assert "AWS_ACCESS_KEY_ID" in error.hint
    assert source(s3_unsigned=True).resolve(ref()).commit


def test_a_busy_or_failing_store_is_asked_again(
    source: Callable[..., S3Fetcher], proxy: Any, folder: Path, servers: ModuleType
) -> None:
    proxy.faults = [
        servers.on("list-type", servers.status(503, {"Retry-After": "0"})),
        servers.on("safetensors", servers.status(500)),
    ]
    bring(source(), folder)
    assert contents(folder) == ADAPTER
    proxy.faults = [servers.status(503, {"Retry-After": "90"})]
    error = refusal(lambda: source().resolve(ref()))
    assert (error.code, error.retry_after) == ("source_busy", 90.0)


def test_no_network_and_silence_are_unreachable(
    store: Any,
    source: Callable[..., S3Fetcher],
    settings: Callable[..., Settings],
    proxy: Any,
    servers: ModuleType,
) -> None:
    nowhere = S3Fetcher(settings(s3_endpoint="http://127.0.0.1:9"), patience=QUICK)
    error = refusal(lambda: nowhere.resolve(ref()))
    assert error.code == "source_unreachable"
    assert "http://127.0.0.1:9" in error.message
    proxy.faults = [servers.silence(0.3)] * 9
    silent = refusal(lambda: source(pull_timeout=0.1).resolve(ref()))
    assert silent.code == "source_unreachable"
    assert "in time" in silent.message


def test_a_size_above_the_limit_is_refused(source: Callable[..., S3Fetcher]) -> None:
    assert refusal(lambda: source(max_bytes=1000).resolve(ref())).code == "source_too_big"


def test_a_plain_endpoint_on_another_machine_is_refused(
    store: Any, settings: Callable[..., Settings]
) -> None:
    error = refusal(lambda: S3Fetcher(settings(s3_endpoint="http://store.test")))
    assert error.code == "bad_reference"


def test_an_endpoint_that_is_none_is_refused(
    store: Any, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no endpoint")
    assert refusal(lambda: S3Fetcher(settings())).code == "bad_reference"


def test_without_boto3_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from lorad.config import Settings\n"
        "from lorad.sources.choice import fetcher_for\n"
        "from lorad.sources.fetch import FetchError, parse_reference\n"
        "try: fetcher_for(parse_reference('s3://models/lora'), Settings())\n"
        "except FetchError as error: print(error.message, error.hint)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "boto3" in told
    assert "pip install '.[s3]' in a checkout" in told
