"""Which files of a source are an adapter's, and whether they are all there.

Goes in: the names and sizes that a source lists.  Comes out: those that lorad reads, in the order
in which they are fetched; or FetchError: too many bytes, or the reason code that a folder with
these names would get.  Opens nothing at the source.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.manifest import CONFIG_FILE, TEXT_FILES, WEIGHTS_FILES, Limits
from engine.errors import AdapterInvalid
from lorad.sources.errors import FetchError
from lorad.sources.fetch import RemoteFile
from lorad.sources.local import FILES, MAX_SMALL_BYTES, MAX_TRACES

#: Bytes of adapter_config.json.
MAX_CONFIG_BYTES = Limits().max_config


def choose(found: Iterable[RemoteFile], names: Iterable[str], max_bytes: int) -> list[RemoteFile]:
    """The files of `found` that are fetched; `names` is all that lies there, paths below it too.
    Config comes first: the smallest file meets the errors that would meet all."""
    by_name = {file.name: file for file in found}
    if CONFIG_FILE not in by_name or not any(name in by_name for name in WEIGHTS_FILES):
        raise _incomplete(names)
    chosen = [by_name[name] for name in FILES if name in by_name]
    for file in chosen:
        need_size(file.name, file.size, max_bytes)
    need_total(sum(file.size or 0 for file in chosen), max_bytes)
    return chosen


def total_of(files: Iterable[RemoteFile]) -> int | None:
    """Bytes of all; None if one is not known."""
    sizes = [file.size for file in files]
    return None if None in sizes else sum(size or 0 for size in sizes)


def limit_of(name: str, max_bytes: int) -> int:
    """Bytes that a file of this name may have."""
    if name == CONFIG_FILE:
        return MAX_CONFIG_BYTES
    return min(MAX_SMALL_BYTES, max_bytes) if name in TEXT_FILES else max_bytes


def need_size(name: str, size: int | None, max_bytes: int) -> None:
    """Refuse a file that is too large for its name, before its first byte."""
    limit = limit_of(name, max_bytes)
    if size is not None and size > limit:
        raise too_big(f"{name} has {size} bytes", limit)


def need_total(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise too_big(f"the adapter has {num_bytes} bytes", max_bytes)


def too_big(found: str, limit: int) -> FetchError:
    hint = "raise `[watch] max_adapter_bytes` if the adapter is meant to be that large"
    if limit in (MAX_CONFIG_BYTES, MAX_SMALL_BYTES):  # of this file, whatever the settings say
        hint = "look at the file at its source: it cannot be what its name says"
    return FetchError("source_too_big", f"{found}, allowed are {limit}", hint=hint)


def _incomplete(names: Iterable[str]) -> FetchError:
    """What inspection says of a folder with these names and nothing in the files."""
    with tempfile.TemporaryDirectory(prefix="lorad-names-") as scratch:
        folder = Path(scratch)
        for name, _ in zip(names, range(MAX_TRACES), strict=False):
            _leave_trace(folder, name)
        try:
            with AdapterFolder(folder) as opened:
                opened.need_both_files()
        except AdapterInvalid as error:
            return FetchError(
                "adapter_invalid",
                error.message,
                hint=error.hint,
                details={"reason": error.reason},
            )
    raise AssertionError("a complete list of names was called incomplete")


def _leave_trace(folder: Path, name: str) -> None:
    """An empty file of that name, and of those below only such that betray an adapter."""
    parts = [part for part in name.split("/") if part]
    if not parts or len(parts) > 2 or any(p in (".", "..") or not p.isprintable() for p in parts):
        return
    if len(parts) == 2 and parts[1] not in (CONFIG_FILE, *WEIGHTS_FILES):
        return
    try:
        folder.joinpath(*parts[:-1]).mkdir(exist_ok=True)
        folder.joinpath(*parts).touch()
    except OSError:  # a name too long, or a file where another is a folder
        return
