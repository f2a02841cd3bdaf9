"""Staging: folders of the gateway's own machine, for files on their way into the catalog."""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorad import disk


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path


class Staged(Protocol):
    @property
    def path(self) -> Path: ...


class Stage:
    """Below `folder`, which is emptied at the start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        with disk.writing("prepare a folder for uploads", folder.parent):
            folder.mkdir(mode=0o700, parents=True)

    async def stage(self, expected_bytes: int = 0) -> Folder:
        with disk.writing("stage an adapter", self._folder, expected_bytes):
            return Folder(Path(tempfile.mkdtemp(dir=self._folder)))

    async def discard(self, staging: Staged) -> None:
        await asyncio.to_thread(shutil.rmtree, staging.path, True)
