"""Each check against a machine that a test made."""

import os
import socket
from pathlib import Path

import pytest

from lorad import wire_status
from lorad.caller import Unreachable
from lorad.cli.card import Card
from lorad.config import Settings
from lorad.config_sections import HuggingFace
from lorad.doctor import disks, hub, machine, sockets

GIB = 1 << 30


def only(found):
    [one] = list(found)
    return one.status, one.message, one.fix


# ----------------------------------------------------------------- sockets
@pytest.fixture
def listening(tmp_path):
    """listening(mode): a socket that takes calls."""
    made = []

    def listen(mode=0o660):
        path = tmp_path / f"s{len(made)}"
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].bind(str(path))
        made[-1].listen()
        path.chmod(mode)
        return path

    yield listen
    for one in made:
        one.close()


def test_a_socket_that_is_right_is_shown_with_mode_and_group(listening):
    status, said, fix = only(sockets.socket_file("admin", listening()))
    assert status == "ok" and "(0660, group " in said and not fix


def test_a_socket_that_everybody_may_use_fails(listening):
    status, said, fix = only(sockets.socket_file("admin", listening(0o666)))
    assert status == "fail" and "everybody may connect" in said and "chmod o-w" in fix


def test_a_stale_socket_a_missing_one_and_a_file_are_told_apart(tmp_path):
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(stale))
    status, said, _ = only(sockets.socket_file("admin", stale))
    assert status == "warn" and "it is stale" in said
    status, said, fix = only(sockets.socket_file("admin", tmp_path / "absent"))
    assert (status, fix) == ("warn", "lorad serve") and "is not there" in said
    (tmp_path / "file").write_text("")
    status, said, _ = only(sockets.socket_file("admin", tmp_path / "file"))
    assert status == "fail" and "is no socket" in said


def test_a_path_that_no_socket_can_have_fails():
    status, said, _ = only(sockets.socket_file("admin", Path("/" + "x" * 107)))
    assert status == "fail" and "108 bytes, 107 are possible" in said


def test_another_group_than_the_configured_one_is_told(listening):
    status, said, _ = only(sockets.socket_file("admin", listening(), "lorad-admin"))
    assert status == "warn" and "`[admin] group` is lorad-admin" in said


def test_a_group_that_is_configured_must_exist():
    status, said, fix = only(sockets.groups({"admin.group": "no-such-group"}))
    assert status == "fail" and "there is no group no-such-group" in said and "groupadd" in fix


class Client:
    """As much of LoradClient as the check asks."""

    host = "unix:///run/x.sock"

    def __init__(self, version="0.1.0", reason="", error=None):
        self._version, self._reason, self._error = version, reason, error

    def version(self):
        if self._error:
            raise self._error
        return wire_status.Version(version=self._version, api="v1")

    def ready(self):
        return self._reason


def test_a_daemon_of_another_version_is_told():
    reach, skew = sockets.daemon(Client(version="9.9"))
    assert reach.status == "ok" and skew.status == "warn"
    assert "the daemon 9.9" in skew.message and "restart the daemon" in skew.fix


def test_a_daemon_that_is_loading_is_a_warning_and_one_that_denies_a_failure():
    reach, skew = sockets.daemon(Client(reason="loading_base"))
    assert (reach.status, skew.status) == ("warn", "ok") and "loading_base" in reach.message
    status, _, _ = only(sockets.daemon(Client(error=Unreachable("unix:///x", "denied"))))
    assert status == "fail"
    status, said, _ = only(sockets.daemon(Client(error=Unreachable("unix:///x", "absent"))))
    assert status == "warn" and "does not exist" in said


# ----------------------------------------------------------------- machine
H200 = Card("NVIDIA H200", "570.1", 140 * GIB, 0)


def test_no_card_fails_only_where_one_was_asked_for():
    assert only(machine.card((), "why", "cuda", running=False))[0] == "fail"
    assert only(machine.card((), "why", "auto", running=False))[0] == "warn"
    assert only(machine.card((), "why", "cpu", running=False))[0] == "ok"


def test_a_card_is_shown_and_who_else_uses_it_is_told():
    status, said, _ = only(machine.card((H200,), "", "auto", running=False))
    assert status == "ok" and said == "NVIDIA H200, 140 GiB, driver 570.1"
    busy = Card("NVIDIA H200", "570.1", 140 * GIB, 70 * GIB)
    status, said, _ = only(machine.card((busy,), "", "auto", running=False))
    assert status == "warn" and "others use 70.0 GiB" in said
    assert only(machine.card((busy,), "", "auto", running=True))[0] == "ok", "that is lorad's"


def installed(monkeypatch, torch, triton, wants="triton==3.6.0; platform_system == 'Linux'"):
    monkeypatch.setattr(machine, "version", {"torch": torch, "triton": triton}.get)
    monkeypatch.setattr(machine.metadata, "requires", lambda name: [wants])


def test_versions_of_torch_and_triton_that_do_not_go_together(monkeypatch):
    installed(monkeypatch, "2.11.0+cu130", "3.6.0")
    assert [f.status for f in machine.libraries("cuda", True)] == ["ok", "ok"]
    installed(monkeypatch, "2.11.0+cu130", "3.7.0")
    _, triton = machine.libraries("cuda", True)
    assert triton.status == "warn" and triton.fix == "pip install triton==3.6.0"
    installed(monkeypatch, "2.11.0+cpu", "3.6.0")
    [torch] = machine.libraries("auto", True)
    assert torch.status == "fail" and "without CUDA" in torch.message
    installed(monkeypatch, None, None)
    [torch] = machine.libraries("cpu", False)
    assert torch.status == "fail"


