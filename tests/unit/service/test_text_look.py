"""Whose tokenizer a registered adapter has is found in its stored files before it is used."""

import asyncio
import errno
import logging
import threading
from concurrent.futures import Future
from dataclasses import asdict, replace

import msgspec
import pytest

from engine.adapters.reasons import refuse
from engine.messages import AddRevision
from lorad.errors import LoradError
from lorad.registry.records import TextFacts
from lorad.service.seams import await_text
from lorad.service.text_look import TextLook

OLD = TextFacts(num_tokens=0, own_tokenizer=False, base_text="")
OWN = TextFacts(num_tokens=259, own_tokenizer=True, base_text="b1")
SAME = replace(OLD, base_text="b1")


class Looking:
    """The look of one world, whose files say what `says` has of a revision."""

    def __init__(self, world, base_text="b1"):
        self.world, self.says, self.looked, self.changed = world, {}, [], []
        self.look = TextLook(
            world.registry,
            "base",
            world.revisions.news,
            base_text=lambda: base_text,
            look=self._look,
        )
        self.look.on_change = self.changed.append
        world.revisions.files.look = self.look

    def _look(self, folder):
        self.looked.append(folder.name)
        found = self.says[folder.name]
        if isinstance(found, Exception):
            raise found
        return found

    def known(self, rev):
        return self.world.registry.revision(rev).text

    def events(self):
        kinds = ("adapter.tokenizer", "adapter.not_loaded")
        every = self.world.events.newest(1000)
        return [(e.type, e.name, e.message) for e in every if e.type in kinds]


async def registered(w, *names):
    """As an older lorad registered them: nobody has asked whose tokenizer they have."""
    revs = [(await w.add(name, n)).rev for n, name in enumerate(names)]
    await asyncio.wrap_future(w.registry.note_texts(dict.fromkeys(revs, OLD)))
    return revs


def test_behind_a_start_all_are_looked_at_once_and_what_is_new_is_told(world, caplog):
    async def first(w):
        own, same, bad = await registered(w, "own", "same", "bad")
        seen = Looking(w)
        wrong = refuse("E_TOKENIZER_TOO_LARGE", "ids up to 300", "train it with rows")
        seen.says = {own: OWN, same: SAME, bad: wrong}
        with caplog.at_level(logging.INFO, "lorad.text"):
            await seen.look.run()
        assert sorted(seen.looked) == sorted((own, same, bad))
        assert (seen.known(own), seen.known(same), seen.known(bad)) == (OWN, SAME, OLD)
        assert seen.changed == [own]
        said = "its files were looked at again: its own tokenizer, 259 tokens"
        assert sorted(seen.events()) == [
            ("adapter.not_loaded", "bad", "ids up to 300; train it with rows"),
            ("adapter.tokenizer", "own", said),
        ]
        assert w.catalog.unfit == {bad: ("ids up to 300", "train it with rows")}
        assert "tokenizers of 3 adapters" in caplog.text and "1 are others" in caplog.text
        return own, bad

    own, bad = world(first)

    async def second(w):
        seen = Looking(w)
        seen.says = {bad: SAME}
        caplog.clear()
        await seen.look.run()
        assert seen.looked == [bad] and seen.known(own) == OWN
        other = Looking(w, base_text="b2")  # the base's own tokenizer was saved anew
        other.says = {rev: replace(SAME, base_text="b2") for rev in w.registry.known_revs()}
        await other.look.run()
        assert len(other.looked) == 3 and other.changed == [own]

    world(second)


def test_a_disk_that_cannot_be_read_ends_no_look_and_is_asked_again(world, caplog):
    async def scenario(w):
        torn, own = await registered(w, "torn", "own")
        seen = Looking(w)
        seen.says = {torn: OSError(errno.EIO, "Input/output error"), own: OWN}
        await seen.look.run()
        assert seen.known(own) == OWN and seen.known(torn) == OLD and not w.catalog.unfit
        assert f"{torn[:8]}: whose tokenizer it has is not known now: Input/out" in caplog.text
        with pytest.raises(LoradError, match="cannot be read: Input/output error") as refused:
            await seen.look.sure(w.registry.revision(torn))
        assert refused.value.code == "adapter_damaged" and refused.value.hint
        seen.says[torn] = SAME
        assert (await seen.look.sure(w.registry.revision(torn))).text == SAME

    world(scenario)


def test_the_engine_hears_of_no_adapter_that_was_not_looked_at(world):
    async def first(w):
        return await registered(w, "own")

    [own] = world(first)

    async def second(w):
        seen = Looking(w)
        seen.says = {own: OWN}
        await w.revisions.load(own)
        [added] = [c for c in w.engine.sent if isinstance(c, AddRevision)]
        assert added.manifest.num_tokens == 259 and seen.looked == [own]
        await seen.look.run()
        assert seen.looked == [own], "once"

    world(second)


