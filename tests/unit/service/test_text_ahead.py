"""At a daemon's start tokenizers of adapters' own are read before anybody streams."""

import asyncio
import logging
import shutil

import pytest

from lorad.errors import LoradError
from lorad.service.catalog import Catalog, Entry
from lorad.service.text import TextService
from lorad.service.text_ahead import TextAhead
from lorad.text import own_tokenizer
from tests.unit.service.test_own_text import own, write

SMALL = own_tokenizer._REMEMBERED_BYTES + own_tokenizer._BYTES_OF_FILE * 20_000


class Start:
    """A daemon of one model that starts; `run` reads ahead, and `text` is what requests ask."""

    def __init__(self, root, caplog):
        self.root, self.caplog, self.known = root, caplog, {}
        self.read, self.made = [], []
        self.catalog, self.wanted, self.now = Catalog(), [], 100.0
        self.busy = 0.0  # as the thread's clock says
        self.takes, self.waits, self.loads = 0.0, 0.0, 1000
        self.text = TextService(write(root / "base"), lambda rev: root / rev, self.known.get)
        self._make, self.text.tokenizers._make = self.text.tokenizers._make, self.count

        self._load, self.text._load = self.text._load, self.load

    def load(self, rev):
        self.read.append(rev)
        return self._load(rev)

    def count(self, files):
        self.made.append(files.path.parent.name)
        self.now += self.takes + self.waits
        self.busy += self.takes
        return self._make(files)

    def add(self, rev, *added, model="base"):
        write(self.root / rev, *added)
        self.known[rev] = own(258 + len(added))
        self.catalog.put(Entry(f"of-{rev}", rev, model=model))
        self.wanted.append(rev)

    def run(self):
        """The line in the log, "" without one."""
        ahead = TextAhead(
            {"base": self.text},
            self.catalog,
            lambda: self.wanted,
            loading=lambda: len(self.made) < self.loads,
            clock=lambda: self.now,
            busy=lambda: self.busy,
        )
        with self.caplog.at_level(logging.INFO, "lorad.text"):
            asyncio.run(ahead.run())
        lines = [r.getMessage() for r in self.caplog.records if r.levelname == "INFO"]
        assert len(lines) <= 1
        return "".join(lines)


@pytest.fixture
def start(tmp_path, caplog):
    return Start(tmp_path, caplog)


def test_first_requests_find_what_was_read_in_the_order_of_the_wanted(start):
    start.takes = 0.25
    for rev in ("r2", "r1"):
        start.add(rev, f"<{rev}>")
    assert start.run() == "tokenizers of adapters: 2 read in 0.50 s"
    assert start.made == ["r2", "r1"]
    for rev in ("r1", "r2"):
        assert start.text(rev).encode(f"<{rev}>", False) == [258]
    assert start.made == ["r2", "r1"], "no request reads one"


def test_equal_tokenizers_are_made_once(start):
    for rev in ("r1", "r2", "r3"):
        start.add(rev, "<tool>")
    assert start.run().startswith("tokenizers of adapters: 3 read in")
    assert start.made == ["r1"]
    assert start.text("r3").tokenizer is start.text("r1").tokenizer


def test_without_any_nothing_is_said(start):
    assert start.run() == ""


def test_one_that_nobody_can_ask_for_is_not_read(start):
    start.add("other", "<tool>", model="another")
    start.add("gone", "<tool>")
    start.catalog.drop("of-gone")
    assert start.run() == "" and start.made == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"loads": 2}, "the weights are loaded"),
        ({"takes": 15.1}, "it took long"),
        ({"takes": 0.7, "waits": 0.6}, "others need the machine"),
    ],
)
def test_none_is_begun_once_the_engine_is_there_or_anybody_waits_for_it(start, change, why):
    for n in range(5):
        start.add(f"r{n}", f"<{n}>")
    vars(start).update(change)
    line = start.run()
    assert line.endswith(f", 3 left for their first requests: {why}")
    assert start.made == ["r0", "r1"]
    assert start.text("r4").encode("<4>", False) == [258], "as it was before"


@pytest.mark.parametrize("bound", ["bytes", "texts"])
def test_one_never_pushes_out_another_that_is_wanted_more(start, monkeypatch, bound):
    if bound == "bytes":
        start.text.tokenizers._budget = SMALL + 2 * own_tokenizer._REMEMBERED_BYTES
    else:
        start.text._templates._most = 3
    for n in range(5):
        start.add(f"r{n}", f"<{n}>")
        (start.root / f"r{n}" / "chat_template.jinja").write_text(f"{n}")
    line = start.run()
    assert ": 3 read in" in line
    assert line.endswith(", 2 left for their first requests: no room for more")
    assert start.read == ["r0", "r1", "r2"]
    start.text("r4")  # has to push one out
    for rev in ("r0", "r1"):
        start.text(rev)
    assert start.read == ["r0", "r1", "r2", "r4"], "and that is the one wanted least"


def test_one_that_is_removed_meanwhile_is_not_read_again_and_the_rest_is_told(start):
    for rev in ("r1", "r2"):
        start.add(rev, f"<{rev}>")
    make = start.text.tokenizers._make

    def removed(files):
        if files.path.parent.name == "r2":
            start.text.forget("r1")
            shutil.rmtree(start.root / "r1")
        return make(files)

    start.text.tokenizers._make, missing = removed, []
    start.text.on_missing = missing.append
    assert start.run().startswith("tokenizers of adapters: 2 read in")
    assert start.read == ["r1", "r2"] and not missing


def test_broken_and_missing_files_are_a_line_each_and_the_rest_is_read(start):
    for rev in ("bad", "gone", "lost", "good"):
        start.add(rev, "<tool>")
    (start.root / "lost" / "tokenizer.json").unlink()
    (start.root / "bad" / "tokenizer.json").write_text("{")
    shutil.rmtree(start.root / "gone")
    missing = []
    start.text.on_missing = missing.append
    assert start.run() == "tokenizers of adapters: 1 read in 0.00 s", "nothing is left"
    lines = [r.getMessage() for r in start.caplog.records if r.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in lines] == ["of-bad", "of-gone", "of-lost"]
    assert "tokenizer cannot be used" in lines[0] and "are gone from the store" in lines[1]
    assert "its tokenizer.json is gone" in lines[2]
    assert not any("\n" in line for line in lines)
    assert missing == ["gone"], "as a request would have told"
    for rev in ("bad", "lost"):
        with pytest.raises(LoradError):  # and never the base's words in silence
            start.text(rev)
