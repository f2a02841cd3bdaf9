"""Pulls and their operations: what each leaves in the registry, the store and the events."""

import asyncio

import pytest

from lorad import wire
from lorad.errors import LoradError
from lorad.service import fetching
from lorad.service import pulls as pulls_module
from lorad.wire_operations import PullStart

CHUNK = 4096


def test_a_pull_becomes_an_adapter_with_its_reference_and_commit_as_source(scene):
    async def scenario(s):
        commit = s.put("acme/My_SQL", 1)
        done = await s.pull("hf:acme/My_SQL")
        assert (done.state, done.name, done.rev) == ("done", "my_sql", s.world.rev(1))
        assert (done.commit, done.actor, done.target) == (commit, "uid 7", "hf:acme/My_SQL")
        assert done.done_bytes == done.total_bytes > 2 * CHUNK
        record = s.world.registry.get("my_sql")
        assert (record.source, record.tenant) == (f"hf:acme/My_SQL@{commit}", None)
        assert s.world.adapters.resolve("my_sql").rev == s.world.rev(1)
        assert s.staged() == []
        types = [item.type for item in s.world.events.newest(100)]
        assert types.index("operation.begun") < types.index("adapter.added")
        assert types.index("adapter.added") < types.index("operation.done")

    scene(scenario)


def test_the_same_commit_again_is_done_at_once_and_a_new_one_needs_replace(scene):
    async def scenario(s):
        s.put("acme/sql", 1)
        await s.pull("hf:acme/sql")
        again = await s.pull("hf:acme/sql", pin=True)
        assert (again.state, again.message) == ("done", "it was here already")
        assert s.world.registry.get("sql").pinned
        assert len(s.fetched) == 1
        newer = s.put("acme/sql", 2, commit="2")
        refused = await s.pull("hf:acme/sql")
        assert (refused.state, refused.code) == ("failed", "name_taken")
        assert refused.reason == "E_NAME_TAKEN"
        assert "--replace" in refused.hint
        assert len(s.fetched) == 1  # it was refused before
        replaced = await s.pull("hf:acme/sql", replace=True)
        assert (replaced.state, replaced.rev) == ("done", s.world.rev(2))
        assert s.world.registry.get("sql").source == f"hf:acme/sql@{newer}"

    scene(scenario)


def test_replace_takes_an_uploads_name_and_never_one_of_the_inbox(scene):
    async def scenario(s):
        s.put("acme/sql", 1)
        await s.world.add("sql", 5)
        await s.world.add("boxed", 6, source="inbox")
        assert (await s.pull("hf:acme/sql")).code == "name_taken"
        assert (await s.pull("hf:acme/sql", replace=True)).state == "done"
        assert (await s.pull("hf:acme/sql", name="boxed", replace=True)).code == "name_taken"
        for name in ("No", "a/b/c", "../x"):
            with pytest.raises(LoradError, match="not an adapter name"):
                await s.begin("hf:acme/sql", name=name)
        with pytest.raises(LoradError, match="base model's"):
            await s.begin("hf:acme/sql", name="base")
        assert (await s.pull("hf:acme/sql", name="hf:other/name")).code == "invalid_value"

    scene(scenario)


def test_a_dry_run_says_what_it_would_fetch_and_writes_nothing(scene):
    async def scenario(s):
        commit = s.put("acme/sql", 1)
        plan = await s.pulls.plan(PullStart(reference="hf:acme/sql"))
        assert (plan.name, plan.commit, plan.reference) == ("sql", commit, f"hf:acme/sql@{commit}")
        assert [f.name for f in plan.files] == ["adapter_config.json", "adapter_model.safetensors"]
        assert plan.total_bytes == sum(f.num_bytes for f in plan.files)
        assert (s.operations.list(), s.staged(), s.hub.calls()) == (
            (),
            [],
            ["resolve hf:acme/sql"],
        )
        await s.world.add("sql", 5)
        with pytest.raises(LoradError) as taken:
            await s.pulls.plan(PullStart(reference="hf:acme/sql"))
        assert taken.value.code == "name_taken"

    scene(scenario)


def test_a_restart_goes_on_with_the_bytes_that_are_here_and_the_commit_that_was_meant(scene):
    async def first(s):
        s.commit = s.put("acme/sql", 1, 8, hold_at=4 * CHUNK)
        begun = await s.begin("hf:acme/sql", pin=True)
        await s.at_bytes(begun.id, 4 * CHUNK)
        await s.operations.flush()
        return begun.id, s.commit

    id, commit = scene(first)

    async def second(s):
        record = s.operations.get(id)
        assert (record.state, record.commit) == ("running", commit)
        assert record.done_bytes >= 4 * CHUNK
        await asyncio.wrap_future(s.world.registry.reconcile())
        assert s.staged() == [record.staging]
        s.hub.rule("acme/sql", commit=s.commit_of("later"), hold_at=1 << 40)
        await s.operations.resume()
        done = await s.operations.wait(id)
        assert (done.state, done.rev, done.commit) == ("done", s.world.rev(1), commit)
        assert s.world.registry.get("sql").pinned
        assert s.world.registry.get("sql").source == f"hf:acme/sql@{commit}"
        assert [start >= 4 * CHUNK for _, start in s.fetched] == [False, True]
        assert s.staged() == []

    scene(second)


