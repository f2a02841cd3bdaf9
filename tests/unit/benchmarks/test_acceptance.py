"""What the curve of right drafts counts, and that its picture shows every point."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from acceptance import DRAFT_TOKENS, Tally, by_words
from acceptance_texts import TEACHING, pages, requests

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def drawing():
    place = ROOT / "docs/acceptance_picture.py"
    spec = importlib.util.spec_from_file_location("acceptance_picture", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_tells_the_right_drafts_and_one_token_more() -> None:
    tally = Tally()
    tally.play([True] * DRAFT_TOKENS + [True] + [False, True, None, False])
    # four drafts and a token; then a wrong one, one right with the next behind it, and a wrong one
    assert tally.draws == 4


def test_words_that_stand_nowhere_else_are_no_try() -> None:
    words = random.Random(0).sample(range(1000), 40)
    assert by_words(words[:20], words[20:]) == [None] * 20
    told = by_words(words, words[:20])
    assert told == [None] * 3 + [True] * 17


@pytest.mark.parametrize("far", [0.0, 1.0])
def test_coupled_drafts_are_right_as_often_as_theory_bounds_it(far) -> None:
    torch.manual_seed(0)
    own = torch.randn(1, 30).repeat(3000, 1)
    other = own + far * torch.randn(1, 30)
    tally = Tally()
    tally.tokens = len(own)
    tally.note_logits(own, other, greedy=False)
    told = tally.line(model=True, greedy=False)
    most = told["best"]
    assert most / (2 - most) - 0.03 <= told["right"] <= most + 0.03
    assert told["likeliest"] < told["right"]
    greedy = Tally()
    greedy.tokens = len(own)
    greedy.note_logits(own, own, greedy=True)
    line = greedy.line(model=True, greedy=True)
    assert (line["right"], line["a_step"]) == (1.0, DRAFT_TOKENS + 1.0)


def test_requests_are_of_both_kinds_and_all_of_them_differ() -> None:
    told = list(requests(48))
    assert [kind for kind, _ in told[:4]] == ["ask"] * 3 + ["copy"]
    assert len({text for _, text in told}) == 48
    assert not {text for _, text in told} & set(TEACHING)


def test_there_is_enough_of_these_pages_to_train_on() -> None:
    assert len(pages(ROOT)) > 100 and all("|--" not in page for page in pages(ROOT))


def test_the_picture_shows_every_point_of_its_panels(drawing) -> None:
    usual = {"scale": 1.0, "steps": 0, "tokens": 20, "tried": 20, "right": 0.5, "likeliest": 0.25}
    lines = [
        usual | {"adapter": adapter, "temperature": heat, "kind": kind, "draft": draft, "kl": kl}
        for adapter in drawing.MARKS
        for heat in (0.0, 1.0)
        for kind in ("ask", "copy")
        for draft in ("base", "short", "ngram")
        for kl in (0.0, 0.3)
    ]
    text = drawing.picture(lines)
    points = 2 * len(drawing.MARKS) * sum(len(panel.series) for panel in drawing.PANELS)
    legends = sum(len(panel.series) for panel in drawing.PANELS) + len(drawing.MARKS)
    marks = sum(text.count(f"<{shape} ") for shape in ("circle", "path", "rect"))
    axes = len(drawing.PANELS) * (5 + len(drawing.TICKS)) + 1
    assert marks == points + legends + axes


def test_the_picture_in_the_docs_is_that_of_its_data(drawing) -> None:
    data = sorted(drawing.DATA.glob("*-acceptance.jsonl"))
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.picture(drawing.read(data))
