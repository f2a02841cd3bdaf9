"""Copying a folder: the right files, all of them of one moment, and nothing else of the machine."""

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.sources import local
from lorad.sources.local import Copied, LocalSourceError, copy_folder
from lorad.text.template import find_templates

LIMIT = 64 << 20
FILES = {
    "adapter_config.json": b'{"r": 4}',
    "adapter_model.safetensors": b"w" * (3 << 20),
    "chat_template.jinja": b"{{ messages }}",
    "chat_template.json": b'{"chat_template": "json"}',
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "acme" / "a"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Copied]:
    """Copy into `tmp_path / "staging"`, from below `tmp_path / "root"`."""
    (tmp_path / "staging").mkdir()

    def run(source: Path, **options: Any) -> Copied:
        options.setdefault("roots", [tmp_path / "root"])
        options.setdefault("max_bytes", LIMIT)
        return copy_folder(source, tmp_path / "staging", **options)

    return run


def staged(tmp_path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (tmp_path / "staging").iterdir() if f.is_file()}


def refusal(copy: Callable[..., Copied], source: Path, **options: Any) -> LocalSourceError:
    with pytest.raises(LocalSourceError) as raised:
        copy(source, **options)
    assert "\n" not in raised.value.message
    return raised.value


def open_files() -> set[str]:
    """What the open descriptors of this process refer to."""
    links = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the listing's own
    return links


