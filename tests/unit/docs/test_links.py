"""Every relative link of a page leads to a file of the repository, and to a heading that it has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "demo" / "README.md", *ROOT.glob("docs/**/*.md")])


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What `#...` may say: the headings, as GitHub and the site spell them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())
        again = sum(1 for name in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", name))
        found.add(f"{slug}-{again}" if again else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(page))
    missing = []
    for target in (t for t in targets if not re.match(r"[a-z]+:", t)):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            missing.append(target)
    assert not missing
