"""LoradClient against the real faces, and against nobody."""

import asyncio
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from lorad import wire, wire_status
from lorad.api.server import bind_unix
from lorad.client import ApiError, LoradClient, Unreachable
from lorad.errors import LoradError


@pytest.fixture
def admin(api):
    with LoradClient(f"unix://{api.admin}") as client:
        yield client


def test_pictures_come_as_structs(api, admin):
    assert admin.status().adapters == {"idle": 2}
    assert admin.slots().slots_total == 8
    assert admin.version() == wire_status.Version(
        version="0.1.0", model="tiny", base="tiny", models=("tiny",)
    )
    assert [a.name for a in admin.every_adapter(limit=1)] == ["acme/sql", "bible"]
    assert admin.adapters(limit=1).cursor == "1"
    assert admin.adapter("acme/sql").adapter.rev == "a1" * 32
    admin.ping()
    assert admin.ready() == ""
    api.listing.not_ready = "draining"
    assert admin.ready() == "draining"


def test_wishes_arrive_as_they_were_made(api, admin):
    admin.load("acme/sql", "bible", pin=True, tier="ram")
    admin.evict(all=True, now=True)
    admin.pin("bible", no_load=True)
    admin.unpin("bible", wait=False)
    verbs = {call[0]: call[1] for call in api.adapters.calls}
    assert verbs["load"] == wire.Names(names=("acme/sql", "bible"), pin=True, tier="ram")
    assert verbs["evict"] == wire.Names(all=True, now=True)
    assert verbs["pin"].no_load
    assert verbs["unpin"].wait is False


def test_names_with_slashes_and_odd_characters_reach_their_route(api, admin):
    admin.patch("acme/sql", wire.AdapterPatch(priority=70, labels={"a": None}))
    admin.remove("acme/sql", keep_files=True)
    admin.remove("a b%2f?#é/x")
    assert api.adapters.calls == [
        ("patch", "acme/sql", wire.AdapterPatch(priority=70, labels={"a": None})),
        ("remove", "acme/sql", True),
        ("remove", "a b%2f?#é/x", False),
    ]


def test_an_error_brings_its_code_its_hint_and_its_details(api, admin):
    api.adapters.answer = LoradError(
        "adapter_invalid", "it is short", hint="copy it again", details={"reason": "E_TRUNCATED"}
    )
    with pytest.raises(ApiError, match="it is short") as caught:
        admin.load("x")
    error = caught.value
    assert (error.status, error.code, error.hint) == (422, "adapter_invalid", "copy it again")
    assert error.details == {"reason": "E_TRUNCATED"}


# ------------------------------------------------------------------ uploads
def adapter_folder(tmp_path, **sizes):
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name.replace("__", ".")).write_bytes(b"x" * size)
    return folder


GOOD = {"adapter_config__json": 300, "adapter_model__safetensors": 200_000}


def test_a_folder_is_uploaded_file_by_file_and_committed(api, admin, tmp_path):
    folder = adapter_folder(tmp_path, **GOOD, __hidden=5)
    start = wire.UploadStart(name="acme/new", replace=True, pin=True, priority=60)
    added = admin.upload(folder, start)
    assert (added.name, added.state) == ("acme/new", "registered")
    assert api.adapters.added_files == {
        "adapter_config.json": 300,
        "adapter_model.safetensors": 200_000,
    }
    _, name, options = api.adapters.calls[0]
    assert name == "acme/new"
    assert options == {
        "source": "upload",
        "model": "",
        "replace": True,
        "pin": True,
        "priority": 60,
        "labels": None,
        "load": False,
        "dry_run": False,
    }


def test_files_that_adapters_do_not_have_stay_behind(api, admin, tmp_path):
    folder = adapter_folder(tmp_path, **GOOD, README__md=5, zz_pickle__bin=5)
    admin.upload(folder, wire.UploadStart(name="x"))
    assert sorted(api.adapters.added_files) == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_file_that_adapters_do_not_have_is_refused(api, admin):
    opened = admin.post("/admin/v1/uploads", wire.UploadStart(name="x"), wire.UploadOpen)
    assert "adapter_config.json" in opened.files
    with pytest.raises(ApiError, match=r"not a file of an adapter: 'zz_pickle\.bin'"):
        admin.request("PUT", f"/admin/v1/uploads/{opened.upload_id}/files/zz_pickle.bin", body="x")
    admin.request("DELETE", f"/admin/v1/uploads/{opened.upload_id}")


