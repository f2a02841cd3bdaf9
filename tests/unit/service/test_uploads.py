"""Uploads whose clients come and go at the same moment."""

import asyncio
from types import SimpleNamespace

import pytest

from lorad import wire
from lorad.api import uploads
from lorad.api.uploads import Uploads
from lorad.errors import LoradError

START = wire.UploadStart(name="a")


class Stage:
    """Discards wait for `gate`."""

    def __init__(self, folder):
        self.folder, self.gate, self.discarded = folder, asyncio.Event(), []
        self.gate.set()
        self.made = 0

    async def stage(self, expected_bytes=0):
        await asyncio.sleep(0)
        self.made += 1
        path = self.folder / str(self.made)
        path.mkdir()
        return SimpleNamespace(path=path)

    async def discard(self, staging):
        await self.gate.wait()
        self.discarded.append(staging.path.name)


def test_stale_uploads_are_cleared_once_though_two_open_at_the_same_moment(tmp_path):
    async def scenario():
        now, stage = [0.0], Stage(tmp_path)
        open_ones = Uploads(stage, max_bytes=100, clock=lambda: now[0])
        stale = [await open_ones.open(START, 1) for _ in range(2)]
        now[0] = uploads.IDLE_SECONDS + 1
        stage.gate.clear()
        first = asyncio.create_task(open_ones.open(START, 1))
        second = asyncio.create_task(open_ones.open(START, 1))
        await asyncio.sleep(0)
        for upload in stale:  # its folder is about to go: nobody may go on with it
            with pytest.raises(LoradError, match="no such upload"):
                open_ones.take(upload.id, 1)
        stage.gate.set()
        await asyncio.gather(first, second)
        assert sorted(stage.discarded) == ["1", "2"]

    asyncio.run(scenario())


def test_a_crowd_that_opens_at_once_gets_no_more_than_there_may_be(tmp_path):
    async def scenario():
        open_ones = Uploads(Stage(tmp_path), max_bytes=100)
        crowd = [open_ones.open(START, 1) for _ in range(uploads.MAX_OPEN + 3)]
        got = await asyncio.gather(*crowd, return_exceptions=True)
        refused = [error.code for error in got if isinstance(error, LoradError)]
        assert refused == ["queue_full"] * 3

    asyncio.run(scenario())
