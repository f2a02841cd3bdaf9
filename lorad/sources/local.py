"""A folder on this machine, copied into a staging folder without being led astray.

Goes in: a folder below one of the allowed roots.  Comes out: copies of the files that an adapter
consists of, nothing else, in a folder that nobody else writes to: what is inspected, hashed and
loaded later are these very bytes.  Knows nothing of their content.

Directories are opened one below the other by descriptor and never through a link; files are opened
without following links and without waiting, and must be regular; a file that changes while it is
read, or is exchanged before the last one is copied, is an error, as the copies would not belong
together.
"""

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.manifest import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILES
from lorad import disk

#: What is copied; everything else in the folder stays where it is.
FILES = (CONFIG_FILE, *WEIGHTS_FILES, *TEXT_FILES)
#: Bytes of any file but the weights; the largest tokenizer.json in common use has 33 MiB.
MAX_SMALL_BYTES = 64 << 20
#: Entries looked at to say what lies in the place of a missing file.
MAX_TRACES = 1000

_CHUNK_BYTES = 1 << 20
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalSourceError(Exception):
    """The folder cannot be copied.  `code` is an E_ reason when the folder itself is at fault, else
    one of lorad's codes: permission_denied (outside the roots), conflict (it changed meanwhile; try
    again), insufficient_storage (no room for the copy)."""

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Copied:
    """What is in the staging folder now: name -> bytes."""

    files: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def copy_folder(
    source: Path,
    target: Path,
    *,
    roots: Sequence[Path],
    max_bytes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Copied:
    """Copy the adapter files of `source`, a folder in one of `roots`, into the empty `target`.

    `max_bytes` bounds all files together.  `progress(done, total)` is called in bytes, after each
    MiB; what it raises ends the copy.  When config or weights are missing, the names of what lies
    there instead are left as empty files, so that inspection can say what it is.  Raises
    LocalSourceError; whatever was copied by then is the caller's to remove, with `target`.
    """
    with _folder(source, roots) as fd, _target(target) as out:
        before = _stats(fd)
        total = sum(status.st_size for status in before.values())
        _check_sizes(before, total, max_bytes)
        done = 0
        for name, status in before.items():
            writing = _writing(name, target, total)
            with closing(_copy(fd, out, name, status, writing)) as sizes:
                for size in sizes:
                    done += size
                    progress(done, total)
        if {name: _identity(s) for name, s in _stats(fd).items()} != {
            name: _identity(s) for name, s in before.items()
        }:
            raise _changed()
        if CONFIG_FILE not in before or not any(name in before for name in WEIGHTS_FILES):
            _leave_traces(fd, out)
    return Copied({name: status.st_size for name, status in before.items()})


# ----------------------------------------------------------------- opening
@contextmanager
def _folder(source: Path, roots: Sequence[Path]) -> Iterator[int]:
    """A descriptor of `source`, reached from its root step by step.  A root may itself be a link:
    it is the operator's own setting."""
    root, parts = _below_root(source, roots)
    opened: list[int] = []
    try:
        opened.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in parts:
            opened.append(os.open(part, _OPEN_DIR, dir_fd=opened[-1]))
    except OSError as error:
        for fd in opened:
            os.close(fd)
        raise _cannot_open(source, error) from None
    try:
        yield opened[-1]
    finally:
        for fd in opened:
            os.close(fd)


def _below_root(source: Path, roots: Sequence[Path]) -> tuple[Path, tuple[str, ...]]:
    """The root that holds `source`, and the way from it.  By text alone: nothing is opened before
    it is allowed, and links on the way are refused when they are met."""
    if source.is_absolute() and ".." not in source.parts:
        for root in roots:
            for spelling in (root.absolute(), Path(os.path.realpath(root))):
                if source == spelling or spelling in source.parents:
                    return spelling, source.relative_to(spelling).parts
    raise LocalSourceError(
        "permission_denied",
        f"{_shown(source)} is in none of the allowed folders",
        hint="add the folder to `[lora] allowed_roots`, or upload it with `loractl add`",
    )


def _cannot_open(source: Path, error: OSError) -> LocalSourceError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return _unreadable(_shown(source), error)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        why = "it is a link or no folder, or is reached through one"
    else:
        why = error.strerror or "unknown error"
    return LocalSourceError(
        "E_NOT_A_FOLDER",
        f"cannot open the folder {_shown(source)}: {why}",
        hint="name a real folder that holds adapter_config.json and adapter_model.safetensors",
    )


@contextmanager
def _target(target: Path) -> Iterator[int]:
    fd = os.open(target, _OPEN_DIR)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_file(fd: int, name: str) -> int:
    try:
        # Looked at before it is opened, as opening a device can act on it; and after, as it may
        # have been swapped.
        _need_regular(name, os.stat(name, dir_fd=fd, follow_symlinks=False))
        file = os.open(name, _OPEN_FILE, dir_fd=fd)
    except FileNotFoundError:
        raise _changed() from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_regular(name) from None
        raise _unreadable(name, error) from None
    try:
        _need_regular(name, os.fstat(file))
    except LocalSourceError:
        os.close(file)
        raise
    return file


# ----------------------------------------------------------------- copying
def _stats(fd: int) -> dict[str, os.stat_result]:
    """The files of FILES that are there, in that order; all must be regular."""
    found = {}
    for name in FILES:
        try:
            found[name] = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(name, error) from None
        _need_regular(name, found[name])
    return found


def _check_sizes(files: dict[str, os.stat_result], total: int, max_bytes: int) -> None:
    for name, status in files.items():
        if name not in WEIGHTS_FILES and status.st_size > MAX_SMALL_BYTES:
            raise LocalSourceError(
                "E_FILE_TOO_LARGE",
                f"{name} has {status.st_size} bytes, allowed are {MAX_SMALL_BYTES}",
                hint=f"replace {name} by the file that the training run saved",
            )
    if total > max_bytes:
        raise LocalSourceError(
            "E_FILE_TOO_LARGE",
            f"the adapter has {total} bytes, allowed are {max_bytes}",
            hint="raise `[watch] max_adapter_bytes` if it is meant to be that large",
        )


def _copy(
    fd: int, out: int, name: str, expected: os.stat_result, writing: AbstractContextManager[None]
) -> Generator[int, None, None]:
    """Copy one file, within `writing`; yields the bytes of each chunk.  Reads no further than the
    size that was allowed, so a file that grows meanwhile costs nothing."""
    source = _open_file(fd, name)
    try:
        if _identity(os.fstat(source)) != _identity(expected):
            raise _changed()
        with writing, os.fdopen(os.open(name, _CREATE, 0o640, dir_fd=out), "wb", 0) as file:
            left = expected.st_size
            while left:
                chunk = _read(source, name, min(_CHUNK_BYTES, left))
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) or 0 :]
                left -= len(chunk)
                yield len(chunk)
        if _identity(os.fstat(source)) != _identity(expected):
            raise _changed()
    finally:
        os.close(source)


