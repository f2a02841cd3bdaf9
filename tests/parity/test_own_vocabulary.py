"""Adapters of resized vocabularies, as PEFT writes them, through packer and engine: what they draw
is what PEFT draws, alone, beside others of other vocabularies, after a reload, with drafts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.own_vocabulary import ADAPTERS, BASES, Zoo, zoo_of

NEAR = 2e-4  # of how far apart log-probabilities lie


@pytest.fixture(scope="module", params=[*BASES])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    root = tmp_path_factory.mktemp(request.param)
    with zoo_of(request.param, root, device="cpu", dtype="float32") as made:
        yield made


def check(zoo: Zoo, work: list[tuple[str, list[int]]], **more: object) -> None:
    for (name, prompt), got in zip(work, zoo.ask(work, **more), strict=True):
        assert zoo.apart(name, prompt, got) < NEAR, name
        assert zoo.regret(name, prompt, got) < NEAR, name
        assert max(got.tokens) < zoo.limits[name]


def test_each_alone_says_what_peft_says(zoo: Zoo) -> None:
    for n, name in enumerate(zoo.revs):
        check(zoo, [(name, zoo.prompt(name, 5 + 3 * n, n))])


def test_all_in_one_batch_say_what_peft_says_and_again_after_they_were_evicted(zoo: Zoo) -> None:
    work = [
        (name, zoo.prompt(name, 40 - 2 * n, n)) for n, name in enumerate([*zoo.revs, *zoo.revs])
    ]
    check(zoo, work)
    for rev in zoo.revs.values():
        if rev is not None:
            zoo.engine.evict(rev)
    check(zoo, work[::-1])


def test_ids_of_its_own_are_drawn_and_count(zoo: Zoo) -> None:
    """Hot draws reach them; each repeats when it is asked for again."""
    name = "all there is room for"
    work = [(name, zoo.prompt(name, 8, n)) for n in range(4)]
    hot = {"temperature": 2.0, "tokens": 24}
    drawn = [got.tokens for got in zoo.ask(work, seed=3, **hot)]
    assert max(max(tokens) for tokens in drawn) >= zoo.limits[""]
    assert [got.tokens for got in zoo.ask([*work, ("", [5, 6])], seed=3, **hot)][:4] == drawn


def test_factors_are_found_where_there_is_room_for_more_ids_than_the_base_has(
    tmp_path: Path,
) -> None:
    """A row of A is as long as all ids that there may be, and lies in as many pieces."""
    more = {"names": ["factors"], "extra_vocab": 2048}
    with zoo_of("Qwen2", tmp_path, device="cpu", dtype="float32", **more) as zoo:
        check(zoo, [("factors", zoo.prompt("factors", 20, 1))])


@pytest.mark.late
@pytest.mark.parametrize("kind", [*BASES])
def test_on_two_ranks_they_say_what_peft_says(kind: str, tmp_path: Path) -> None:
    more = {"tensor_parallel": 2, "num_blocks": 4000, "ram_cache": 32 << 20, "threads": 1}
    with zoo_of(kind, tmp_path, device="cpu", dtype="float32", **more) as zoo:
        work = [(name, zoo.prompt(name, 20 + n, n)) for n, name in enumerate(zoo.revs)]
        check(zoo, work)
        assert len(work) == len(ADAPTERS) + 1


@pytest.mark.late
def test_drafts_change_nothing_of_what_they_say(tmp_path: Path) -> None:
    more = {"speculation": "ngram", "num_blocks": 120}
    with zoo_of("Llama", tmp_path, device="cpu", dtype="float32", **more) as zoo:
        work = [(name, zoo.prompt(name, 9, n) * 4) for n, name in enumerate([*zoo.revs] * 2)]
        check(zoo, work, tokens=30)
        assert sum(zoo.engine.core.stats.drafted_by_rev.values()) > 20
