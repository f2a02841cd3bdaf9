"""Opening the files of an adapter folder without being led astray.

Goes in: a folder.  Comes out: descriptors of regular files in it, small files as bytes, and, where
the two files of an adapter are missing, a refusal that says what lies there instead.  Links are
never followed, FIFOs never waited for, devices never opened.  Knows nothing of what is in a file.
"""

import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from engine.adapters.manifest import CONFIG_FILE, MLX_WEIGHTS_FILE, WEIGHTS_FILE, WEIGHTS_FILES
from engine.adapters.reasons import refuse, shown, shown_list
from engine.errors import AdapterInvalid

#: Directory entries looked at when explaining what is missing.
MAX_ENTRIES = 1000

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LFS_MARK = b"version https://git-lfs"

CONVERT_HINT = (
    "convert it where you trust it: PeftModel.from_pretrained(base, folder)"
    ".save_pretrained(folder, safe_serialization=True)"
)


class AdapterFolder:
    """One open folder; use as a context manager.  Paths are relative to its descriptor, so a folder
    that is renamed or replaced meanwhile does not mix with another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise refuse(
                "E_NOT_A_FOLDER",
                f"cannot open the adapter folder: {error.strerror}",
                "name a folder that holds adapter_config.json and adapter_model.safetensors",
            ) from None

    def __enter__(self) -> "AdapterFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """The first MAX_ENTRIES entries, sorted."""
        with os.scandir(self._fd) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False))

    def has(self, name: str) -> bool:
        """Whether something of that name is there, of whatever kind."""
        try:
            os.lstat(name, dir_fd=self._fd)
        except OSError:
            return False
        return True

    def open(self, name: str) -> int:
        """A descriptor of a regular file.  Raises AdapterInvalid; the caller closes it."""
        try:
            # Looked at before it is opened, as opening a device can act on it; and again after,
            # as it may have been swapped in between.
            _need_regular(name, os.lstat(name, dir_fd=self._fd))
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _not_regular(name) from None
            raise _unreadable(name, error) from None
        try:
            _need_regular(name, os.fstat(fd))
        except AdapterInvalid:
            os.close(fd)
            raise
        return fd

    def read(self, name: str, limit: int, *, too_large: str = "E_FILE_TOO_LARGE") -> bytes:
        """The whole of a file of at most `limit` bytes."""
        fd = self.open(name)
        with os.fdopen(fd, "rb", buffering=0) as file:
            try:
                size = os.fstat(fd).st_size
                data = b"" if size > limit else file.read(limit + 1) or b""
            except OSError as error:
                raise _unreadable(name, error) from None
        if max(size, len(data)) > limit:
            raise refuse(
                too_large,
                f"{name} has {max(size, len(data))} bytes, allowed are {limit}",
                f"replace {name} by the file that the training run saved",
            )
        refuse_pointer(name, data)
        return data

    def need_both_files(self) -> None:
        """Refuse the folder, saying what it is instead, unless config and weights are there."""
        has_config, has_weights = self.has(CONFIG_FILE), any(map(self.has, WEIGHTS_FILES))
        if has_config and has_weights:
            return
        names = self.names()
        for check in (_is_mlx, _is_gguf, _is_sharded):
            check(names)
        if not has_weights:
            _is_pickle(names)
        self._is_nested(names)
        there = (
            f"; the folder holds {shown_list(names)}"
            if names
            else ", and all else that lorad reads"
        )
        if not has_config:
            raise refuse(
                "E_NO_CONFIG",
                f"{CONFIG_FILE} is missing{there}",
                f"copy {CONFIG_FILE} from the training output beside the weights",
            )
        raise refuse(
            "E_NO_WEIGHTS",
            f"{WEIGHTS_FILE} is missing{there}",
            f"copy or rename the adapter's weights to {WEIGHTS_FILE}",
        )

    def weights_file(self, *, mlx: bool) -> str:
        """The one of WEIGHTS_FILES that belongs to the config, or else the only one that is there.
        A PEFT adapter is never looked for under MLX's name."""
        if mlx and self.has(MLX_WEIGHTS_FILE):
            return MLX_WEIGHTS_FILE
        if not mlx and not self.has(WEIGHTS_FILE):
            raise refuse(
                "E_NO_WEIGHTS",
                f"{CONFIG_FILE} is PEFT's, but there is only {MLX_WEIGHTS_FILE}",
                f"put {WEIGHTS_FILE} or the {CONFIG_FILE} of mlx-lm beside it",
            )
        return WEIGHTS_FILE

    def _is_nested(self, names: list[str]) -> None:
        for name in names:
            for inner in (CONFIG_FILE, *WEIGHTS_FILES):
                try:
                    os.stat(f"{name}/{inner}", dir_fd=self._fd, follow_symlinks=False)
                except (OSError, ValueError):
                    continue
                raise refuse(
                    "E_NESTED",
                    f"the adapter lies in the subfolder {shown(name)}",
                    f"add the subfolder {shown(name)} itself",
                )


