"""Every way in which people put an adapter into the inbox of a running daemon: taken exactly once a
change, when it is whole, and by the bytes that were hashed."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

_DAEMONS = sys.modules["daemons_of_watch"]
#: A daemon, and ways that rest for seconds to see that nothing more comes.
pytestmark = pytest.mark.late
WRITE, UNTIL = _DAEMONS.write_adapter, _DAEMONS.until


@pytest.fixture(scope="module")
def daemon(make_daemon):
    return make_daemon().start()


@pytest.fixture
def made(daemon, request):
    """made(seed): a folder outside the inbox, on the same file system."""
    number = iter(range(100))

    def make(seed):
        return WRITE(daemon.root / f"made-{request.node.name}-{next(number)}", seed)

    return make


def served(daemon, name):
    """Its row once it serves; before that it only waits to be packed."""

    def there():
        row = daemon.adapter(name)
        return row if row is not None and row.rev and not row.candidate_rev else None

    return UNTIL(there, lambda: f"{name} to serve:\n{daemon.tail()}")


def changes(daemon, name):
    """How often the daemon took it: registered, or put in the place of what served."""
    kinds = ("adapter.added", "adapter.replaced")
    return [e.type for e in daemon.events() if e.name == name and e.type in kinds]


def rests(daemon, poll, name, seconds=0.5):
    """Until nothing has happened to `name` for a while."""
    seen = -1
    while seen != (seen := len([e for e in daemon.events() if e.name == name])):
        threading.Event().wait(seconds)


def slowly(source, target):
    """Both files at once, a little at a time, never longer apart than the settle time."""
    target.mkdir()
    for file in sorted(source.iterdir(), reverse=True):
        data = file.read_bytes()
        step = max(len(data) // 12, 1)
        with (target / file.name).open("wb", buffering=0) as out:
            for at in range(0, len(data), step):
                out.write(data[at : at + step])
                threading.Event().wait(0.03)


def copied(source, target):
    subprocess.run(["cp", "-r", source, target], check=True)


def moved(source, target):
    source.rename(target)


def untarred(source, target):
    """Straight into the inbox, file by file."""
    target.mkdir()
    packed = subprocess.run(["tar", "cf", "-", "-C", source, "."], check=True, capture_output=True)
    subprocess.run(["tar", "xf", "-", "-C", target], check=True, input=packed.stdout)


def rsynced(source, target):
    """rsync's system calls: a hidden file beside its place, written, dated, renamed."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        hidden = target / f".{file.name}.Xy12Zq"
        with hidden.open("wb") as out:
            out.write(file.read_bytes())
        os.utime(hidden, ns=(0, file.stat().st_mtime_ns))
        hidden.rename(target / file.name)


WAYS = {"cp": copied, "mv": moved, "tar": untarred, "rsync": rsynced, "slow": slowly}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_taken_once_and_once_more_for_a_change(daemon, poll, made, way):
    name = f"by-{way}"
    WAYS[way](made(1), daemon.inbox / name)
    served(daemon, name)
    first = daemon.adapter(name).rev
    replacement = made(2)
    if way == "mv":
        (daemon.inbox / name).rename(daemon.root / f"old-{name}")
        replacement.rename(daemon.inbox / name)
    else:  # over what is there, as these tools do
        for file in replacement.iterdir():
            hidden = daemon.inbox / name / f".{file.name}.tmp"
            shutil.copyfile(file, hidden)
            hidden.rename(daemon.inbox / name / file.name)
    poll(lambda: daemon.adapter(name).rev != first, "the change to be taken")
    rests(daemon, poll, name)
    assert changes(daemon, name) == ["adapter.added", "adapter.replaced"]
    assert daemon.adapter(name).reason is None