def test_inotify_limits_are_held_against_the_folders_of_the_inbox(tmp_path):
    kernel = tmp_path / "proc/sys/fs/inotify"
    kernel.mkdir(parents=True)
    (kernel / "max_user_watches").write_text("64\n")
    (kernel / "max_user_instances").write_text("128\n")
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    assert only(machine.inotify(inbox, "auto", tmp_path / "proc"))[0] == "ok"
    for number in range(40):
        (inbox / str(number)).mkdir()
    status, said, fix = only(machine.inotify(inbox, "auto", tmp_path / "proc"))
    assert status == "warn" and "folders in the inbox: 41, max_user_watches 64" in said
    assert fix.endswith("max_user_watches=524288")
    assert only(machine.inotify(inbox, "polling", tmp_path / "proc"))[0] == "ok"
    assert only(machine.inotify(inbox, "auto", tmp_path / "none"))[0] == "warn"


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}                 4096                 files
Max locked memory         {locked}                8388608              bytes
"""


@pytest.mark.parametrize(
    ("files", "locked", "wanted"),
    [
        ("4096", "unlimited", ["ok", "ok"]),
        ("1024", "unlimited", ["ok", "warn"]),
        ("unlimited", "8388608", ["warn", "ok"]),
    ],
)
def test_limits_of_the_daemon(tmp_path, files, locked, wanted):
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "limits").write_text(LIMITS.format(files=files, locked=locked))
    assert [f.status for f in machine.limits(77, GIB, 1024, tmp_path)] == wanted
    without_card = next(machine.limits(77, 0, 0, tmp_path))
    assert without_card.status == "ok", "no card wants it locked"
    shown = "any number of bytes" if locked == "unlimited" else "8M"
    assert without_card.message == f"the daemon may lock {shown}"


def test_our_own_limits_can_be_read():
    found = machine.read_limits(Path("/proc/self/limits"))
    assert {"Max locked memory", "Max open files"} <= found.keys()


# ----------------------------------------------------------------- disks, unit
def test_a_disk_that_is_nearly_full_is_told(tmp_path, monkeypatch):
    wanted = {"store": tmp_path / "not" / "there" / "yet"}
    monkeypatch.setattr(disks, "free_bytes", lambda path: 100 * GIB)
    status, said, _ = only(disks.folders(wanted, ours=True))
    assert status == "ok" and "100.0 GiB free on /" in said
    monkeypatch.setattr(disks, "free_bytes", lambda path: GIB)
    assert only(disks.folders(wanted, ours=True))[0] == "warn"
    monkeypatch.setattr(disks, "free_bytes", lambda path: 4096)
    assert only(disks.folders(wanted, ours=True))[0] == "fail"


def test_a_folder_that_may_not_be_written_to_fails_only_for_our_own_daemon(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(disks, "free_bytes", lambda path: 100 * GIB)
    assert only(disks.folders({"state": tmp_path}, ours=True))[0] == "fail"
    assert only(disks.folders({"state": tmp_path}, ours=False))[0] == "ok"


GOOD = "[Service]\nType=notify-reload\nTimeoutStopSec=45\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD, ""),
        (GOOD.replace("45", "1min 10s"), ""),
        (GOOD.replace("45", "infinity"), ""),
        (GOOD.replace("45", "30"), "TimeoutStopSec is 30 s, a drain may take 30 s"),
        (GOOD.replace("notify-reload", "simple"), "does not wait until lorad is ready"),
        (GOOD + "PrivateDevices=yes\n", "hides the card"),
        (GOOD + "MemoryDenyWriteExecute=true\n", "forbids compiled kernels"),
    ],
)
def test_a_unit_that_does_not_fit_says_which_line(tmp_path, text, said):
    (tmp_path / "lorad.service").write_text(text)
    found = list(disks.unit(None, True, 30.0, booted=tmp_path, places=[str(tmp_path)]))
    assert [f.status for f in found] == (["warn"] if said else ["ok"])
    assert said in found[0].message


@pytest.mark.parametrize("where", ["", "user"])
def test_the_units_that_lorad_brings_along_fit(tmp_path, where):
    folder = Path(__file__).parents[3] / "docs/contrib/systemd" / where
    assert only(disks.unit(None, True, 30.0, booted=tmp_path, places=[str(folder)]))[0] == "ok"


def test_no_unit_is_a_warning_where_systemd_runs_and_nothing_where_not(tmp_path):
    assert only(disks.unit(None, True, 30.0, booted=tmp_path, places=[]))[0] == "warn"
    assert only(disks.unit(None, True, 30.0, booted=tmp_path / "no", places=[]))[0] == "ok"


# ----------------------------------------------------------------- hub
def test_a_hub_is_not_asked_offline_and_one_that_is_away_is_a_warning(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    away = Settings(hf=HuggingFace(endpoint="http://127.0.0.1:9"))
    status, said, fix = only(hub.hub(away, ask=True))
    assert status == "warn" and "http://127.0.0.1:9 does not answer" in said and "offline" in fix
    assert only(hub.hub(away, ask=False))[0] == "ok"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, said, _ = only(hub.hub(away, ask=True))
    assert status == "ok" and "HF_HUB_OFFLINE" in said


def test_a_token_that_others_may_read_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    token = tmp_path / "token"
    token.write_text("hf_secret")
    settings = Settings(hf=HuggingFace(token_file=str(token), offline=True))
    token.chmod(0o644)
    told, _ = hub.hub(settings, ask=False)
    assert told.status == "warn" and "hf_secret" not in str(told)
    token.chmod(0o600)
    assert next(hub.hub(settings, ask=False)).status == "ok"
    token.unlink()
    assert next(hub.hub(settings, ask=False)).status == "fail"