def test_what_was_cut_off_by_its_source_goes_on_with_the_next_pull(scene):
    async def scenario(s):
        s.put("acme/sql", 1, 8, hold_at=4 * CHUNK)
        s.hub.rule("acme/sql", fetch_error="source_unreachable")
        failed = await s.pull("hf:acme/sql")
        assert (failed.state, failed.code) == ("failed", "source_unreachable")
        assert s.staged() == [failed.staging]
        s.hub.rule("acme/sql", hold_at=1 << 40)
        assert (await s.pull("hf:acme/sql")).state == "done"
        assert [start >= 4 * CHUNK for _, start in s.fetched] == [False, True]
        assert s.staged() == []

    scene(scenario)


def test_what_is_wrong_with_the_content_leaves_nothing_behind(scene):
    async def scenario(s):
        files = s.adapter(1) | {"adapter_config.json": b'{"bad": "E_RANK_LIMIT"}'}
        s.hub.put("acme/bad", files)
        failed = await s.pull("hf:acme/bad")
        assert (failed.state, failed.code, failed.reason) == (
            "failed",
            "adapter_invalid",
            "E_RANK_LIMIT",
        )
        s.put("acme/cut", 2, hold_at=0, fetch_error="source_corrupt")
        assert (await s.pull("hf:acme/cut")).code == "source_corrupt"
        assert (await s.pull("hf:acme/none")).code == "source_not_found"
        assert s.staged() == []
        assert s.world.registry.get("bad") is None
        (event,) = [e for e in s.world.events.newest(100) if e.cause == "E_RANK_LIMIT"]
        assert (event.type, event.details["operation"]) == ("operation.failed", failed.id)

    scene(scenario)


def test_half_downloads_that_nobody_came_back_for_are_swept(scene, monkeypatch):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=0, fetch_error="source_busy")
        failed = await s.pull("hf:acme/sql")
        s.put("acme/other", 2)
        await s.pull("hf:acme/other")
        assert s.staged() == [failed.staging]
        monkeypatch.setattr(pulls_module, "KEEP_STAGING_SECONDS", -1.0)
        s.put("acme/third", 3)
        await s.pull("hf:acme/third")
        assert s.staged() == []
        assert s.operations.get(failed.id).staging == ""

    scene(scenario)


def test_a_cancelled_pull_ends_at_once_and_takes_its_files_away(scene):
    async def scenario(s):
        s.put("acme/sql", 1, 8, hold_at=4 * CHUNK)
        begun = await s.begin("hf:acme/sql")
        await s.at_bytes(begun.id, 4 * CHUNK)
        cancelled = await s.operations.cancel(begun.id.upper())
        assert cancelled.state == "cancelled"
        await s.until(lambda: not s.staged())
        assert (await s.operations.cancel(begun.id)).state == "cancelled"  # twice is fine
        assert s.operations.get(begun.id).state == "cancelled"
        assert s.world.registry.get("sql") is None
        assert [e.type for e in s.world.events.newest(9)][-1] == "operation.cancelled"
        s.hub.rule("acme/sql", hold_at=1 << 40)
        done = await s.pull("hf:acme/sql")
        assert done.state == "done"
        with pytest.raises(LoradError) as late:
            await s.operations.cancel(done.id)
        assert late.value.code == "conflict"
        with pytest.raises(LoradError) as unknown:
            await s.operations.cancel("nosuch")
        assert unknown.value.code == "not_found"

    scene(scenario)


def test_two_pulls_of_one_reference_are_one_and_differing_wishes_fetch_once(scene):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=CHUNK)
        both = await asyncio.gather(s.begin("hf:acme/sql"), s.begin("hf:acme/sql"))
        assert both[0].id == both[1].id
        pinned = await s.begin("hf:acme/sql", pin=True)
        assert pinned.id != both[0].id
        told = [s.operations.get(id) for id in (both[0].id, pinned.id)]
        # Whichever of the two came to the fetch first is told how far it is.
        await s.until(lambda: max(s.operations.get(one.id).done_bytes for one in told) >= CHUNK)
        s.hub.rule("acme/sql", hold_at=1 << 40)
        assert (await s.operations.wait(both[0].id)).state == "done"
        assert (await s.operations.wait(pinned.id)).state == "done"
        assert s.world.registry.get("sql").pinned
        assert len(s.fetched) == 1

    scene(scenario)


