"""What stands in the place of a file: links, pipes, sockets, devices, pickles.  None is followed,
waited for, or run."""

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.peft import inspect, revision_digest
from engine.errors import AdapterInvalid
from engine.models.spec import ModelSpec

NAMES = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]


def link_to_good_copy(path: Path) -> None:
    good = path.with_name("elsewhere")
    good.write_bytes(path.read_bytes() if path.exists() else b"{}")
    path.unlink(missing_ok=True)
    path.symlink_to(good)


def put_link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # a Unix socket's path is short, pytest's folders are not
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def put_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


KINDS: dict[str, Callable[[Path], None]] = {
    "link to a good file": link_to_good_copy,
    "dangling link": lambda path: put_link(path, "nowhere"),
    "link to a device": lambda path: put_link(path, "/dev/zero"),
    "link to itself": lambda path: put_link(path, path.name),
    "link outside": lambda path: put_link(path, "../../../../etc/passwd"),
    "FIFO": put_fifo,
    "socket": put_socket,
    "folder": put_folder,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("put", KINDS.values(), ids=KINDS.keys())
def test_what_is_not_a_regular_file_is_refused_by_name(
    put: Callable[[Path], None], name: str, draft: Any, spec: ModelSpec
) -> None:
    folder = draft.write()
    put(folder / name)
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec)
    assert caught.value.reason == "E_NOT_REGULAR"
    assert name in caught.value.message
    assert caught.value.hint


def test_a_device_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with AdapterFolder(Path("/dev")) as folder:
        monkeypatch.setattr(os, "open", None)  # would raise TypeError
        with pytest.raises(AdapterInvalid) as caught:
            folder.open("null")
    assert caught.value.reason == "E_NOT_REGULAR"


def test_a_file_swapped_for_a_link_between_look_and_open_is_refused(
    draft: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = draft.write()
    path = folder / "adapter_model.safetensors"
    really_open = os.open

    def swap_first(name: Any, *args: Any, **more: Any) -> int:
        if name == path.name and not path.is_symlink():
            link_to_good_copy(path)
        return really_open(name, *args, **more)

    monkeypatch.setattr(os, "open", swap_first)
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec)
    assert caught.value.reason == "E_NOT_REGULAR"


def test_a_file_swapped_for_a_fifo_between_look_and_open_is_refused(
    draft: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = draft.write()
    path = folder / "adapter_model.safetensors"
    really_open = os.open

    def swap_first(name: Any, *args: Any, **more: Any) -> int:
        if name == path.name:
            put_fifo(path)
        return really_open(name, *args, **more)

    monkeypatch.setattr(os, "open", swap_first)
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec)
    assert caught.value.reason == "E_NOT_REGULAR"


def test_a_folder_replaced_meanwhile_is_not_mixed_with_the_old_one(
    new_draft: Callable[[], Any], spec: ModelSpec
) -> None:
    old, new = new_draft(), new_draft()
    new.config["lora_alpha"] = 99
    path = old.write()
    with AdapterFolder(path) as opened:
        path.rename(path.with_name("moved"))
        new.write().rename(path)
        assert b'"lora_alpha": 8' in opened.read("adapter_config.json", 1 << 16)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_without_permission_is_refused_by_name(
    name: str, draft: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft.files["tokenizer.json"] = b"{}"
    folder = draft.write()
    really_open = os.open

    def deny(path: Any, *args: Any, **more: Any) -> int:
        if path == name:
            raise PermissionError(13, "Permission denied")
        return really_open(path, *args, **more)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec)
    assert caught.value.reason == "E_UNREADABLE"
    assert name in caught.value.message and "Permission denied" in caught.value.message


@pytest.mark.parametrize("what", ["nothing", "a file", "a file below a file"])
def test_a_path_that_is_no_folder_is_refused(what: str, tmp_path: Path, spec: ModelSpec) -> None:
    path = tmp_path / "x"
    if what != "nothing":
        path.write_text("x")
    with pytest.raises(AdapterInvalid) as caught:
        inspect(path / "y" if "below" in what else path, spec)
    assert caught.value.reason == "E_NOT_A_FOLDER"


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mknod, (str(self.path),))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside safetensors"])
def test_a_pickle_is_neither_opened_nor_run(
    beside: bool, draft: Any, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "touched"
    draft.files["adapter_model.bin"] = pickle.dumps(Touch(trap))
    if not beside:
        draft.files["adapter_model.safetensors"] = b"absent"
    folder = draft.write()
    opened: list[str] = []
    really_open = os.open

    def note(path: Any, *args: Any, **more: Any) -> int:
        opened.append(os.fspath(path))
        return really_open(path, *args, **more)

    monkeypatch.setattr(os, "open", note)
    if beside:
        revision_digest(folder, inspect(folder, spec))
    else:
        with pytest.raises(AdapterInvalid) as caught:
            inspect(folder, spec)
        assert caught.value.reason == "E_PICKLE"
        assert "save_pretrained" in caught.value.hint
    assert opened
    assert not any(name.endswith(".bin") for name in opened)
    assert not trap.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_named_safetensors_is_not_run(
    protocol: int, draft: Any, spec: ModelSpec, tmp_path: Path
) -> None:
    trap = tmp_path / "touched"
    draft.raw_weights = pickle.dumps(Touch(trap), protocol)
    with pytest.raises(AdapterInvalid) as caught:
        inspect(draft.write(), spec)
    assert caught.value.reason == "E_PICKLE"
    assert not trap.exists()


def test_the_base_models_name_is_never_opened(
    draft: Any, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "base"
    trap.mkdir()
    draft.config["base_model_name_or_path"] = str(trap)
    folder = draft.write()
    seen: list[str] = []
    for function in ("open", "stat", "lstat", "scandir"):
        real = getattr(os, function)

        def note(path: Any, *args: Any, _real: Any = real, **more: Any) -> Any:
            seen.append(str(path))
            return _real(path, *args, **more)

        monkeypatch.setattr(os, function, note)
    inspect(folder, spec)
    assert seen
    assert not any(str(trap) in path for path in seen)


def test_no_descriptor_stays_open_whatever_happens(
    new_draft: Callable[[], Any], spec: ModelSpec
) -> None:
    drafts = [new_draft() for _ in range(4)]
    drafts[1].raw_weights = b"short"
    drafts[2].raw_config = b"{"
    drafts[3].files["tokenizer.json"] = b"{"
    folders = [draft.write() for draft in drafts]
    before = len(os.listdir("/proc/self/fd"))
    for folder in folders * 5:
        try:
            revision_digest(folder, inspect(folder, spec))
        except AdapterInvalid:
            continue
    assert len(os.listdir("/proc/self/fd")) == before
