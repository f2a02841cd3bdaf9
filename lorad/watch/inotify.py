"""Linux inotify, as far as the watcher needs it: which paths were touched, and was anything lost.

Goes in: directories, one by one.  Comes out: `Hints`.  They are only that: the watcher looks at the
disk itself.  No thread, no recursion, no memory of files.  A directory that is moved away takes its
watches along only in name, so they are dropped with everything below it.

Why not watchdog: docs/decisions/inotify.md.
"""

import ctypes
import errno
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED, _IS_DIR = 0x4000, 0x8000, 0x40000000
_ONLY_DIR, _DONT_FOLLOW, _EXCL_UNLINK = 0x1000000, 0x2000000, 0x4000000
#: Reading is left out: the daemon's own would wake it for ever.
_MASK = (_MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE) | (
    _ONLY_DIR | _DONT_FOLLOW | _EXCL_UNLINK
)
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_BUFFER_BYTES = 64 * 1024
#: More hints than this at once say no more than "look everywhere".
MAX_HINTS = 20_000

#: File systems on which other machines, or a user process, change files without telling the kernel.
_SILENT = ("nfs", "cifs", "smb", "fuse", "9p", "afs", "ceph", "lustre", "glusterfs", "virtiofs")


@dataclass(slots=True)
class Hints:
    """Paths that something happened to.  `folders` were made, moved or removed."""

    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    overflow: bool = False  # some were lost


class Inotify:
    """One kernel queue.  Not thread-safe.  The constructor raises OSError: EMFILE, no instances."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._call("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK)
        self._paths: dict[int, str] = {}

    def fileno(self) -> int:
        return self._fd

    def watch(self, folder: Path) -> bool:
        """Watch one directory; whether it was not watched under this path yet.  OSError: ENOSPC,
        out of watches; ENOENT and the like when it is gone."""
        path = str(folder)
        watch = self._call("inotify_add_watch", self._fd, os.fsencode(path), _MASK)
        is_new = self._paths.get(watch) != path
        self._paths[watch] = path
        return is_new

    def read(self) -> Hints:
        """What has happened since the last read; does not wait."""
        hints = Hints()
        while True:
            try:
                data = os.read(self._fd, _BUFFER_BYTES)
            except BlockingIOError:
                return hints
            self._take(data, hints)

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, data: bytes, hints: Hints) -> None:
        at = 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _OVERFLOW:
                hints.overflow = True
            elif mask & _IGNORED:
                self._paths.pop(watch, None)
            elif name and watch in self._paths:
                self._note(f"{self._paths[watch]}/{os.fsdecode(name)}", mask, hints)

    def _note(self, path: str, mask: int, hints: Hints) -> None:
        is_folder = bool(mask & _IS_DIR) and not mask & _ATTRIB
        if is_folder and mask & _MOVED_FROM:
            self._drop(path)
        bag = hints.folders if is_folder else hints.files
        bag.add(path)
        if len(bag) > MAX_HINTS:
            bag.clear()
            hints.overflow = True

    def _drop(self, folder: str) -> None:
        """Forget the watches of a directory that has another path now."""
        below = folder + "/"
        for watch, path in list(self._paths.items()):
            if path == folder or path.startswith(below):
                del self._paths[watch]
                self._libc.inotify_rm_watch(self._fd, watch)  # fails if it is gone: as wanted

    def _call(self, name: str, *arguments: int | bytes) -> int:
        function = getattr(self._libc, name, None)
        if function is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        result: int = function(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result


def silent_file_system(folder: Path, mounts: str | None = None) -> str:
    """The type of the file system if inotify cannot be trusted on it, else "".  `mounts` is the
    text of /proc/self/mountinfo."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
        except OSError:
            return ""
    real = Path(os.path.realpath(folder))
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].replace("\\040", " ")  # the one escape that occurs in practice
        inside = real == Path(point) or Path(point) in real.parents
        if inside and len(point) >= best:
            best, kind = len(point), rest.split()[0]
    return kind if kind.startswith(_SILENT) else ""
