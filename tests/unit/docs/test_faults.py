"""Every test that docs/faults.md and docs/conventions.md name is there; no tick is without one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", ["faults.md", "conventions.md"])
def test_the_tests_that_the_page_names_exist(page):
    named = NAMED.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) > 20
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{path}::{name}"


def rows():
    page = (ROOT / "docs/conventions.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_what_is_ticked_has_a_test_and_what_is_not_there_has_none():
    for what, grade, there, _, proof in rows():
        assert grade in ("M", "S"), what
        assert there in ("yes", "partly", "no"), what
        assert bool(NAMED.search(proof)) == (there != "no"), what


def test_the_page_counts_its_own_rows():
    last = (ROOT / "docs/conventions.md").read_text(encoding="utf-8").splitlines()[-1]
    there = [row[2] for row in rows()]
    counts = [there.count("yes"), len(there), there.count("partly"), there.count("no")]
    assert [int(number) for number in re.findall(r"\d+", last)] == counts
