"""verify and verify_on_load against a real daemon: stored files, packer, verifier, engine, CLI."""

import pytest

from lorad import wire

#: `tests/integration/engine/test_verification.py` says the same of the engine.
pytestmark = pytest.mark.late


def flip(path, at=-1):
    """Turn a bit of a file's byte over, whatever the file's mode."""
    path.chmod(0o640)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def packed_of(daemon, name):
    folder = daemon.root / "state" / "store" / daemon.adapter(name).rev
    [packed] = folder.glob("packed-*.bin")
    return packed


def test_an_adapter_is_verified_and_damage_is_found_then_mended(make_daemon, poll):
    daemon = make_daemon()
    text = daemon.config.read_text()
    daemon.config.write_text(text.replace("[lora]", '[lora]\nverify_on_load = "full"'))
    daemon.start()
    try:
        daemon.upload("a", 1)
        with daemon.client() as client:
            [item] = client.verify("a", full=True, timeout_s=120.0).items
            assert item.ok, item.message
            assert item.modules == 14 and 0 < item.worst_error < item.tolerance
            blocks = packed_of(daemon, "a").stat().st_size
            assert item.bytes_checked == 2 * blocks, "on the GPU, and the file itself"
            before = daemon.text("a")

            flip(packed_of(daemon, "a"), 3)
            [item] = client.verify("a", timeout_s=120.0).items
            assert not item.ok and item.code == "adapter_damaged"
            assert {f.what for f in item.findings} == {"packed", "resident"}
            assert daemon.text("a") == before, "what is resident is still right"

            client.evict("a", to="disk")
            [loaded] = client.load("a").items
            assert loaded.ok, loaded.message
            assert daemon.text("a") == before
            assert "adapter.repacked" in [e.type for e in daemon.events()]
            [item] = client.verify("a", full=True, timeout_s=120.0).items
            assert item.ok, item.message

            client.evict("a", to="disk")
            flip(packed_of(daemon, "a").parent / "adapter_model.safetensors")
            [item] = client.verify("a", full=True, timeout_s=120.0).items
            assert not item.ok and item.message.startswith("its stored file is damaged")
            assert "packed" not in {f.what for f in item.findings}
            assert isinstance(item.findings[0], wire.VerifyFinding)
            assert item.hint.startswith("loractl rm a, then loractl add")

            client.evict("a", to="disk")
            rev = daemon.adapter("a").rev
            flip(packed_of(daemon, "a"), 3)
            [loaded] = client.load("a").items
            assert loaded.code == "adapter_damaged"
            assert loaded.message.startswith("a: its packed file is damaged (packed-")
            assert rev not in loaded.message and loaded.hint.startswith("loractl rm a, and add")
            row = daemon.wait_state("a", "quarantined")
            assert row.rev == rev and row.reason == "E_DAMAGED"
            client.remove("a")
            daemon.upload("a", 1)
            assert daemon.text("a") == before, "what the hint says does help"
    finally:
        daemon.stop()


def test_what_is_loaded_is_verified_without_being_asked_for(make_daemon, poll):
    """Of stored files that were changed behind its back nobody had known before a `verify`."""
    daemon = make_daemon()
    text = daemon.config.read_text()
    daemon.config.write_text(text.replace("[lora]", '[lora]\nverify_on_load = "full"'))
    daemon.start()

    def told(kind):
        return [e for e in daemon.events() if e.type == kind and e.name == "a"]

    try:
        daemon.upload("a", 1)
        with daemon.client() as client:
            before = daemon.text("a")
            poll(lambda: told("adapter.verified"), "the first load to be verified")
            assert told("adapter.verified")[0].message.startswith("14 modules, ")

            client.evict("a", to="disk")
            flip(packed_of(daemon, "a").parent / "adapter_model.safetensors")
            assert client.load("a").items[0].ok
            poll(lambda: told("adapter.damaged"), "the damage to be told")
            [event] = told("adapter.damaged")
            assert event.level == "error"
            assert event.message.startswith("its stored file is damaged")
            assert daemon.text("a") == before, "what was packed before is still right"
            assert len(told("adapter.verified")) == 1
    finally:
        daemon.stop()