def test_more_bytes_than_allowed_are_refused_on_the_way(api, admin, tmp_path):
    sizes = {"adapter_model__safetensors": 200_000, "tokenizer__json": 100_000}
    with pytest.raises(ApiError) as caught:
        admin.upload(adapter_folder(tmp_path, **sizes), wire.UploadStart(name="x"))
    assert caught.value.code == "payload_too_large"
    staged = api.adapters.calls[0][1]
    assert not (staged / "tokenizer.json").exists()


@pytest.mark.parametrize("file", ["..%2f..%2fetc", "%2e%2e", "a%00b", "adapter_config.json%2fx"])
def test_file_names_that_are_paths_touch_nothing(api, admin, file):
    opened = admin.post("/admin/v1/uploads", wire.UploadStart(name="x"), wire.UploadOpen)
    with pytest.raises(ApiError) as caught:
        admin.request("PUT", f"/admin/v1/uploads/{opened.upload_id}/files/{file}", body="x")
    assert caught.value.code in ("invalid_value", "not_found")
    admin.request("DELETE", f"/admin/v1/uploads/{opened.upload_id}")


def test_an_upload_is_its_openers_alone_and_ends_once(api, admin, monkeypatch):
    opened = admin.post("/admin/v1/uploads", wire.UploadStart(name="x"), wire.UploadOpen)
    path = f"/admin/v1/uploads/{opened.upload_id}"
    monkeypatch.setattr("lorad.api.admin._uid", lambda request: 777)
    with pytest.raises(ApiError, match="no such upload"):
        admin.request("POST", f"{path}/commit", body={})
    monkeypatch.undo()
    admin.request("POST", f"{path}/commit", body={})
    with pytest.raises(ApiError, match="no such upload"):
        admin.request("POST", f"{path}/commit", body={})


def test_a_commit_may_be_waited_for_shortly_or_not_at_all(api, admin):
    for commit, status in (({"timeout_s": 0.01}, 504), ({"wait": False}, 202)):
        api.adapters.add_gate = gate = asyncio.Event()
        opened = admin.post("/admin/v1/uploads", wire.UploadStart(name="x"), wire.UploadOpen)
        path = f"/admin/v1/uploads/{opened.upload_id}/commit"
        if status == 504:
            with pytest.raises(ApiError, match="it goes on") as caught:
                admin.request("POST", path, body=commit)
            assert caught.value.code == "deadline_exceeded"
        else:
            assert admin.post(path, commit, wire.Added).state == "loading"
        assert len(api.uploads._adding) == 1
        api.run(gate.set)
        api.until(lambda: not api.uploads._adding)


def test_a_commit_that_fails_when_nobody_waits_any_more_is_an_event(api, admin):
    api.adapters.add_gate = gate = asyncio.Event()
    opened = admin.post("/admin/v1/uploads", wire.UploadStart(name="x"), wire.UploadOpen)
    admin.post(f"/admin/v1/uploads/{opened.upload_id}/commit", {"wait": False}, wire.Added)
    for staged in api.adapters.folder.iterdir():
        shutil.rmtree(staged)
    api.run(gate.set)
    api.until(lambda: api.events.newest(1))
    (event,) = api.run(api.events.newest, 1)
    assert (event.type, event.name, event.cause) == ("adapter.not_loaded", "x", "internal_error")


def test_uploads_that_nobody_continues_are_discarded(api, admin):
    start = wire.UploadStart(name="x")
    admin.post("/admin/v1/uploads", start, wire.UploadOpen)
    clock = api.uploads._clock
    api.uploads._clock = lambda: clock() + 3600
    try:
        for _ in range(16):
            admin.post("/admin/v1/uploads", start, wire.UploadOpen)
        assert [call[0] for call in api.adapters.calls] == ["discard"]
        with pytest.raises(ApiError) as caught:
            admin.post("/admin/v1/uploads", start, wire.UploadOpen)
        assert caught.value.code == "queue_full"
    finally:
        api.uploads._clock = clock
        api.uploads._open.clear()


def test_uploads_of_clients_that_crashed_make_way_for_others(api, admin):
    start = wire.UploadStart(name="x")
    for _ in range(16):
        admin.post("/admin/v1/uploads", start, wire.UploadOpen)
    with pytest.raises(ApiError) as caught:
        admin.post("/admin/v1/uploads", start, wire.UploadOpen)
    assert (caught.value.code, "after 30 s" in caught.value.hint) == ("queue_full", True)
    clock = api.uploads._clock
    api.uploads._clock = lambda: clock() + 31
    try:
        first, *others = list(api.uploads._open)
        admin.post("/admin/v1/uploads", start, wire.UploadOpen)
        assert first not in api.uploads._open
        assert api.uploads._open.keys() > set(others)
    finally:
        api.uploads._clock = clock
        api.uploads._open.clear()