def _read(source: int, name: str, size: int) -> bytes:
    try:
        chunk = os.read(source, size)
    except OSError as error:
        raise _unreadable(name, error) from None
    if not chunk:
        raise _changed()  # shorter than it was
    return chunk


@contextmanager
def _writing(name: str, target: Path, total: int) -> Iterator[None]:
    """`total`: bytes of all files that are copied to `target`."""
    try:
        yield
    except OSError as error:
        doing = f"copy {name} into the store"
        if error.errno in disk.FULL:
            told = disk.refused(doing, target, error, total)
            raise LocalSourceError(told.code, told.message, hint=told.hint) from None
        raise LocalSourceError(
            "internal_error", f"cannot {doing}: {error.strerror}", hint="look at the store's disk"
        ) from None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What stays the same while nobody writes to a file or puts another in its place."""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_size, *times)


def _leave_traces(fd: int, out: int) -> None:
    """Empty files named like what lies in the source, and in its subfolders like an adapter's."""
    with os.scandir(fd) as entries:
        names = [entry.name for entry, _ in zip(entries, range(MAX_TRACES), strict=False)]
    for name in names:
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                _leave_nested_trace(fd, out, name)
            else:
                os.close(os.open(name, _CREATE, 0o640, dir_fd=out))


def _leave_nested_trace(fd: int, out: int, name: str) -> None:
    for inner in (CONFIG_FILE, *WEIGHTS_FILES):
        with suppress(OSError):
            os.stat(f"{name}/{inner}", dir_fd=fd, follow_symlinks=False)
            with suppress(FileExistsError):
                os.mkdir(name, 0o750, dir_fd=out)
            os.close(os.open(f"{name}/{inner}", _CREATE, 0o640, dir_fd=out))


# ----------------------------------------------------------------- errors
def _need_regular(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(name)


def _not_regular(name: str) -> LocalSourceError:
    return LocalSourceError(
        "E_NOT_REGULAR",
        f"{name} is not a regular file",
        hint=f"put a copy of the file itself in the place of {name}",
    )


def _unreadable(name: str, error: OSError) -> LocalSourceError:
    return LocalSourceError(
        "E_UNREADABLE",
        f"{name} cannot be read: {error.strerror}",
        hint="make it readable for the user that lorad runs as",
    )


def _changed() -> LocalSourceError:
    return LocalSourceError(
        "conflict",
        "the folder changed while it was being copied",
        hint="try again when whatever writes to it is done",
    )


def _shown(path: Path) -> str:
    """One printable line of bounded length."""
    text = str(path)[:300]
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
