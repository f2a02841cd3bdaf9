"""A running daemon: adapters from the inbox, replaced under a stream, an engine that is killed."""

import json
import os
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorad import wire
from lorad.client import ApiError


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    daemon.inbox.mkdir(parents=True)
    daemon.drop("bible", 1, pin=True, priority=70)
    daemon.drop("acme/jargon", 2)
    (daemon.inbox / "broken").mkdir()
    (daemon.inbox / "broken/adapter_config.json").write_text("{}")
    (daemon.inbox / "broken/adapter_model.safetensors").write_bytes(b"\x00" * 64)
    yield daemon.start()
    assert daemon.stop() == 0, daemon.tail()


def test_what_lies_in_the_inbox_is_served_and_the_pinned_is_resident(daemon):
    bible = daemon.wait_state("bible", "idle")
    assert (bible.pinned, bible.priority, bible.source) == (True, 70, "inbox")
    jargon = daemon.wait_state("acme/jargon", "registered")
    assert jargon.tenant == "acme"
    texts = {name: daemon.text(name) for name in ("tiny", "bible", "acme/jargon")}
    assert len(set(texts.values())) == 3
    daemon.wait_state("acme/jargon", "idle", "active")


def test_the_same_adapter_from_mlx_and_as_dora_of_gain_one_says_the_same(daemon, poll):
    """The magnitudes are the norms of the adapted weights, so the gains that the packer finds from
    the base's files are one."""
    peft = load_file(daemon.inbox / "bible/adapter_model.safetensors")
    base = load_file(daemon.base / "model.safetensors")
    mlx, dora = {}, dict(peft)
    for name, a in peft.items():
        if "lora_A" in name:
            b = peft[name.replace("lora_A", "lora_B")]
            path = name.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
            mlx |= {f"{path}.lora_a": a.T.copy(), f"{path}.lora_b": b.T.copy()}
            norm = np.linalg.norm(base[f"{path}.weight"] + 2.0 * (b @ a), axis=1)
            dora[f"base_model.model.{path}.lora_magnitude_vector"] = norm.astype(np.float32)
    config = json.loads((daemon.inbox / "bible/adapter_config.json").read_text())
    drop_files(daemon, "mlx", {"lora_parameters": {"scale": 2.0}}, "adapters", mlx)
    drop_files(daemon, "dora", config | {"use_dora": True}, "adapter_model", dora)
    for name in dora:
        if "magnitude" in name:
            dora[name] = 1.5 * dora[name]
    drop_files(daemon, "louder", config | {"use_dora": True}, "adapter_model", dora)
    for name in ("mlx", "dora", "louder"):
        daemon.wait_state(name, "registered")
        poll(lambda name=name: daemon.adapter(name).rev, f"{name} to be packed")
    revs = {daemon.adapter(name).rev for name in ("bible", "mlx", "dora", "louder")}
    assert len(revs) == 4
    assert daemon.text("mlx") == daemon.text("dora") == daemon.text("bible")
    assert daemon.text("louder") != daemon.text("bible")


def drop_files(daemon, name, config, weights, tensors):
    """An adapter of these files, in one move."""
    folder = daemon.inbox / f".{name}"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / f"{weights}.safetensors")
    folder.rename(daemon.inbox / name)


def test_a_broken_folder_is_quarantined_with_its_reason(daemon):
    row = daemon.wait_state("broken", "quarantined")
    assert row.reason.startswith("E_")
    assert daemon.ask("broken").status_code == 404