def test_the_adapters_files_are_copied_and_nothing_else(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    (source / "optimizer.pt").write_bytes(b"x")
    (source / "lorad.toml").write_text("pin = true")
    (source / ".adapter_config.json.swp").touch()
    (source / "checkpoint-4").mkdir()
    copied = copy(source)
    assert staged(tmp_path) == FILES
    assert copied.files == {name: len(content) for name, content in FILES.items()}
    assert copied.num_bytes == sum(copied.files.values())


def test_an_mlx_adapters_weights_are_copied_under_their_own_name(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    """Large as they are, and without traces of the checkpoints beside them."""
    (source / "adapter_model.safetensors").rename(source / "adapters.safetensors")
    (source / "0000100_adapters.safetensors").write_bytes(b"x")
    copy(source)
    assert staged(tmp_path) == {
        name.replace("adapter_model.", "adapters."): data for name, data in FILES.items()
    }


def test_each_file_that_a_chat_template_may_lie_in_reaches_who_reads_it(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    (source / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    copy(source)
    found = []
    for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"):
        found.append(find_templates(tmp_path / "staging")["default"])
        (tmp_path / "staging" / name).unlink()
    assert found == ["{{ messages }}", "config", "json"]
    assert find_templates(tmp_path / "staging") == {}


def test_progress_is_told_in_bytes_and_may_end_the_copy(
    copy: Callable[..., Copied], source: Path
) -> None:
    told: list[tuple[int, int]] = []
    copy(source, progress=lambda done, total: told.append((done, total)))
    total = sum(map(len, FILES.values()))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) == len(FILES) + 2  # the weights have three chunks


def test_a_copy_that_is_ended_leaves_nothing_open(
    copy: Callable[..., Copied], source: Path
) -> None:
    def cancel(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = open_files()
    with pytest.raises(KeyboardInterrupt):
        copy(source, progress=cancel)
    assert open_files() == before


# ----------------------------------------------------------------- where from
@pytest.mark.parametrize(
    "path", ["/etc", "relative", "root/../etc", "root/acme/../../x", "rooted", "."]
)
def test_a_folder_outside_the_roots_is_refused_before_it_is_opened(
    copy: Callable[..., Copied], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    source = Path(path) if path in ("/etc", "relative", ".") else tmp_path / path
    monkeypatch.setattr(os, "open", None)
    assert refusal(copy, source).code == "permission_denied"


def test_a_root_that_is_a_link_is_the_operators_choice(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    copy(tmp_path / "alias" / "acme" / "a", roots=[tmp_path / "alias"])
    assert staged(tmp_path) == FILES


def test_the_real_path_of_a_linked_root_is_allowed_too(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    copy(source, roots=[tmp_path / "elsewhere", tmp_path / "alias"])
    assert staged(tmp_path) == FILES


@pytest.mark.parametrize("at", ["acme", "acme/a"])
def test_a_link_on_the_way_is_refused(
    copy: Callable[..., Copied], source: Path, tmp_path: Path, at: str
) -> None:
    link = tmp_path / "root" / at
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    error = refusal(copy, source)
    assert error.code == "E_NOT_A_FOLDER"
    assert "link" in error.message


def test_a_missing_folder_and_a_file_are_no_folders(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    assert refusal(copy, tmp_path / "root" / "none\n\x1b[0m").code == "E_NOT_A_FOLDER"
    assert refusal(copy, source / "adapter_config.json").code == "E_NOT_A_FOLDER"


def test_a_refused_copy_leaves_nothing_open(copy: Callable[..., Copied], source: Path) -> None:
    before = open_files()
    refusal(copy, source / "none")
    refusal(copy, source, max_bytes=1)
    assert open_files() == before


# ----------------------------------------------------------------- what kind of file
def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    """Bound through a descriptor of its folder: socket paths end at 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


@pytest.mark.parametrize("make", [_fifo, _link, _folder, _socket])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused_without_waiting(
    copy: Callable[..., Copied], source: Path, name: str, make: Callable[[Path], None]
) -> None:
    (source / name).unlink()
    make(source / name)
    error = refusal(copy, source)
    assert error.code == "E_NOT_REGULAR"
    assert name in error.message


@pytest.mark.parametrize("make", [_fifo, _link])
def test_a_file_that_is_swapped_between_look_and_open_is_refused(
    copy: Callable[..., Copied],
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
) -> None:
    name = "adapter_model.safetensors"
    real_open = os.open

    def swap_first(path: Any, *args: Any, **options: Any) -> int:
        if path == name and not args[0] & os.O_CREAT:
            (source / name).unlink()
            make(source / name)
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", swap_first)
    assert refusal(copy, source).code == "E_NOT_REGULAR"


def test_a_file_that_may_not_be_read_is_named(
    copy: Callable[..., Copied], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def deny(path: Any, *args: Any, **options: Any) -> int:
        if path == "adapter_config.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", deny)
    error = refusal(copy, source)
    assert (error.code, error.message) == (
        "E_UNREADABLE",
        "adapter_config.json cannot be read: Permission denied",
    )


# ----------------------------------------------------------------- how much
def test_more_bytes_than_allowed_are_not_even_begun(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    total = sum(map(len, FILES.values()))
    error = refusal(copy, source, max_bytes=total - 1)
    assert error.code == "E_FILE_TOO_LARGE"
    assert f"{total} bytes" in error.message and "max_adapter_bytes" in error.hint
    assert staged(tmp_path) == {}
    copy(source, max_bytes=total)


def test_a_huge_small_file_is_refused_by_name(
    copy: Callable[..., Copied], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_SMALL_BYTES", 10)
    error = refusal(copy, source)
    assert error.code == "E_FILE_TOO_LARGE"
    assert "chat_template.jinja has 14 bytes" in error.message


def test_a_full_disk_is_no_fault_of_the_folder(
    copy: Callable[..., Copied], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, fd: int, *_: Any) -> None:
            os.close(fd)

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fdopen", Full)
    assert refusal(copy, source).code == "insufficient_storage"


# ----------------------------------------------------------------- while somebody writes
def _append(source: Path) -> None:
    with (source / "adapter_model.safetensors").open("ab") as file:
        file.write(b"more")


def _overwrite(source: Path) -> None:
    with (source / "adapter_model.safetensors").open("r+b") as file:
        file.write(b"W")


def _truncate(source: Path) -> None:
    os.truncate(source / "adapter_model.safetensors", 1 << 20)


def _replace(source: Path) -> None:
    (source / "new").write_bytes(FILES["adapter_config.json"])
    (source / "new").rename(source / "adapter_config.json")


def _remove(source: Path) -> None:
    (source / "adapter_config.json").unlink()


def _add(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("change", [_append, _overwrite, _truncate, _replace, _remove, _add])
def test_a_folder_that_changes_while_it_is_copied_is_a_conflict(
    copy: Callable[..., Copied], source: Path, change: Callable[[Path], None]
) -> None:
    """The change comes after the config and the first MiB of the weights are copied."""
    calls = iter(range(10))

    def progress(done: int, total: int) -> None:
        if next(calls) == 1:
            change(source)

    assert refusal(copy, source, progress=progress).code == "conflict"


def test_in_a_race_with_a_swapped_link_only_bytes_of_the_folder_are_copied(
    source: Path, tmp_path: Path
) -> None:
    """Somebody swaps the weights with a link to a secret, and the folder with a link, all along."""
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in FILES:
        (secret / name).write_bytes(b"SECRET")
    stop = threading.Event()

    def swap() -> None:
        weights, aside = source / "adapter_model.safetensors", tmp_path / "aside"
        while not stop.is_set():
            weights.rename(aside)
            weights.symlink_to(secret / "adapter_model.safetensors")
            weights.unlink()
            aside.rename(weights)
            source.rename(tmp_path / "away")
            source.symlink_to(secret)
            source.unlink()
            (tmp_path / "away").rename(source)

    thread = threading.Thread(target=swap)
    thread.start()
    outcomes: dict[str, int] = {}
    try:
        for n in range(300):
            target = tmp_path / f"staging{n}"
            target.mkdir()
            try:
                copy_folder(source, target, roots=[tmp_path / "root"], max_bytes=LIMIT)
                outcome = "copied"
            except LocalSourceError as error:
                outcome = error.code
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            for file in target.iterdir():
                assert b"SECRET" not in file.read_bytes()
                file.unlink()
    finally:
        stop.set()
        thread.join()
    assert outcomes.keys() <= {"copied", "conflict", "E_NOT_REGULAR", "E_NOT_A_FOLDER"}
    assert len(outcomes) > 1


# ----------------------------------------------------------------- what is missing
def test_what_lies_there_instead_is_left_as_empty_names(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    for inner in ("checkpoint-4", "notes"):
        (source / inner).mkdir()
    (source / "checkpoint-4" / "adapter_config.json").write_text("{}")
    (source / "notes" / "x").write_text("x")
    copied = copy(source)
    assert set(copied.files) == FILES.keys() - {"adapter_model.safetensors"}
    staging = tmp_path / "staging"
    assert (staging / "adapter_model.bin").read_bytes() == b""
    assert (staging / "checkpoint-4" / "adapter_config.json").read_bytes() == b""
    assert not (staging / "notes").exists()
    assert (staging / "adapter_config.json").read_bytes() == FILES["adapter_config.json"]


def test_inspection_can_say_what_lies_there_instead(
    copy: Callable[..., Copied], source: Path, tmp_path: Path
) -> None:
    from engine.adapters.adapter_folder import AdapterFolder
    from engine.errors import AdapterInvalid

    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    copy(source)
    with AdapterFolder(tmp_path / "staging") as folder, pytest.raises(AdapterInvalid) as raised:
        folder.need_both_files()
    assert raised.value.reason == "E_PICKLE"


def test_every_code_is_one_that_the_daemon_knows() -> None:
    from engine.adapters.peft import REASONS
    from lorad.errors import TABLE

    text = Path(local.__file__).read_text()
    codes = {word.strip('",') for word in text.split() if word.startswith('"E_')}
    assert len(codes) == 4 and codes <= REASONS.keys()
    assert {"permission_denied", "conflict", "insufficient_storage", "internal_error"} <= set(TABLE)
