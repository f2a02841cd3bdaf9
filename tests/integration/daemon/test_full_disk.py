"""A disk that is really full under a running daemon: told as such, nothing half done, serving goes
on, and what was refused works once there is room, without a restart."""

import errno
import os
import shutil
import subprocess

import pytest

from lorad import wire
from lorad.client import ApiError

SIZE = 6 << 20
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def _can_mount():
    mounting = [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(mounting, capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _can_mount(), reason="no user namespaces here")


class SmallDisk:
    """A daemon whose whole state lies on a small file system of its own."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.state = daemon.root / "state"
        self.state.mkdir(exist_ok=True)
        script = f'mount -t tmpfs -o size={SIZE} lorad-test {self.state} && exec "$@"'
        plain = daemon.command
        daemon.command = lambda *more: [*NAMESPACE, "sh", "-c", script, "sh", *plain(*more)]

    @property
    def inside(self):
        """The state as the daemon sees it."""
        return f"/proc/{self.daemon.process.pid}/root{self.state}"

    def fill(self, leave=0):
        """Let `leave` bytes free, a page more or less."""
        with open(f"{self.inside}/filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            filler.truncate(max(filler.tell() - leave, 0))

    def free(self):
        os.unlink(f"{self.inside}/filler")

    def staged(self):
        return os.listdir(f"{self.inside}/store/.staging")


@pytest.fixture(scope="module")
def disk(make_daemon):
    daemon = make_daemon()
    daemon.configure(extra='\n[admin]\naudit_log = "registry"\n')
    text = daemon.config.read_text().replace('settle = "100ms"', 'settle = "100ms"\nrescan = "1s"')
    daemon.config.write_text(text)
    disk = SmallDisk(daemon)
    daemon.start()
    daemon.upload("first", 1, load=True)
    daemon.before = daemon.text("first")
    return disk


def refused(call):
    with pytest.raises(ApiError) as caught:
        call()
    error = caught.value
    assert (error.status, error.code) == (507, "insufficient_storage")
    return error


@pytest.mark.parametrize("leave", [0, 16 << 10, 80 << 10], ids=["nothing", "a part", "no packing"])
def test_an_upload_is_refused_with_the_file_system_and_leaves_nothing(disk, leave):
    daemon = disk.daemon
    disk.fill(leave)
    error = refused(lambda: daemon.upload("second", 2))
    assert f"the file system {disk.state} has " in error.message
    assert "bytes are needed" in error.message
    assert str(disk.state) in error.hint
    assert daemon.adapter("second") is None
    assert disk.staged() == []
    assert daemon.text("first") == daemon.before
    disk.free()


def test_the_registry_says_so_too_and_what_it_knew_stays(disk):
    daemon = disk.daemon
    disk.fill()
    known = daemon.adapter("first").labels
    with daemon.client() as client:

        def relabel(turn):
            labels = {f"k{n}": f"{turn} ".ljust(200, "x") for n in range(64)}
            client.patch("first", wire.AdapterPatch(labels=labels))
            return labels

        def until_it_is_full():
            nonlocal known
            for turn in range(400):  # the journal may have room of its own for the first ones
                known = relabel(turn)

        error = refused(until_it_is_full)
        assert f"the file system {disk.state} has " in error.message
        assert daemon.adapter("first").labels == known
        assert daemon.text("first") == daemon.before
        disk.free()
        assert relabel(1000) == daemon.adapter("first").labels
        client.patch("first", wire.AdapterPatch(labels=dict.fromkeys(relabel(1001))))


def test_a_removal_on_a_full_disk_is_kept_or_refused_and_gc_frees_it_later(disk):
    daemon = disk.daemon
    daemon.upload("gone", 3)
    disk.fill()
    with daemon.client() as client:
        try:
            client.remove("gone")
        except ApiError as error:
            assert error.code == "insufficient_storage"
        disk.free()
        if daemon.adapter("gone") is not None:
            client.remove("gone")
        client.gc()
        assert client.gc(dry_run=True).items == ()
    stored = [name for name in os.listdir(f"{disk.inside}/store") if len(name) == 64]
    assert stored == [daemon.adapter("first").rev]


def test_everything_works_again_without_a_restart_and_the_inbox_catches_up(disk, poll):
    daemon = disk.daemon
    made = daemon.root / "made"
    daemon.inbox = made  # written outside, as the inbox is on the small disk itself
    daemon.drop("late", 4)
    disk.fill(leave=60 << 10)
    shutil.copytree(made / "late", f"{disk.inside}/inbox/late")

    def told():
        return [e for e in daemon.events() if e.type == "adapter.not_loaded" and e.name == "late"]

    poll(told, "the folder that has no room to be told of")
    assert "insufficient_storage" in {e.cause for e in told()}
    refused(lambda: daemon.upload("second", 2))
    disk.free()
    daemon.upload("second", 2)
    assert daemon.text("second") != daemon.before
    daemon.wait_state("late", "registered", "idle")
    assert len(told()) == 1  # once, however often it was tried
    assert "Traceback" not in daemon.log.read_text()
    assert daemon.stop() == 0
