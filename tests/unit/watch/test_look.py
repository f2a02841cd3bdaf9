"""Looking at the disk: which folders are adapters, which are whole, and no way out of the inbox."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lorad.watch.inbox import InboxFolder, describe
from lorad.watch.look import is_temporary, look, scan

Fill = Callable[..., Path]


def names(inbox: Path) -> set[str]:
    return {str(folder.relative_to(inbox)) for folder in scan(inbox).found}


def is_whole(folder: Path) -> bool:
    return look(folder.parent, folder, {}).view.whole


def described(inbox: Path, folder: Path) -> InboxFolder:
    seen = look(inbox, folder, {})
    return describe(inbox, folder, seen.toml, seen.view.signature)


def test_a_folder_with_adapter_files_is_one_and_else_its_children_are(
    tmp_path: Path, fill_folder: Fill
) -> None:
    fill_folder(tmp_path / "plain")
    fill_folder(tmp_path / "acme" / "one")
    fill_folder(tmp_path / "plain" / "checkpoint-4")  # part of plain
    fill_folder(tmp_path / "acme" / "two" / "deep")  # no name is that deep: found, to be refused
    fill_folder(tmp_path / "a" / "b" / "c" / "d")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config-only").mkdir()
    (tmp_path / "config-only" / "adapter_config.json").touch()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").touch()
    (tmp_path / "file").touch()
    assert names(tmp_path) == {"plain", "acme/one", "acme/two/deep", "config-only", "pickle"}


def test_a_stray_file_does_not_hide_a_tenants_adapters(tmp_path: Path, fill_folder: Fill) -> None:
    fill_folder(tmp_path / "acme" / "one")
    for stray in ("README.md", "optimizer.pt", "training_args.bin", "lorad.toml"):
        (tmp_path / "acme" / stray).touch()
    assert names(tmp_path) == {"acme/one"}


@pytest.mark.parametrize(
    "name", [".hidden", "a.tmp", "a.part", "a~", "a.swp", "4913", ".adapter_model.safetensors.Xy12"]
)
def test_names_in_the_making_are_ignored(tmp_path: Path, fill_folder: Fill, name: str) -> None:
    assert is_temporary(name)
    fill_folder(tmp_path / name)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("x")
    assert names(tmp_path) == set()


def test_links_are_not_followed_but_told(tmp_path: Path, fill_folder: Fill) -> None:
    outside = fill_folder(tmp_path / "outside")
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "link").symlink_to(outside)
    (inbox / "loop").symlink_to(inbox)
    found = scan(inbox)
    assert found.found == {}
    assert sorted(found.links) == [inbox / "link", inbox / "loop"]
    assert look(inbox, inbox / "link", {}).view.signature == ""


def test_the_inbox_itself_may_be_a_link(tmp_path: Path, fill_folder: Fill) -> None:
    fill_folder(tmp_path / "real" / "a")
    (tmp_path / "inbox").symlink_to(tmp_path / "real")
    assert names(tmp_path / "inbox") == {"a"}


def test_the_signature_is_of_names_sizes_times_and_inodes(
    tmp_path: Path, fill_folder: Fill, weight_bytes: Callable[..., bytes]
) -> None:
    folder = fill_folder(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    seen = [scan(tmp_path).found[folder]]

    def look_again() -> str:
        signature = scan(tmp_path).found[folder]
        assert look(tmp_path, folder, {}).view.signature == signature
        return signature

    (folder / "README.md").write_text("no part of it")
    file.read_bytes()
    assert look_again() == seen[0]
    status = file.stat()
    file.write_bytes(weight_bytes(32))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen.append(look_again())  # another size
    (folder / "new").write_bytes(file.read_bytes())
    (folder / "new").rename(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen.append(look_again())  # another inode
    os.utime(file, ns=(1, 1))
    seen.append(look_again())  # another time
    (folder / "chat_template.jinja").touch()
    seen.append(look_again())  # another name
    file.chmod(0)
    seen.append(look_again())  # cannot be read any more
    assert len(set(seen)) == 6


def test_whole_is_what_is_as_long_as_its_header_says(
    tmp_path: Path, fill_folder: Fill, weight_bytes: Callable[..., bytes]
) -> None:
    folder = fill_folder(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    assert is_whole(folder)
    data = weight_bytes()
    wrong = [data[:n] for n in (0, 7, 8, 40, len(data) - 1)]
    wrong += [data + b"x", b"\xff" * 8 + data, b"version https://git-lfs", b"\0" * 100]
    wrong.append((20).to_bytes(8, "little") + b"[" * 20)
    for content in wrong:
        file.write_bytes(content)
        assert not is_whole(folder)
    file.unlink()
    assert not is_whole(folder)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000])
def test_a_config_that_does_not_parse_is_not_whole(
    tmp_path: Path, fill_folder: Fill, content: str
) -> None:
    folder = fill_folder(tmp_path / "a")
    (folder / "adapter_config.json").write_text(content)
    assert not is_whole(folder)


def test_pipes_and_links_in_a_folder_are_neither_opened_nor_waited_for(
    tmp_path: Path, fill_folder: Fill
) -> None:
    folder = fill_folder(tmp_path / "a")
    for name in ("adapter_config.json", "adapter_model.safetensors", "lorad.toml"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert names(tmp_path) == {"a"}
    assert not is_whole(folder)
    assert described(tmp_path, folder).problem == ""
    for name in ("adapter_config.json", "lorad.toml"):
        (folder / name).unlink()
        (folder / name).symlink_to("/etc/passwd")
    assert not is_whole(folder)
    assert look(tmp_path, folder, {}).toml is None


def test_wishes_come_with_the_look(tmp_path: Path, fill_folder: Fill) -> None:
    folder = fill_folder(tmp_path / "a")
    (folder / "lorad.toml").write_text("pin = true")
    assert described(tmp_path, folder).options.pin is True
    (folder / "lorad.toml").write_text("#" * 100_000)
    assert "more than" in described(tmp_path, folder).problem


def test_a_folder_that_cannot_be_read_is_neither_found_nor_gone(
    tmp_path: Path, fill_folder: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill_folder(tmp_path / "acme" / "one")
    fill_folder(tmp_path / "other")
    real_open = os.open

    def refuse(path: object, *args: int, **options: int) -> int:
        if path == "acme":
            raise PermissionError(13, "Permission denied")
        return real_open(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    found = scan(tmp_path)
    assert set(found.found) == {tmp_path / "other"}
    assert not found.covers(folder)
    assert found.covers(tmp_path / "third")
    with pytest.raises(PermissionError):
        look(tmp_path, folder, {})
    assert scan(tmp_path, tmp_path / "acme").unreadable == [tmp_path / "acme"]


def test_a_missing_inbox_is_an_error_and_a_missing_folder_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "none")
    assert scan(tmp_path, tmp_path / "none").found == {}
    assert look(tmp_path, tmp_path / "none", {}).view.signature == ""


def test_an_mlx_adapter_is_whole_by_its_own_weights(tmp_path: Path, fill_folder: Fill) -> None:
    folder = fill_folder(tmp_path / "a")
    mlx = folder / "adapters.safetensors"
    (folder / "adapter_model.safetensors").rename(mlx)
    assert names(tmp_path) == {"a"} and is_whole(folder)
    os.truncate(mlx, mlx.stat().st_size - 1)
    assert not is_whole(folder)


def test_of_two_weights_files_both_must_be_whole(tmp_path: Path, fill_folder: Fill) -> None:
    folder = fill_folder(tmp_path / "a")
    (folder / "adapters.safetensors").write_bytes(b"\0" * 7)
    assert not is_whole(folder)


def test_checkpoints_and_other_folders_in_an_adapters_are_nothing_to_tell_of(
    tmp_path: Path, fill_folder: Fill
) -> None:
    folder = fill_folder(tmp_path / "a")
    before = look(tmp_path, folder, {})
    fill_folder(folder / "checkpoint-500")
    fill_folder(folder / ".new")
    (folder / "runs").mkdir()
    (folder / "odd" / "adapter_config.json").mkdir(parents=True)
    (folder / "away").symlink_to(fill_folder(tmp_path / "b"))
    assert look(tmp_path, folder, {}) == before and not before.nested


def test_a_folder_in_an_adapters_that_has_a_config_is_told_of(
    tmp_path: Path, fill_folder: Fill
) -> None:
    folder = fill_folder(tmp_path / "a")
    before = look(tmp_path, folder, {})
    for name in ("two", "\udcff"):
        fill_folder(folder / name)
    seen = look(tmp_path, folder, {})
    assert seen.nested == ("two", "\udcff") and seen.view.signature != before.view.signature
    assert scan(tmp_path).found == {folder: seen.view.signature}
    told = describe(tmp_path, folder, None, nested=seen.nested)
    assert told.nested == ("two", r"\xff")
    fill_folder(folder / "two", 128)
    (folder / "two" / "adapter_config.json").write_text("{}")
    assert look(tmp_path, folder, {}).view.signature != seen.view.signature
