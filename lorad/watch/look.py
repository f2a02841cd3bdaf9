"""Looking at the inbox on disk without being led out of it.

Goes in: the inbox, or one folder below it.  Comes out: which folders are adapters, and what one of
them looks like right now: a signature that tells two contents apart without reading them, whether
its files are consistent, and its lorad.toml.  Directories are opened one below the other by
descriptor and never through a symlink; of files only headers, configs and lorad.toml are read,
after making sure that they are regular.  Knows no time and no events.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.adapters.manifest import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILES
from lorad.watch.inbox import MAX_DEPTH, MAX_OPTIONS_BYTES, OPTIONS_FILE
from lorad.watch.settle import GONE, View

#: A file with one of these ends makes a folder an adapter, if only one to be refused.  A stray
#: optimizer.pt does not: in a tenant's folder it would hide all the tenant's adapters.
_WEIGHT_ENDS = (".safetensors", ".gguf")
_OWN_WEIGHT_ENDS = (".bin", ".pt", ".pth", ".ckpt", ".npz", ".json")  # after "adapter"
#: Besides config and weights, what belongs to an adapter; other files may change as they like.
_TEXT_FILES = frozenset({*TEXT_FILES, OPTIONS_FILE})
#: Names of files and folders in the making: editors, rsync, downloads.
_TEMPORARY_ENDS = (".tmp", ".part", ".partial", ".crdownload", "~", ".swp", ".swx", ".swo")
#: What transformers' Trainer leaves in the folder that it saves the adapter to.
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_MAX_HEADER = 8 << 20
_MAX_CONFIG = 1 << 20

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class _Span(msgspec.Struct):
    """A tensor of a safetensors header, as far as the file's size depends on it."""

    data_offsets: tuple[int, int] = (0, 0)


_header = msgspec.json.Decoder(dict[str, _Span])


@dataclass(slots=True)
class Scan:
    """What a walk found.  Folders below an unreadable one are neither found nor gone."""

    found: dict[Path, str] = field(default_factory=dict)  # folder -> signature
    unreadable: list[Path] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)  # where a folder is expected: not followed

    def covers(self, folder: Path) -> bool:
        """Whether `folder`, when not found, is really not there."""
        return not any(folder == hole or hole in folder.parents for hole in self.unreadable)


@dataclass(frozen=True, slots=True)
class Look:
    """One folder, looked into."""

    view: View
    toml: bytes | None
    nested: tuple[str, ...] = ()  # folders in it that look like adapters; they are not taken


@dataclass(slots=True)
class _Contents:
    """What of a folder decides: its own files by name, none if it is no adapter; and of each folder
    in it that looks like an adapter the config."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    nested: dict[str, os.stat_result] = field(default_factory=dict)

    @property
    def signature(self) -> str:
        """32 hex digits of what tells two contents apart, or readable from unreadable.  Not the
        ctime, which a new link changes too."""
        digest = hashlib.sha256()
        configs = {f"{name}/": status for name, status in self.nested.items()}
        for name, status in sorted({**self.files, **configs}.items()):
            who = (status.st_mode, status.st_uid, status.st_gid)
            row = (name, status.st_size, status.st_mtime_ns, status.st_ino, *who)
            digest.update(repr(row).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]


def is_temporary(name: str) -> bool:
    """Whether a name is hidden or says that it will be renamed when it is done; 4913 is vim's."""
    return name.startswith(".") or name == "4913" or name.endswith(_TEMPORARY_ENDS)


def scan(inbox: Path, below: Path | None = None) -> Scan:
    """Every adapter folder of the inbox, or of one folder in it.  OSError if the inbox itself
    cannot be read."""
    result = Scan()
    start = below if below is not None else inbox
    try:
        with _folder(inbox, start) as fd:
            _walk(fd, start, len(start.relative_to(inbox).parts), result)
    except OSError as error:
        if start == inbox:
            raise
        if not _is_absence(error):
            result.unreadable.append(start)
    return result


def look(inbox: Path, folder: Path, parents: dict[Path, bool]) -> Look:
    """The folder as it is now; an absent one, or one that is no adapter, has no signature.
    `parents` remembers, over a batch of looks, which parents are adapters themselves: what lies
    below an adapter is part of it.  OSError when the folder is there and cannot be read."""
    try:
        with _folder(inbox, folder) as fd:
            contents = _contents(fd)
            if not contents.files or any(
                _is_adapter(inbox, parent, parents)
                for parent in folder.parents
                if inbox in parent.parents
            ):
                return Look(GONE, None)
            whole = _config_whole(fd) and _weights_whole(fd, contents.files)
            toml = _read(fd, OPTIONS_FILE, MAX_OPTIONS_BYTES + 1)
            return Look(View(contents.signature, whole), toml, tuple(sorted(contents.nested)))
    except OSError as error:
        if _is_absence(error):
            return Look(GONE, None)
        raise


