"""Folders: an adapter from a folder on this machine that an operator names.

Goes in: a name and a path, in the inbox or in one of `[lora] allowed_roots`.  Comes out: what
adding it came to; it is loaded too.  The files are copied first: what happens to the folder later
is no matter.  Everything that is wrong is a LoradError, or AdapterInvalid with its E_ reason.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lorad import wire
from lorad.errors import LoradError
from lorad.registry.store import StagingDir

#: The same as of a folder that a client streams: either may replace the other.
SOURCE = "upload"


class Adding(Protocol):
    """Of AdapterService."""

    async def add(
        self, staging: StagingDir, name: str, /, *, source: str, replace: bool, load: bool
    ) -> wire.Added: ...


class Filling(Protocol):
    """Of Intake."""

    async def fill(self, fill: Callable[[StagingDir], object], /) -> StagingDir: ...


class Folders:
    """`copy(folder, staging)` refuses what is in no allowed folder; `vet(name, source)` names."""

    def __init__(
        self,
        adapters: Adding,
        intake: Filling,
        *,
        copy: Callable[[Path, StagingDir], object],
        vet: Callable[[str, str], None],
    ) -> None:
        self._adapters, self._intake = adapters, intake
        self._copy, self._vet = copy, vet

    async def add(self, name: str, path: str, *, replace: bool) -> wire.Added:
        """Copy, take and load; name_taken if it serves other content and may not be replaced."""
        self._vet(name, SOURCE)
        if not path.startswith("/") or "\0" in path:
            message = "lora_path must be the absolute path of a folder on the daemon's machine"
            hint = "loractl pull fetches hf:ORG/NAME and the like"
            raise LoradError("invalid_value", message, param="lora_path", hint=hint)
        staging = await self._intake.fill(lambda staging: self._copy(Path(path), staging))
        return await self._adapters.add(staging, name, source=SOURCE, replace=replace, load=True)