def test_a_half_sent_file_leaves_nothing(api, admin, connect):
    opened = admin.post("/admin/v1/uploads", wire.UploadStart(name="x"), wire.UploadOpen)
    path = f"/admin/v1/uploads/{opened.upload_id}/files/adapter_config.json"
    raw = connect(api.admin).send(
        f"PUT {path} HTTP/1.1\r\nhost: l\r\ncontent-length: 100\r\n\r\nhalf".encode()
    )
    api.until(lambda: any(upload.busy for upload in api.uploads._open.values()))
    raw.close()
    api.until(lambda: not any(upload.busy for upload in api.uploads._open.values()))
    admin.request("POST", f"/admin/v1/uploads/{opened.upload_id}/commit", body={})
    assert api.adapters.added_files == {}


# ------------------------------------------------------------------ events
def publish(api, *types):
    for kind in types:
        api.run(lambda k=kind: api.events.publish(k))


def test_events_come_as_pages_and_as_a_stream_that_resumes(api, admin):
    publish(api, "a", "b")
    last = api.events.last_id
    assert [item.type for item in admin.recent_events(limit=2).items] == ["a", "b"]
    page = admin.recent_events(since=last - 1)
    assert ([item.type for item in page.items], page.instance_id) == (["b"], "i1")
    stream = admin.follow_events(f"i1-{last - 1}")
    assert next(stream)[1].type == "b"
    publish(api, "c")
    event_id, item = next(stream)
    assert (event_id, item.type) == (f"i1-{last + 1}", "c")
    stream.close()


def test_a_reader_that_missed_some_is_told(api, admin):
    publish(api, *"abcdefghij")  # the ring holds eight
    stream = admin.follow_events("i1-0")
    assert next(stream)[1].type == "gap"
    assert next(stream)[1].type == "c"
    stream.close()


def test_a_reader_of_another_daemon_is_told(api, admin):
    publish(api, "a")
    stream = admin.follow_events("other-7")
    assert next(stream)[1].type == "gap"
    stream.close()


# ------------------------------------------------------------------ generating
def test_chunks_are_streamed_and_an_error_event_raises(api):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    with LoradClient(api.inference) as client:
        chunks = list(client.stream("/v1/chat/completions", ask))
        said = [c["choices"][0]["delta"].get("content", "") for c in chunks]
        assert "".join(said) == "Hello world"
        api.engine.error = ("engine_restarting", "it died")
        with pytest.raises(ApiError, match="it died") as caught:
            list(client.stream("/v1/chat/completions", ask))
    assert caught.value.code == "engine_restarting"


# ------------------------------------------------------------------ nobody there
def kind_at(path, **options):
    with LoradClient(path, **options) as client, pytest.raises(Unreachable) as caught:
        client.status()
    assert str(path) in str(caught.value)
    return caught.value.kind


def test_who_does_not_answer_is_told_apart(tmp_path, monkeypatch):
    assert kind_at(tmp_path / "none.sock") == "absent"
    stale = tmp_path / "stale.sock"
    bind_unix(stale, 0o600).close()
    assert kind_at(stale) == "stale"
    with bind_unix(tmp_path / "mute.sock", 0o600):
        assert kind_at(tmp_path / "mute.sock", timeout=0.05) == "loading"

    def deny(self, path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", deny)
    assert kind_at(stale) == "denied"


def test_a_server_that_is_no_lorad_is_an_error_and_not_a_traceback(tmp_path):
    path = tmp_path / "odd.sock"
    with bind_unix(path, 0o600) as listener:
        listener.settimeout(5)

        def serve():
            probe, _ = listener.accept()  # the client looks whether anybody is there
            peer, _ = listener.accept()
            peer.recv(4096)
            peer.sendall(b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops")
            peer.close()

            probe.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with LoradClient(path) as client, pytest.raises(ApiError, match="answered 502"):
            client.status()
        thread.join(5)


def test_the_client_is_cheap_to_import():
    code = (
        "import sys, lorad.client, lorad.wire, lorad.wire_openai;"
        "heavy = {'torch', 'sqlalchemy', 'starlette', 'uvicorn', 'httpx', 'openai', 'engine'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
