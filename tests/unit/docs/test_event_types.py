"""Every event that is published has a type of the table, and the table has no other."""

import ast
from pathlib import Path

from lorad.event_types import TYPES, unlike_all

LORAD = Path(__file__).parents[3] / "lorad"
#: Types that are put together: of transitions, and of operations' ends.
MADE = {
    *("slot.drain", "slot.evict", "slot.load", "slot.load_failed", "slot.loading", "slot.undrain"),
    *("ram.drop", "ram.load", "ram.loading"),
    *("operation.done", "operation.failed", "operation.cancelled"),
    *("adapter.added", "adapter.candidate", "adapter.remote", "adapter.unpacked"),
    *("pin.set", "pin.cleared"),
}


def published():
    found = set()
    for path in LORAD.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or (not node.args and not node.keywords):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("publish", "_tell"):
                for value in ast.walk(ast.Tuple(elts=node.args, ctx=ast.Load())):
                    text = getattr(value, "value", None)
                    if isinstance(text, str) and text.count(".") == 1 and " " not in text:
                        found.add(text)
    return {text for text in found if text.replace(".", "").replace("_", "").isalpha()}


def test_the_table_has_what_is_published_and_nothing_else():
    there = published() - {"operation."}
    assert len(there) > 20
    assert there - set(TYPES) == set(), "a sentence is missing in lorad/event_types.py"
    assert set(TYPES) - there - MADE == set(), "nobody publishes these any more"


def test_a_slip_is_told_from_a_beginning():
    assert unlike_all("adapter") is None
    assert unlike_all("pin.se") is None
    assert unlike_all("pin.sett") == "did you mean pin.set?"
    assert "adapter, config" in unlike_all("qqq")
