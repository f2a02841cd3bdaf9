"""The lock of a state directory: one process at a time writes there."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lorad.errors import LockHeld, RegistryUnusable


@contextlib.contextmanager
def state_lock(state_dir: Path) -> Iterator[None]:
    """The state directory is ours, or LockHeld; the kernel lets go of it when we end, however."""
    try:
        state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = os.open(state_dir / "lorad.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise RegistryUnusable(
            f"cannot use the state directory {state_dir}: {error.strerror}",
            hint="set registry.dir, or STATE_DIRECTORY",
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).decode(errors="replace").strip()
            raise LockHeld(
                f"another lorad (pid {pid or 'unknown'}) uses {state_dir}", hint="loractl status"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(fd)
