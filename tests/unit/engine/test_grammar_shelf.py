"""Which tokenizers' grammars are held, and which are one."""

from pathlib import Path

import pytest

from engine import grammar_shelf
from engine.errors import GrammarInvalid
from engine.grammar_shelf import HELD, GrammarShelf

Read = list[tuple[str, int, tuple[int, ...]]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """What was read: a file's text, ids, ends."""
    told: Read = []

    class Grammars:
        def __init__(self, path: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
            told.append((path.read_text(), vocab_size, tuple(ends)))

    monkeypatch.setattr(grammar_shelf, "Grammars", Grammars)
    return told


@pytest.fixture
def shelf(tmp_path: Path) -> GrammarShelf:
    (tmp_path / "tokenizer.json").write_text("base")
    return GrammarShelf(tmp_path / "tokenizer.json", 100, (2, 90))


def own(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_the_bases_is_read_once_and_stays(shelf: GrammarShelf, read: Read, tmp_path: Path) -> None:
    base = shelf.of()
    for n in range(2 * HELD):
        shelf.of(own(tmp_path, f"{n}.json", f"text {n}"), 101)
    assert shelf.of() is base and shelf.of("", 100) is base
    assert [one for one in read if one[0] == "base"] == [("base", 100, (2, 90))]


def test_equal_files_are_one_and_the_last_used_are_held(
    shelf: GrammarShelf, read: Read, tmp_path: Path
) -> None:
    first = own(tmp_path, "a.json", "same")
    made = shelf.of(first, 104)
    assert shelf.of(own(tmp_path, "b.json", "same"), 104) is made
    assert shelf.of(first, 105) is not made and len(read) == 2
    for n in range(HELD - 1):
        shelf.of(own(tmp_path, f"{n}.json", f"text {n}"), 104)
        assert shelf.of(first, 104) is made
    for n in range(HELD):
        shelf.of(own(tmp_path, f"{n} more.json", f"more {n}"), 104)
    assert shelf.of(first, 104) is not made


def test_ends_are_those_that_there_are(shelf: GrammarShelf, read: Read, tmp_path: Path) -> None:
    shrunk = own(tmp_path, "shrunk.json", "few")
    shelf.of(shrunk, 80)
    shelf.of(shrunk, 80, (7, 80))
    shelf.of("", 95)  # the base's tokenizer with ids of a special table
    assert read == [("few", 80, (2,)), ("few", 80, (7,)), ("base", 95, (2, 90))]


def test_a_file_that_is_gone_is_said_in_a_line_without_its_place(tmp_path: Path) -> None:
    shelf = GrammarShelf(tmp_path / "base.json", 100, (2,))
    for asked, whose in ((str(tmp_path / "own.json"), "this adapter's"), ("", "this model's")):
        with pytest.raises(GrammarInvalid) as refused:
            shelf.of(asked, 101)
        expected = f"answers cannot be guided with {whose} tokenizer: No such file or directory"
        assert str(refused.value) == expected