def refuse_pointer(name: str, head: bytes) -> None:
    """Refuse a file whose first bytes are those of a Git LFS pointer."""
    if head.startswith(_LFS_MARK):
        raise refuse(
            "E_LFS_POINTER",
            f"{name} is a Git LFS pointer, not the file itself",
            "fetch the real file: `git lfs pull` in the clone, or download it again",
        )


def _need_regular(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(name)


def _not_regular(name: str) -> AdapterInvalid:
    return refuse(
        "E_NOT_REGULAR",
        f"{name} is not a regular file",
        f"put a copy of the file itself in the place of {name}",
    )


def _unreadable(name: str, error: OSError) -> AdapterInvalid:
    return refuse(
        "E_UNREADABLE",
        f"{name} cannot be read: {error.strerror}",
        "make the file readable for the user that lorad runs as, then add the folder again",
    )


def _is_mlx(names: list[str]) -> None:
    if "adapters.npz" in names:
        raise mlx("the folder holds adapters.npz, of an old version")


def mlx(found: str) -> AdapterInvalid:
    """The refusal of an MLX adapter that is not served."""
    return refuse(
        "E_MLX",
        f"this is an MLX adapter: {found}",
        f"save it with a present mlx-lm as LoRA: its {CONFIG_FILE} beside {MLX_WEIGHTS_FILE}",
    )


def _is_gguf(names: list[str]) -> None:
    found = [name for name in names if name.endswith(".gguf")]
    if found:
        raise gguf(shown_list(found))


def gguf(found: str) -> AdapterInvalid:
    """The refusal of a GGUF adapter."""
    return refuse(
        "E_GGUF",
        f"this is a GGUF adapter: {found}",
        "use the PEFT folder from which the GGUF file was converted",
    )


def _is_sharded(names: list[str]) -> None:
    found = [
        n
        for n in names
        if n.startswith("adapter_model") and ("-of-" in n or n.endswith(".index.json"))
    ]
    if found:
        raise refuse(
            "E_SHARDED",
            f"the weights are cut into several files: {shown_list(found)}",
            f"save them again as one {WEIGHTS_FILE} (save_pretrained with max_shard_size above"
            " the adapter's size)",
        )


def _is_pickle(names: list[str]) -> None:
    found = [name for name in names if name.endswith(_PICKLES) and not _is_packed(name)]
    if "adapter_model.bin" in names or (
        found and not any(n.endswith(".safetensors") for n in names)
    ):
        raise pickle(shown_list(found))


def _is_packed(name: str) -> bool:
    """Of the store, where the packer's file lies beside an adapter's own: when those were gone it
    was called a pickle."""
    return name.startswith("packed-") and name.endswith(".bin")


def pickle(found: str) -> AdapterInvalid:
    """The refusal of a pickle; the file itself is never opened."""
    return refuse(
        "E_PICKLE", f"{found} is a pickle, which can run code when it is opened", CONVERT_HINT
    )
