"""Every relative link of a page leads to a file of the repository."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "demo" / "README.md", *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [t for t in targets if not re.match(r"[a-z]+:", t)]
    missing = [t for t in local if not (page.parent / t).exists()]
    assert not missing