def test_an_unknown_model_is_404_and_never_the_base(daemon):
    answer = daemon.ask("nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_tenants_do_not_see_where_files_are(daemon):
    with daemon.http() as http:
        for path in ("/version", "/v1/models", "/v1/models/bible", "/readyz"):
            assert str(daemon.base.parent) not in http.get(path).text
        assert http.get("/version").json()["base"] == daemon.base.name


def test_an_answer_names_its_revision(daemon):
    answer = daemon.ask("bible")
    assert answer.headers["x-lorad-rev"] == daemon.adapter("bible").rev


def test_the_same_content_under_two_names_is_one_slot(daemon):
    daemon.wait_state("bible", "idle")
    added = daemon.upload("twin", 1, load=True)
    assert added.rev == daemon.adapter("bible").rev
    with daemon.client() as client:
        slots = {item.name: item.slot for item in client.slots().items}
        assert slots["twin"] == slots["bible"]
        client.remove("twin")
    assert daemon.text("bible")


def test_evict_refuses_the_pinned_and_takes_the_others(daemon):
    daemon.text("acme/jargon")
    with daemon.client() as client:
        pinned, jargon = client.evict("bible", "acme/jargon").items
        assert (pinned.code, jargon.ok) == ("pinned", True)
        assert client.adapter("acme/jargon").adapter.state == "ram"
        assert client.load("acme/jargon").items[0].state == "idle"


def test_a_stream_ends_on_the_revision_that_it_began_with(daemon, poll):
    daemon.upload("voice", 11, load=True)
    old_rev = daemon.adapter("voice").rev
    daemon.upload("kept", 12)  # packed already: the name flips while the stream is young
    length = 700
    control = daemon.text("voice", length)
    begun, flipped = threading.Event(), threading.Event()
    seen = {}

    def stream():
        body = daemon.body("voice", length, stream=True)
        parts, after = [], 0
        with daemon.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            seen["rev"] = answer.headers["x-lorad-rev"]
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    begun.set()
                    after += flipped.is_set()
                    parts += [c["text"] for c in json.loads(line[6:])["choices"]]
        seen["text"], seen["after"] = "".join(parts), after

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(30)
    replaced = daemon.upload("voice", 12, replace=True)
    fresh = daemon.ask("voice", 64)
    flipped.set()
    thread.join(60)
    assert replaced.replaced_rev == old_rev
    assert seen["after"] > 0, "the stream was over before the name flipped"
    assert seen["rev"] == old_rev
    assert seen["text"] == control
    assert fresh.headers["x-lorad-rev"] == replaced.rev
    assert fresh.json()["choices"][0]["text"] != control[:64]
    assert fresh.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = daemon.ask("voice", 64)
    assert again.json()["choices"] == fresh.json()["choices"]
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48

    def retired():
        return any(e.type == "adapter.retired" and e.rev == old_rev for e in daemon.events())

    poll(retired, "the old revision to leave")
    assert not (daemon.root / "state/store" / old_rev).exists()


def test_a_folder_replaced_in_the_inbox_takes_the_name(daemon, poll):
    before = daemon.adapter("acme/jargon").rev
    daemon.drop("acme/jargon", 22)
    poll(lambda: daemon.adapter("acme/jargon").rev != before, "the new revision")
    assert daemon.ask("acme/jargon").headers["x-lorad-rev"] != before


def test_operators_wishes_are_checked(daemon):
    with daemon.client() as client:
        with pytest.raises(ApiError) as caught:
            client.patch("bible", wire.AdapterPatch(priority=500))
        assert caught.value.status == 400
        with pytest.raises(ApiError) as caught:
            daemon.upload("tiny", 5)
        assert caught.value.code == "name_taken"
        with pytest.raises(ApiError) as caught:
            daemon.upload("bible", 5)
        assert caught.value.status == 409


def test_a_state_dump_goes_to_the_log(daemon, poll):
    os.kill(daemon.process.pid, signal.SIGUSR1)
    poll(lambda: "Current thread" in daemon.log.read_text(), "the dump")
    assert '"state":"ready"' in daemon.log.read_text()
    assert "Once upon" not in daemon.log.read_text()


def test_a_hangup_with_a_broken_file_changes_nothing_and_says_so(daemon, poll):
    whole = daemon.config.read_text()
    daemon.config.write_text(whole + "\n[lora]\nslotz = 1\n")
    os.kill(daemon.process.pid, signal.SIGHUP)
    poll(lambda: any(e.type == "config.rejected" for e in daemon.events()), "the refusal")
    daemon.config.write_text(whole.replace("slots = 8", "slots = 9"))
    os.kill(daemon.process.pid, signal.SIGHUP)
    poll(lambda: any(e.type == "config.reloaded" for e in daemon.events()), "the reload")
    event = next(e for e in daemon.events() if e.type == "config.reloaded")
    assert event.message == "needs a restart: lora.slots"
    daemon.config.write_text(whole)
    assert daemon.is_ready()


def test_a_second_daemon_on_the_same_state_is_refused(daemon):
    status, words = daemon.refused()
    assert status == 6
    assert f"pid {daemon.process.pid}" in words
    assert daemon.is_ready()


def test_a_killed_engine_comes_back_with_the_same_residents(daemon, poll):
    daemon.text("acme/jargon")
    with daemon.client() as client:
        before = {item.name for item in client.slots().items}
        engine = client.status().engine_pid
    assert {"bible", "acme/jargon"} <= before
    expected = daemon.text("bible")
    os.kill(engine, signal.SIGKILL)
    poll(lambda: not daemon.is_ready(), "the death to be noticed")
    answer = daemon.ask("bible")
    if answer.status_code != 200:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_restarting"
        assert "retry-after" in answer.headers
    daemon.wait_ready()
    with daemon.client() as client:
        poll(lambda: before == {i.name for i in client.slots().items}, "the residents")
        assert client.status().engine_restarts == 1
    assert daemon.text("bible") == expected


@pytest.mark.parametrize("name", ["../x", "Upper", "tiny", "x" * 64, "a/b/c", "a\x1b[2J"])
def test_a_name_that_cannot_be_is_refused_before_its_files_are_sent(daemon, name):
    with daemon.client() as client, pytest.raises(ApiError) as caught:
        client.post("/admin/v1/uploads", wire.UploadStart(name=name), wire.UploadOpen)
    assert caught.value.code in ("invalid_value", "name_taken")
