"""The reference pages are what their generator makes of the code as it is now."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load()


@pytest.mark.parametrize("page", sorted(generate.PAGES))
def test_the_page_is_fresh(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # as little as the terminal may matter
    there = (DOCS / "reference" / page).read_text(encoding="utf-8")
    assert there == generate.PAGES[page](), "make docs"


def test_every_page_of_the_folder_has_a_generator():
    assert {p.name for p in (DOCS / "reference").glob("*.md")} == set(generate.PAGES)


def test_a_key_without_a_sentence_and_a_sentence_without_a_key_are_refused():
    assert generate.matched({"a": "x"}, ["a"], "here") == {"a": "x"}
    with pytest.raises(KeyError, match=r"docs/words\.toml, here: b"):
        generate.matched({"a": "x"}, ["a", "b"], "here")
    with pytest.raises(KeyError, match=r"docs/words\.toml, here: c"):
        generate.matched({"a": "x", "c": "y"}, ["a"], "here")


def test_every_command_and_option_is_on_the_page():
    page = generate.commands()
    for command in ("loractl evict", "loractl run", "lorad serve", "lorad demo"):
        assert f"### {command}\n" in page
    assert "`--wait`, `--no-wait`" in page
    assert "`-n`, `--max-tokens N`" in page