def test_a_slow_source_delays_neither_other_sources_nor_adding_and_loading(scene, monkeypatch):
    async def scenario(s):
        for n in range(6):
            s.put(f"slow/r{n}", 10 + n, hold_at=0)
        slow = [await s.begin(f"hf:slow/r{n}") for n in range(6)]
        await s.until(lambda: len(s.fetched) == 4)
        known = fetching.origin
        monkeypatch.setattr(
            fetching, "origin", lambda r: "another" if "fast" in r.text else known(r)
        )
        s.put("fast/one", 1)
        assert (await s.pull("hf:fast/one")).state == "done"
        await s.world.add("upload", 2)
        results = await s.world.adapters.load(wire.Names(names=("upload",)))
        assert results.items[0].ok
        states = [s.operations.get(record.id).state for record in slow]
        assert states.count("running") == 4
        assert states.count("queued") == 2

    scene(scenario)


def test_a_token_is_used_and_is_nowhere_on_the_disk(scene):
    async def scenario(s):
        s.put("acme/sql", 1, hold_at=0)
        start = PullStart(reference="hf:acme/sql", token="hf_secret")
        assert "hf_secret" not in repr(start)
        begun = await s.pulls.begin(start, actor="")
        await s.until(lambda: s.fetched)
        other = PullStart(reference="hf:acme/sql", token="hf_other")
        assert (await s.pulls.begin(other, actor="")).id != begun.id
        assert (await s.pulls.begin(start, actor="")).id == begun.id
        await s.until(lambda: set(s.hub.tokens) == {"hf_secret", "hf_other"})
        return begun.id

    id = scene(scenario)

    async def after(s):
        for path in s.world.dir.rglob("*"):
            if path.is_file():
                assert b"hf_secret" not in path.read_bytes(), path
        s.hub.rule("acme/sql", error="source_denied")
        await s.operations.resume()
        denied = await s.operations.wait(id)
        assert (denied.code, denied.hint) == (
            "source_denied",
            "the token is not kept over a restart; pull it again",
        )
        url = "https://user:pass@example.org/x.tar.gz?signature=1"
        private = await s.begin(url, name="x")
        assert "signature" not in private.wish + private.target
        assert "pass" not in private.wish + private.target

    scene(after)


def test_work_that_runs_on_after_its_client_has_an_operation_too(scene):
    async def scenario(s):
        await s.world.add("sql", 1)
        s.world.engine.hold_loads.clear()
        names = wire.Names
        left = await s.world.adapters.load(names(names=("sql",), wait=False))
        late = await s.world.adapters.load(names(names=("sql",), timeout_s=0.01))
        assert left.items[0].ok
        assert (late.items[0].code, late.items[0].hint) == (
            "deadline_exceeded",
            f"loractl op show {late.items[0].operation}",
        )
        found = s.operations.get(left.items[0].operation)
        assert (found.kind, found.target, found.state) == ("load", "sql", "running")
        with pytest.raises(LoradError, match="cannot be cancelled"):
            await s.operations.cancel(found.id)
        s.world.engine.hold_loads.set()
        assert (await s.operations.wait(found.id)).state == "done"
        s.world.engine.refuse[s.world.rev(1)] = "no_room"
        s.world.engine.revisions[s.world.rev(1)] = "disk"
        refused = await s.world.adapters.load(names(names=("sql",), wait=False))
        ended = await s.operations.wait(refused.items[0].operation)
        assert (ended.state, ended.code) == ("failed", "no_room")
        s.world.engine.hold_loads.clear()
        s.world.engine.refuse.clear()
        cut = await s.world.adapters.load(names(names=("sql",), wait=False))
        return cut.items[0].operation

    id = scene(scenario)

    async def after(s):
        await s.operations.resume()
        cut = s.operations.get(id)
        assert (cut.state, cut.message, cut.hint) == (
            "failed",
            "lorad was restarted",
            "loractl load sql",
        )

    scene(after)


def test_files_that_were_sent_away_come_back_from_their_source(scene):
    async def scenario(s):
        s.put("acme/sql", 1)
        rev = (await s.pull("hf:acme/sql")).rev
        assert await s.world.revisions.unpack(rev, (), remote=True) > 0
        s.hub.rule("acme/sql", hold_at=2 * CHUNK, fetch_error="source_unreachable")
        (away,) = (await s.world.adapters.load(wire.Names(names=("sql",)))).items
        assert away.code == "source_unreachable"
        s.hub.rule("acme/sql", hold_at=1 << 40)
        (back,) = (await s.world.adapters.load(wire.Names(names=("sql",)))).items
        assert (back.ok, back.state) == (True, "idle")
        assert [start >= 2 * CHUNK for _, start in s.fetched] == [False, False, True]
        assert s.staged() == []
        await s.world.add("mine", 2)
        with pytest.raises(LoradError, match="nobody knows where"):
            await s.world.revisions.files.refetch("mine")

    scene(scenario)
