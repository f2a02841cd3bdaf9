"""The table of reason codes is complete, used, and what the reference page says."""

import re
from pathlib import Path

from engine.adapters.peft import REASONS
from engine.adapters.reasons import FILING, READING, as_markdown, refuse, shown, shown_list

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "engine" / "adapters" / "reasons.py"


def codes_in(folder: str) -> set[str]:
    """Every E_ code that is written as a string anywhere below the folder, the table left out."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        if path != TABLE:
            found |= set(re.findall(r"[\"'](E_[A-Z0-9_]+)[\"']", path.read_text()))
    return found


def test_every_code_that_the_engine_raises_is_in_the_table_and_the_reverse() -> None:
    assert codes_in("engine") == READING.keys()


def test_every_code_that_the_daemon_uses_is_in_the_table() -> None:
    assert FILING.keys() <= codes_in("lorad") <= REASONS.keys()


def test_meanings_are_single_lines() -> None:
    for code, meaning in REASONS.items():
        assert re.fullmatch(r"E_[A-Z]+(_[A-Z]+)*", code)
        assert meaning and "\n" not in meaning and "|" not in meaning and len(meaning) < 100


def test_the_reference_page_is_fresh() -> None:
    page = ROOT / "docs" / "reference" / "reason-codes.md"
    assert page.read_text() == as_markdown(), "python -m engine.adapters.reasons > " + str(page)


def test_foreign_text_is_shown_inert_and_bounded() -> None:
    assert shown("a\x1b]0;x\x07\nb\u202ec") == r"a\x1b]0;x\x07\nb\u202ec"
    assert len(shown("x" * 10_000)) < 130
    assert len(shown("\u202e" * 10_000)) < 130
    assert shown_list(str(n) for n in range(7)) == "0, 1, 2, 3, 4 and 2 more"


def test_a_refusal_carries_code_message_and_hint() -> None:
    error = refuse("E_ALPHA", "found this", "do that")
    assert (error.reason, error.message, error.hint) == ("E_ALPHA", "found this", "do that")
