"""The site (`make site`) shows every page of docs/, each once."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_navigation_has_every_page_once_and_no_other():
    plan = (DOCS / "site/mkdocs.yml").read_text(encoding="utf-8")
    shown = re.findall(r"(\S+\.md)$", plan[plan.index("\nnav:") :], flags=re.M)
    there = {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")}
    assert set(shown) == there, "docs/site/mkdocs.yml"
    assert len(shown) == len(set(shown))


def test_the_index_of_the_how_tos_has_every_one_of_them():
    index = (DOCS / "howto.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(howto/(\w[\w-]*)\.md\)", index))
    assert linked == {page.stem for page in DOCS.glob("howto/*.md")}


def test_no_page_links_out_of_what_the_site_holds():
    for page in DOCS.glob("**/*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).resolve().is_relative_to(DOCS), f"{page}: {target}"
