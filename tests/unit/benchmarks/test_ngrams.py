"""What drafts would have made of an answer is counted as the engine would have made it."""

import random

from ngrams import Answered, by_words, played, requests

from engine.speculation import FIRST_SHARE


def answered(prompt: list[int], answer: list[int]) -> list[Answered]:
    return [Answered("base", "copy", prompt, answer)]


def test_an_answer_that_copies_its_prompt_takes_a_draw_for_each_draft() -> None:
    prompt = random.Random(0).sample(range(1000), 200)
    told = played(answered(prompt, prompt[:101]), 1)
    # The prompt's step draws one, two more make three that the prompt holds, and then two a draw.
    assert told["tokens"] == 101 and told["draws"] == 3 + 49
    assert told["accepted"] == told["drafted"] == 49
    assert played(answered(prompt, prompt[:101]), 8)["draws"] < 3 + 25
    assert 0 < FIRST_SHARE < 1


def test_an_answer_that_repeats_nothing_takes_a_draw_for_each_token() -> None:
    tokens = random.Random(0).sample(range(1000), 300)
    told = played(answered(tokens[:200], tokens[200:]), 4)
    assert (told["draws"], told["drafted"], told["tokens_a_draw"]) == (100, 0, 1.0)
    assert by_words(answered(tokens[:200], tokens[200:]), 2)["matches"] == 0


def test_matches_are_counted_by_the_tokens_that_they_share() -> None:
    told = [by_words(answered([1, 2, 3, 4, 5, 9], [2, 3, 4, 5, 7]), n) for n in (2, 3, 4)]
    assert [(line["matches"], line["right"]) for line in told] == [(3, 2), (2, 1), (1, 0)]


def test_there_are_requests_of_every_kind() -> None:
    kinds = [kind for kind, _ in requests(3)]
    assert kinds == ["copy"] * 3 + ["code"] * 3 + ["ask"] * 3
