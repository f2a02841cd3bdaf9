"""On which file system a folder lies, as far as it decides whether hints can be trusted.

Goes in: a folder, and the kernel's list of mounts.  Comes out: the type of a file system on which
changes happen without a word.  Knows no watcher.
"""

import os
from pathlib import Path

#: File systems on which other machines, or a user process, change files without telling the kernel.
_SILENT = ("nfs", "cifs", "smb", "fuse", "9p", "afs", "ceph", "lustre", "glusterfs", "virtiofs")


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