def test_a_save_by_vim_is_one_change(daemon, poll, made):
    moved(made(3), daemon.inbox / "edited")
    served(daemon, "edited")
    first, folder = daemon.adapter("edited").rev, daemon.inbox / "edited"
    config = folder / "adapter_config.json"
    text = json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1})
    (folder / ".adapter_config.json.swp").write_text("swap")
    (folder / "4913").touch()
    (folder / "4913").unlink()
    config.rename(folder / "adapter_config.json~")
    config.write_text(text)
    (folder / "adapter_config.json~").unlink()
    (folder / ".adapter_config.json.swp").unlink()
    poll(lambda: daemon.adapter("edited").rev != first, "the save to be taken")
    rests(daemon, poll, "edited")
    assert changes(daemon, "edited") == ["adapter.added", "adapter.replaced"]


def test_a_truncated_file_is_quarantined_what_serves_goes_on_and_whole_it_is_taken(
    daemon, poll, made
):
    moved(made(4), daemon.inbox / "cut")
    served(daemon, "cut")
    first, before = daemon.adapter("cut").rev, daemon.text("cut")
    weights = daemon.inbox / "cut" / "adapter_model.safetensors"
    whole = (made(5) / weights.name).read_bytes()
    weights.write_bytes(whole[:-100])
    poll(lambda: daemon.adapter("cut").reason == "E_TRUNCATED", "the cut file to be refused")
    assert daemon.adapter("cut").rev == first and daemon.text("cut") == before
    weights.write_bytes(whole)
    poll(lambda: daemon.adapter("cut").rev != first, "the whole file to be taken")
    assert daemon.adapter("cut").reason is None and daemon.text("cut") != before
    assert [e.type for e in daemon.events() if e.name == "cut"].count("adapter.rejected") == 1


def test_a_link_that_takes_turns_with_a_folder_never_brings_in_what_lies_outside(
    daemon, poll, made
):
    """Both kinds: the folder itself, and its weights."""
    outside, inside = made(6), made(7)
    moved(made(7), daemon.inbox / "raced")
    served(daemon, "raced")
    allowed = daemon.adapter("raced").rev
    folder, aside = daemon.inbox / "raced", daemon.root / "aside"
    weights = inside / "adapter_model.safetensors"
    kept = weights.with_suffix(".kept")
    done = time.monotonic() + 2.5
    seen = set()
    while time.monotonic() < done:
        folder.rename(aside)
        folder.symlink_to(outside)
        threading.Event().wait(0.03)
        folder.unlink()
        aside.rename(folder)
        here = folder / weights.name
        here.rename(kept)
        here.symlink_to(outside / weights.name)
        threading.Event().wait(0.11)
        here.unlink()
        kept.rename(here)
        threading.Event().wait(0.12)
        row = daemon.adapter("raced")
        seen.add(row.rev)
    assert seen == {allowed}
    poll(lambda: daemon.adapter("raced").reason in (None, "E_NOT_REGULAR"), "an end")
    assert daemon.adapter("raced").rev == allowed


def test_one_content_under_two_names_is_pinned_if_either_is_and_outlives_either(daemon, made):
    moved(made(8), daemon.inbox / "left")
    served(daemon, "left")
    right = daemon.upload("acme/right", 8, pin=True, priority=80, load=True)
    left = daemon.wait_state("left", "idle")
    assert left.rev == right.rev
    assert (left.pinned, daemon.adapter("acme/right").pinned) == (False, True)
    with daemon.client() as client:
        slots = {s.name: s for s in client.slots().items if s.rev == left.rev}
        assert set(slots) == {"left", "acme/right"}
        assert len({s.slot for s in slots.values()}) == 1
        (item,) = client.evict("left").items
        assert not item.ok and item.code == "pinned" and "acme/right" in item.message
        before = daemon.text("left")
        assert before == daemon.text("acme/right")
        client.remove("acme/right")
        assert daemon.text("left") == before
        (item,) = client.evict("left").items
        assert item.ok  # the pin went with its name
        assert client.gc(dry_run=True).items == ()
        assert daemon.text("left") == before
