"""A folder that an operator names is copied from where it may be, and from nowhere else."""

import asyncio
import ctypes
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import AdapterInvalid
from lorad.config import Settings
from lorad.config_sections import Lora, Watch
from lorad.errors import LoradError
from lorad.service.files import AdapterFiles
from lorad.service.folders import Folders

IN_OPEN = 0x20


@contextmanager
def opened(*folders):
    """What the kernel says of opens of these folders, and of what is in them: events, once over."""
    libc, events = ctypes.CDLL(None, use_errno=True), bytearray()
    watch = libc.inotify_init1(os.O_NONBLOCK)
    for folder in folders:
        assert libc.inotify_add_watch(watch, os.fsencode(folder), IN_OPEN) >= 0
    try:
        yield events
        events += os.read(watch, 1 << 16)
    except BlockingIOError:
        pass
    finally:
        os.close(watch)


class World:
    def __init__(self, root: Path) -> None:
        self.root, self.added = root, []
        for name in ("inbox", "allowed/sql", "elsewhere/sql", "staging"):
            (root / name).mkdir(parents=True)
        for folder in ("allowed/sql", "elsewhere/sql"):
            (root / folder / "adapter_config.json").write_text("{}")
            (root / folder / "adapter_model.safetensors").write_bytes(b"x" * 9)
        settings = Settings(
            lora=Lora(allowed_roots=(str(root / "allowed"),)),
            watch=Watch(dir=str(root / "inbox")),
        )
        files = AdapterFiles(settings, root, None, None)
        self.folders = Folders(self, self, copy=files.copy_named, vet=self.vet)

    def vet(self, name, source):
        if name == "taken":
            raise LoradError("name_taken", "taken")

    async def fill(self, fill):
        staging = SimpleNamespace(path=self.root / "staging")
        fill(staging)
        return staging

    async def add(self, staging, name, **terms):
        self.added.append((name, sorted(os.listdir(staging.path)), terms))

    def load(self, path, name="acme/sql", replace=False):
        asyncio.run(self.folders.add(name, str(path), replace=replace))


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_folder_in_an_allowed_root_is_copied_added_and_loaded(world):
    with opened(world.root / "allowed/sql") as events:
        world.load(world.root / "allowed/sql", replace=True)
    assert b"adapter_model.safetensors" in events  # so opens of others would be noticed below
    terms = {"source": "upload", "replace": True, "load": True}
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert world.added == [("acme/sql", files, terms)]


def test_the_inbox_is_allowed_too(world):
    (world.root / "allowed/sql").rename(world.root / "inbox/sql")
    world.load(world.root / "inbox/sql")
    assert len(world.added) == 1


@pytest.mark.parametrize("path", ["elsewhere/sql", "allowed/../elsewhere/sql", "allowedx", ""])
def test_any_other_folder_is_refused_before_it_is_opened(world, path):
    elsewhere = world.root / "elsewhere"
    with opened(elsewhere, elsewhere / "sql") as events, pytest.raises(LoradError) as caught:
        world.load(f"{world.root}/{path}")
    assert caught.value.code == "permission_denied"
    assert not world.added and not events


def test_a_link_out_of_the_root_is_not_followed(world):
    (world.root / "allowed/link").symlink_to(world.root / "elsewhere/sql")
    with opened(world.root / "elsewhere/sql") as events, pytest.raises(AdapterInvalid) as caught:
        world.load(world.root / "allowed/link")
    assert caught.value.reason == "E_NOT_A_FOLDER"
    assert not world.added and not events


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_nor_is_one_of_its_files(world, name):
    secret = world.root / "elsewhere/sql" / name
    (world.root / "allowed/sql" / name).unlink()
    (world.root / "allowed/sql" / name).symlink_to(secret)
    with opened(secret.parent) as events, pytest.raises(AdapterInvalid) as caught:
        world.load(world.root / "allowed/sql")
    assert caught.value.reason == "E_NOT_REGULAR"
    assert not world.added and not events


@pytest.mark.parametrize("path", ["", "allowed/sql", "org/name", "hf:org/name", "/a\0b"])
def test_what_is_no_absolute_path_is_named_as_such(world, path):
    with pytest.raises(LoradError) as caught:
        world.load(path)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "lora_path")


def test_a_name_that_is_not_to_be_had_is_refused_before_anything_is_copied(world):
    with pytest.raises(LoradError, match="taken"):
        world.load(world.root / "allowed/sql", name="taken")
    assert not os.listdir(world.root / "staging")