def test_a_request_waits_for_the_look_and_hears_what_is_wrong(world):
    async def scenario(w):
        own, bad = await registered(w, "own", "bad")
        seen, files = Looking(w), w.revisions.files
        seen.says = {own: OWN, bad: refuse("E_TOKENIZER_INVALID", "it is torn", "copy it again")}
        assert not files.is_readable(own)
        before = w.registry.revision(own)
        await asyncio.gather(*(await_text(files, own, 5.0) for _ in range(3)))
        assert (await seen.look.sure(before)).text == OWN, "not what it was read as before the look"
        assert files.is_readable(own) and seen.known(own) == OWN and seen.looked == [own]
        for _ in range(2):
            with pytest.raises(LoradError, match="it is torn") as caught:
                await await_text(files, bad, 5.0)
            assert caught.value.code == "model_not_found"
        assert seen.looked == [own, bad], "what is wrong is not read for each request"
        assert [kind for kind, name, _ in seen.events() if name == "bad"] == ["adapter.not_loaded"]
        await await_text(files, None, 5.0)
        seen.look.forget(own)
        assert not files.is_readable(own)

    world(scenario)


def test_files_that_are_elsewhere_are_back_before_a_text_is_read(world):
    """They were fetched behind the text: the base's chat template was taken for the adapter's."""

    async def scenario(w):
        [own] = await registered(w, "own")
        seen, files = Looking(w), w.revisions.files
        seen.says = {own: OWN}
        w.store.make_remote(own)
        await seen.look.run()
        assert seen.looked == [] and not files.is_readable(own)
        come = asyncio.Event()

        async def refetch(name):
            assert name == "own"
            await come.wait()
            return await w.intake.fill(
                lambda staging: (staging.path / "adapter_config.json").write_text('{"n": 0}')
            )

        files.refetch = refetch
        with pytest.raises(LoradError, match="not here in time") as caught:
            await await_text(files, own, 0.01)
        assert caught.value.code == "deadline_exceeded"
        come.set()
        await await_text(files, own, 5.0)
        assert (w.store.path(own) / "adapter_config.json").is_file()
        assert seen.known(own) == OWN and files.is_readable(own)

    world(scenario)


def test_what_is_removed_meanwhile_is_no_refusal(world):
    async def scenario(w):
        [gone] = await registered(w, "gone")
        seen = Looking(w)

        def look(folder):
            w.store.remove((gone,))
            raise refuse("E_NOT_A_FOLDER", "it is gone", "add it")

        seen.look._read = look
        await seen.look.run()
        assert seen.events() == [] and not w.catalog.unfit

    world(scenario)


def test_added_again_while_a_request_holds_it_an_adapter_is_told_anew(world):
    """The engine and the texts kept what was known of it until the daemon's next start."""

    async def scenario(w):
        inspect, facts = w.intake._inspect, [SAME]

        def found(folder, /):
            manifest, rev = inspect(folder)
            return msgspec.structs.replace(manifest, **asdict(facts[-1])), rev

        w.intake._inspect = found
        seen = Looking(w)
        rev = (await w.add("a", 0)).rev
        await w.revisions.load(rev)
        w.adapters.lease(rev)
        await w.adapters.remove("a")
        assert w.store.has(rev) and w.registry.revision(rev) is not None
        facts.append(OWN)
        assert (await w.add("a", 0)).rev == rev
        assert seen.known(rev) == OWN and seen.changed == [rev]
        told = [c.manifest.num_tokens for c in w.engine.sent if isinstance(c, AddRevision)]
        assert told == [0, 259]
        w.adapters.release(rev)
        facts.append(OWN)
        await w.adapters.remove("a")
        w.adapters.lease(rev)
        await w.add("a", 0)
        assert seen.changed == [rev], "nothing else is known of it"

    world(scenario)


def test_who_was_looked_at_before_waits_for_nobody_who_is_looked_at(world):
    """A file whose merges are spelled in another way takes a second and a half."""

    async def scenario(w):
        known, slow = await registered(w, "known", "slow")
        await asyncio.wrap_future(w.registry.note_texts({known: OWN}))
        seen, begun, go_on = Looking(w), threading.Event(), threading.Event()
        seen.says = {slow: SAME}

        def look(folder):
            begun.set()
            assert go_on.wait(10)
            return SAME

        seen.look._read = look
        running = asyncio.ensure_future(seen.look.run())
        await asyncio.to_thread(begun.wait, 10)
        await await_text(w.revisions.files, known, 1.0)
        go_on.set()
        await running
        assert seen.known(slow) == SAME

    world(scenario)


def test_a_registry_that_cannot_be_written_leaves_the_rest_for_whoever_asks(world, caplog):
    async def scenario(w):
        [own] = await registered(w, "own")
        seen = Looking(w)
        seen.says = {own: OWN}
        note, w.registry.note_texts = w.registry.note_texts, full_disk
        await seen.look.run()
        assert "not written now: no space" in caplog.text and not seen.look.is_sure(own)
        w.registry.note_texts = note
        await await_text(w.revisions.files, own, 5.0)
        assert seen.known(own) == OWN

    def full_disk(found):
        failed = Future()
        failed.set_exception(LoradError("insufficient_storage", "no space"))
        return failed

    world(scenario)
