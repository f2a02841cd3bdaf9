"""doctor: with a daemon and without one, for people and for programs."""

import pytest


@pytest.fixture
def etc(tmp_path, monkeypatch):
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path / "etc"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "etc").mkdir()
    return tmp_path


def by_check(document):
    return {item["check"]: item for item in document["items"]}


def test_with_a_daemon_its_sockets_are_looked_at(server, loractl, etc):
    done = loractl("doctor", "--offline", "--json")
    found = by_check(done.json)
    assert done.json["schema"] == "lorad/doctor.v1"
    assert found["admin socket"]["message"].startswith(str(server.admin))
    assert found["inference socket"]["message"].startswith(str(server.inference))
    assert found["daemon"]["status"] == "ok" and found["version"]["status"] in ("ok", "warn")
    assert found["configuration"]["status"] == "warn", "the daemon may have read another one"
    assert done.json["ok"] is (done.exit == 0)


def test_without_a_daemon_it_still_says_all_the_rest_and_exits_1_for_a_failure(
    loractl, etc, monkeypatch
):
    monkeypatch.setenv("LORAD_HOST", f"unix://{etc}/none.sock")
    done = loractl("doctor")
    assert done.exit == 1
    rows = {line.split("  ")[0].strip(): line for line in done.out.splitlines()}
    assert "fail" in rows and "[[models]]" in done.out
    heading, *lines = done.out.splitlines()
    assert heading.split() == ["STATUS", "CHECK", "FOUND"]
    assert lines[1].startswith("        try: ")
    assert "checks," in done.err and "1 fail\n" in done.err


def test_what_is_wrong_with_the_configuration_is_its_first_line(server, loractl, etc):
    (etc / "etc" / "lorad.toml").write_text("[lora]\nslotz = 1\n")
    item = loractl("doctor", "--offline", "--json").json["items"][0]
    assert item["check"] == "configuration" and "unknown key lora.slotz" in item["message"]
    assert item["fix"] == "did you mean slots?"


def test_names_are_checks(loractl, etc):
    assert "gpu" in loractl("doctor", "--offline", "-o", "name").out.split()
