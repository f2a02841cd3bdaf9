"""The store: whole or not at all, read-only, within its budget."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.registry import failpoints
from lorad.registry.store import Store

REV, OTHER = "a" * 64, "b" * 64
Put = Callable[[Store, bytes], str]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield Store(tmp_path / "store")
    failpoints.set_hook(None)


def test_a_committed_folder_is_whole_and_read_only(store: Store) -> None:
    staging = store.stage()
    (staging.path / "adapter_config.json").write_text("{}")
    (staging.path / "adapter_model.safetensors").write_bytes(b"weights")
    path = store.commit(staging, REV)
    assert path == store.path(REV) and store.has(REV) and store.revs() == {REV}
    assert sorted(p.name for p in path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o440 for p in path.iterdir())
    assert not staging.path.exists()


def test_content_that_is_there_already_wins(store: Store, put: Put) -> None:
    rev = put(store, b"weights")
    inode = store.path(rev).stat().st_ino
    staging = store.stage()
    (staging.path / "adapter_model.safetensors").write_bytes(b"weights")
    assert store.commit(staging, rev) == store.path(rev)
    assert store.path(rev).stat().st_ino == inode and not staging.path.exists()


def test_two_that_commit_the_same_content_at_once_leave_one(store: Store, put: Put) -> None:
    """The second arrives between the first one's look and its rename."""
    first = store.stage()
    (first.path / "adapter_model.safetensors").write_bytes(b"weights")

    def other(place: str) -> None:
        if place == "store.before_rename":
            failpoints.set_hook(None)
            put(store, b"weights")

    rev = hashlib.sha256(b"weights").hexdigest()
    failpoints.set_hook(other)
    assert store.commit(first, rev) == store.path(rev)
    assert store.revs() == {rev} and not first.path.exists()


def test_every_file_and_folder_is_synced_before_the_rename_and_the_store_after(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    failpoints.set_hook(lambda place: log.append(place))
    staging = store.stage()
    (staging.path / "weights").write_bytes(b"x")
    store.commit(staging, REV)
    assert log == [
        "weights",
        "store.file_synced",
        staging.id,
        "store.before_rename",
        "store.renamed",
        "store",
    ]


@pytest.mark.parametrize("wrong", ["", "../x", "A" * 64, "a" * 63, "a" * 64 + "/.."])
def test_a_revision_that_is_no_digest_never_becomes_a_path(store: Store, wrong: str) -> None:
    with pytest.raises(ValueError, match="not a revision"):
        store.path(wrong)
    with pytest.raises(ValueError, match="not a layout"):
        store.packed(REV, "../" + wrong)


def test_a_link_in_a_staging_folder_is_refused(store: Store, tmp_path: Path) -> None:
    staging = store.stage()
    (tmp_path / "secret").write_text("x")
    (staging.path / "adapter_model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="not a regular file"):
        store.commit(staging, REV)
    assert not store.has(REV)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) != 0o440


def test_reconcile_clears_leftovers_and_reports_both_sides(store: Store, put: Put) -> None:
    rev = put(store, b"1")
    store.stage()
    store.stage()
    (store.path(rev) / "packed-abc.bin.tmp").write_bytes(b"half")
    report = store.reconcile([OTHER])
    assert (report.stale_staging, report.missing, report.unknown) == (2, (OTHER,), (rev,))
    assert list((store.directory / ".staging").iterdir()) == []
    assert [p.name for p in store.path(rev).iterdir()] == ["adapter_model.safetensors"]


def test_gc_keeps_what_it_is_told_to_keep(store: Store, put: Put) -> None:
    keep, drop = put(store, b"1"), put(store, b"2")
    assert store.gc({keep}) == (drop,)
    assert store.revs() == {keep} and store.gc({keep}) == ()


def test_the_budget_counts_packed_files_and_comes_back_when_revisions_go(
    tmp_path: Path, put: Put
) -> None:
    store = Store(tmp_path / "store", budget_bytes=1000)
    rev = put(store, b"x" * 600)
    store.packed(rev, "abc").write_bytes(b"p" * 300)
    assert store.seal_packed(rev, "abc") == 300
    assert store.used_bytes() == 900 == Store(tmp_path / "store").used_bytes()
    with pytest.raises(LoradError) as refused:
        store.stage(expected_bytes=200)
    assert refused.value.code == "insufficient_storage" and "900 of 1000" in refused.value.message
    with pytest.raises(LoradError):
        put(store, b"y" * 200)
    store.gc(set())
    assert store.used_bytes() == 0
    put(store, b"y" * 200)


def test_more_than_the_disk_holds_is_refused_before_a_byte_is_copied(store: Store) -> None:
    with pytest.raises(LoradError) as refused:
        store.stage(expected_bytes=1 << 60)
    assert refused.value.code == "insufficient_storage"
    assert list((store.directory / ".staging").iterdir()) == []


def test_a_store_that_cannot_be_written_to_says_so_and_what_to_do(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(LoradError) as refused:
        store.stage()
    assert refused.value.code == "insufficient_storage" and "Read-only" in refused.value.message
    assert "writable" in refused.value.hint


def test_a_removed_revision_is_out_of_sight_before_its_files_go(store: Store, put: Put) -> None:
    rev = put(store, b"1")
    seen: list[bool] = []
    failpoints.set_hook(lambda place: seen.append(store.has(rev)))
    assert store.remove([rev, OTHER]) == (rev,)
    assert seen == [False]


def test_a_discarded_staging_folder_is_gone_and_discarding_again_is_fine(store: Store) -> None:
    staging = store.stage()
    (staging.path / "f").write_bytes(b"x")
    store.discard(staging)
    store.discard(staging)
    assert not staging.path.exists()