# ----------------------------------------------------------------- walking
def _walk(fd: int, path: Path, depth: int, result: Scan) -> None:
    """An adapter is not searched for others; what is deeper than a name can be is found too, so
    that it can be refused aloud."""
    if depth > 0:
        contents = _contents(fd)
        if contents.files:
            result.found[path] = contents.signature
            return
    if depth > MAX_DEPTH:
        return
    for name in _subfolders(fd, path, result.links):
        try:
            child = os.open(name, _OPEN_DIR | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as error:
            if not _is_absence(error):
                result.unreadable.append(path / name)
            continue
        try:
            _walk(child, path / name, depth + 1, result)
        except OSError:
            result.unreadable.append(path / name)
        finally:
            os.close(child)


def _subfolders(fd: int, path: Path, links: list[Path]) -> list[str]:
    names = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if is_temporary(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
            elif entry.is_symlink():
                links.append(path / entry.name)
    return sorted(names)


def _contents(fd: int) -> _Contents:
    """The files that make the folder an adapter and those that belong to it.  Links and devices
    count: they make an adapter that will be refused."""
    found = _Contents()
    folders = []
    with os.scandir(fd) as entries:
        for entry in entries:
            name = entry.name
            if is_temporary(name):
                continue
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif _makes_adapter(name) or name in _TEXT_FILES:
                    found.files[name] = entry.stat(follow_symlinks=False)
    if not any(map(_makes_adapter, found.files)):
        return _Contents()
    for name in folders:
        if not _CHECKPOINT.fullmatch(name):
            with suppress(OSError):
                config = os.stat(f"{name}/{CONFIG_FILE}", dir_fd=fd, follow_symlinks=False)
                if not stat.S_ISDIR(config.st_mode):
                    found.nested[name] = config
    return found


def _makes_adapter(name: str) -> bool:
    return name.endswith(_WEIGHT_ENDS) or (
        name.startswith("adapter") and name.endswith(_OWN_WEIGHT_ENDS)
    )


def _is_adapter(inbox: Path, folder: Path, known: dict[Path, bool]) -> bool:
    if folder not in known:
        known[folder] = False
        with suppress(OSError), _folder(inbox, folder) as fd:
            known[folder] = bool(_contents(fd).files)
    return known[folder]


@contextmanager
def _folder(inbox: Path, folder: Path) -> Iterator[int]:
    """A descriptor of a folder below the inbox, opened step by step.  The inbox itself may be a
    link: that is the operator's choice."""
    fd = os.open(inbox, _OPEN_DIR)
    try:
        for name in folder.relative_to(inbox).parts:
            child = os.open(name, _OPEN_DIR | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)


def _is_absence(error: OSError) -> bool:
    """Not there, or something else is there now (a file, a link)."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


# ----------------------------------------------------------------- one folder
def _config_whole(fd: int) -> bool:
    data = _read(fd, CONFIG_FILE, _MAX_CONFIG)
    try:
        msgspec.json.decode(data or b"")
    except (ValueError, RecursionError):
        return False
    return True


def _weights_whole(fd: int, files: Collection[str]) -> bool:
    """Whether there are weights, and each file is as long as its header says."""
    there = [name for name in WEIGHTS_FILES if name in files]
    return bool(there) and all(_is_whole(fd, name) for name in there)


def _is_whole(fd: int, name: str) -> bool:
    file = _open_regular(fd, name)
    if file is None:
        return False
    try:
        size = os.fstat(file).st_size
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        if length > min(_MAX_HEADER, size - 8):
            return False
        spans = _header.decode(os.pread(file, length, 8))
    except (OSError, ValueError, RecursionError):
        return False
    finally:
        os.close(file)
    end = max((span.data_offsets[1] for span in spans.values()), default=0)
    return 8 + length + end == size


def _read(fd: int, name: str, limit: int) -> bytes | None:
    """The first `limit` bytes of a regular file, None when there is none or it cannot be read."""
    file = _open_regular(fd, name)
    if file is None:
        return None
    try:
        return os.read(file, limit)
    except OSError:
        return None
    finally:
        os.close(file)


def _open_regular(fd: int, name: str) -> int | None:
    """A descriptor, None when the file is absent, no regular file, or may not be read.  Looked at
    before it is opened, as opening a device can act on it, and after, as it may be swapped."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            return None
        file = os.open(name, _OPEN_FILE, dir_fd=fd)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    return None
