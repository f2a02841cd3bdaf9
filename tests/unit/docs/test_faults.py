"""Every test that docs/faults.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_tests_of_each_fault_exist():
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{path}::{name}"
