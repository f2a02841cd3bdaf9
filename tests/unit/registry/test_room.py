"""What the store holds is counted to the byte, and what may leave it leaves whole."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorad import disk
from lorad.errors import LoradError
from lorad.registry import failpoints
from lorad.registry.holdings import holdings
from lorad.registry.room import Room, tree_bytes
from lorad.registry.store import Store

Put = Callable[[Store, bytes], str]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield Store(tmp_path / "store")
    failpoints.set_hook(None)


def pack(store: Store, rev: str, layout: str, size: int) -> None:
    """A packed file with its checksums, as a packer leaves them."""
    path = store.packed(rev, layout)
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(size))
    path.with_suffix(".sums").unlink(missing_ok=True)
    path.with_suffix(".sums").write_bytes(bytes(8))
    store.seal_packed(rev, layout)


def exact(store: Store) -> bool:
    """Whether what was kept up is what a fresh count finds."""
    return store.used_bytes() == Store(store.directory).used_bytes()


def test_what_is_kept_up_is_what_a_count_would_find(store: Store, put: Put) -> None:
    assert store.used_bytes() == 0
    first, second = put(store, b"x" * 600), put(store, b"y" * 500)
    assert store.used_bytes() == 1100 and exact(store)
    pack(store, first, "abc", 300)
    pack(store, first, "abc", 300)  # packed anew: counted once
    pack(store, first, "old", 40)
    assert store.used_bytes() == 1100 + 308 + 48 and exact(store)
    assert store.drop_packed(first, ["old"]) == 48 and exact(store)
    assert store.make_remote(second) == 500 and exact(store)
    store.remove((first,))
    assert store.used_bytes() == 0 and exact(store)


def test_a_look_tells_own_files_from_packed_ones(store: Store, put: Put) -> None:
    rev = put(store, b"x" * 600)
    pack(store, rev, "abc", 300)
    pack(store, rev, "abcwbase", 30)
    (found,) = holdings(store)
    assert (found.rev, found.file_bytes, found.packed_bytes) == (rev, 600, 308 + 38)
    assert [(file.layout, file.num_bytes) for file in found.packed] == [
        ("abc", 308),
        ("abcwbase", 38),
    ]
    assert not found.remote and "adapter_model.safetensors" in found.names


def test_what_is_being_written_has_its_room_already(tmp_path: Path) -> None:
    room = Room(tmp_path, 100, list)
    with room.reserve(60):
        assert room.lacking(40) == 0 and room.lacking(41) == 1
        with pytest.raises(LoradError), room.reserve(41):
            pass
    with room.reserve(100):
        pass
    assert room.lacking(101) == 1


def test_of_two_that_reserve_at_once_one_is_refused(tmp_path: Path) -> None:
    room = Room(tmp_path, 100, list)
    inside, done, refused = threading.Barrier(8), threading.Event(), []

    def claim() -> None:
        inside.wait()
        try:
            with room.reserve(51):
                done.wait(10)
        except LoradError:
            refused.append(1)
            if len(refused) == 7:
                done.set()

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7


def test_a_remote_revision_is_its_mark_alone_and_comes_back_by_a_commit(
    store: Store, put: Put
) -> None:
    rev = put(store, b"x" * 600)
    pack(store, rev, "abc", 300)
    assert store.make_remote(rev) == 908
    assert store.remote == {rev} == Store(store.directory).remote
    assert store.has(rev) and os.listdir(store.path(rev)) == ["remote"]
    assert store.reconcile({rev}).missing == ()
    assert put(store, b"x" * 600) == rev
    assert store.remote == set() and os.listdir(store.path(rev)) == ["adapter_model.safetensors"]
    assert list((store.directory / ".staging").iterdir()) == []


class Killed(Exception):
    """The process ends here."""


def kill_at(place: str) -> None:
    def hook(name: str) -> None:
        if name == place:
            raise Killed

    failpoints.set_hook(hook)


def test_a_crash_on_the_way_out_leaves_it_remote(store: Store, put: Put) -> None:
    rev = put(store, b"x" * 600)
    kill_at("remote.marked")
    with pytest.raises(Killed):
        store.make_remote(rev)
    after = Store(store.directory)
    assert after.reconcile({rev}).missing == ()
    assert after.remote == {rev} and os.listdir(after.path(rev)) == ["remote"]


def test_a_crash_on_the_way_back_leaves_it_remote(store: Store, put: Put) -> None:
    rev = put(store, b"x" * 600)
    store.make_remote(rev)
    kill_at("remote.filled")
    with pytest.raises(Killed):
        put(store, b"x" * 600)
    failpoints.set_hook(None)
    after = Store(store.directory)
    after.reconcile({rev})
    assert after.remote == {rev} and os.listdir(after.path(rev)) == ["remote"]
    assert put(after, b"x" * 600) == rev and after.remote == set()


def test_a_crash_between_checksums_and_packed_file_leaves_an_unfinished_one(
    store: Store, put: Put
) -> None:
    rev = put(store, b"x" * 600)
    pack(store, rev, "abc", 300)
    kill_at("unpack.sums_gone")
    with pytest.raises(Killed):
        store.drop_packed(rev, ["abc"])
    assert store.packed(rev, "abc").exists()
    assert not store.packed(rev, "abc").with_suffix(".sums").exists()


def test_leftovers_are_swept_but_not_what_a_packer_is_at(store: Store, put: Put) -> None:
    rev = put(store, b"x" * 600)
    aside = store.directory / ".staging" / "gone-x"
    aside.mkdir()
    (aside / "file").write_bytes(bytes(10))
    dead = store.path(rev) / "packed-abc.bin.999999999.tmp"
    alive = store.path(rev) / f"packed-abc.bin.{os.getpid()}.tmp"
    for path in (dead, alive):
        path.write_bytes(bytes(5))
    open_one = store.stage()
    assert store.sweep() == 15
    assert not aside.exists() and not dead.exists()
    assert alive.exists() and open_one.path.exists()


def test_a_full_disk_is_told_with_its_file_system_and_what_is_needed(tmp_path: Path) -> None:
    error = disk.full("cannot store an adapter", tmp_path / "not" / "yet", 4096)
    mount = disk.mount_of(tmp_path)
    assert os.path.ismount(mount) and str(tmp_path).startswith(str(mount))
    assert f"the file system {mount} has " in error.message
    assert error.message.endswith("4096 bytes are needed")
    assert error.hint == f"free space on {mount}, then repeat; nothing was changed"
    assert (error.status, error.exit) == (507, 9)


def test_bytes_of_a_tree_do_not_trip_over_what_vanishes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(bytes(3))
    (tmp_path / "dangling").symlink_to("nowhere")
    assert tree_bytes(tmp_path) == 3 + len("nowhere")
    assert tree_bytes(tmp_path / "absent") == 0
