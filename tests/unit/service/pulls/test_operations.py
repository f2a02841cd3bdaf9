"""Operations themselves: what is written, how often, and what a disk that is full leaves."""

import asyncio
from concurrent.futures import Future

from lorad.errors import LoradError

CHUNK = 4096


def test_progress_reaches_the_registry_in_one_write_for_all_and_only_where_there_is_some(
    scene, monkeypatch
):
    async def scenario(s):
        for name in ("a", "b"):
            s.put(f"acme/{name}", 1, hold_at=2 * CHUNK)
        ids = [(await s.begin(f"hf:acme/{name}")).id for name in ("a", "b")]
        for id in ids:
            await s.at_bytes(id, 2 * CHUNK)
        rows = s.world.registry.operations
        batches, write = [], rows.note_progress
        monkeypatch.setattr(rows, "note_progress", lambda d: (batches.append(d), write(d))[1])
        await s.operations.flush()
        await s.operations.flush()
        (batch,) = batches
        assert set(batch) == set(ids)
        assert all(done >= 2 * CHUNK < total for done, total in batch.values())
        assert all(rows.get(id).done_bytes == batch[id][0] for id in ids)

    scene(scenario)


def test_an_end_that_a_full_disk_does_not_take_is_told_and_written_later(scene, monkeypatch):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=CHUNK, fetch_error="source_corrupt")
        s.hub.rule("acme/sql", fetch_error=None)
        begun = await s.begin("hf:acme/sql")
        await s.at_bytes(begun.id, CHUNK)
        rows = s.world.registry.operations
        change = rows.change

        def full(id, **columns):
            future = Future()
            future.set_exception(LoradError("insufficient_storage", "the disk is full"))
            return future

        monkeypatch.setattr(rows, "change", full)
        s.hub.rule("acme/sql", fetch_error="source_corrupt")
        ended = await s.operations.wait(begun.id)
        assert (ended.state, ended.code) == ("failed", "source_corrupt")
        assert s.operations.list()[0].state == "failed"
        assert rows.get(begun.id).state == "running"
        await s.operations.flush()
        monkeypatch.setattr(rows, "change", change)
        await s.operations.flush()
        assert rows.get(begun.id).state == "failed"
        assert [e.type for e in s.world.events.newest(1)] == ["operation.failed"]

    scene(scenario)


def test_one_that_is_ending_cannot_be_cancelled_and_tells_its_end_once(scene, monkeypatch):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=CHUNK)
        begun = await s.begin("hf:acme/sql")
        await s.at_bytes(begun.id, CHUNK)
        both = await asyncio.gather(s.operations.cancel(begun.id), s.operations.cancel(begun.id))
        assert [record.state for record in both] == ["cancelled"] * 2
        ends = [e.type for e in s.world.events.newest(20) if e.type == "operation.cancelled"]
        assert ends == ["operation.cancelled"]
        hold = asyncio.Event()
        take = s.world.adapters.take

        async def slow(*given):
            await hold.wait()
            return await take(*given)

        monkeypatch.setattr(s.world.adapters, "take", slow)
        s.hub.rule("acme/sql", hold_at=1 << 40)
        again = await s.begin("hf:acme/sql")
        await s.until(lambda: s.operations._live[again.id].sealed)
        try:
            await s.operations.cancel(again.id)
        except LoradError as error:
            assert error.code == "conflict"
        else:
            raise AssertionError("it was cancelled while it was registered")
        hold.set()
        assert (await s.operations.wait(again.id)).state == "done"

    scene(scenario)
