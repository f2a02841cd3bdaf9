"""Adapters with tokens of their own, beside the base and beside each other, on the tiny model.

What is right says transformers, of a model that was resized and has the adapters' rows and merged
weights.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from engine import speculation
from engine.messages import AddRevision, Evict, Load
from tests.fakes.resized_llama import Judge, own_prompt

V, EXTRA = 256, 40


@pytest.fixture(scope="module")
def family(make_adapter) -> dict[str, Any]:
    """Of one layout: more ids than the base, fewer, and none of their own."""

    def make(name: str, **more: Any) -> Any:
        return make_adapter(name, extra_vocab=EXTRA, **more)

    few, many = (*range(5, 99, 7), 256, 257, 258), (0, 9, *range(200, 290))
    return {
        "few": make("few", rows={"embed_tokens": few, "lm_head": few}, num_tokens=259, seed=1),
        "many": make(
            "many", modules=(), rows={"embed_tokens": many, "lm_head": many}, num_tokens=290, seed=2
        ),
        "whole": make(
            "whole",
            layers=(1,),
            rows={"embed_tokens": (), "lm_head": ()},
            num_tokens=270,
            seed=3,
            strength=0.3,
        ),
        "shrunk": make("shrunk", num_tokens=200, seed=4),
        "plain": make("plain", seed=5),
    }


@pytest.fixture(scope="module")
def judge(model_dir: Path) -> Judge:
    return Judge(model_dir)


WHO = ("few", None, "many", "whole", "shrunk", "plain", "few", None)


def ask(driver: Any, family: Any, who: Any, n: int, **sampling: Any) -> Any:
    adapter = family[who] if who else None
    prompt = own_prompt(adapter, 9 + 5 * n, n)
    wish = {"logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True, "max_tokens": 10, **sampling}
    story = driver.submit(f"r{n}{next(NUMBERS)}", prompt, adapter and adapter.rev, **wish)
    return story, adapter, prompt


NUMBERS = itertools.count()


def test_each_alone_and_all_in_one_batch_say_what_resized_models_say(
    start_core, family, judge
) -> None:
    driver = start_core(extra_vocab=EXTRA)
    driver.add(*family.values())
    used: set[int] = set()
    for n, who in enumerate(WHO[:6]):
        asked = ask(driver, family, who, n)
        driver.finish()
        judge.check(*asked)
        used |= set(asked[0].tokens)
    assert max(used) >= V, "nobody has drawn an id of its own"
    together = [ask(driver, family, who, n) for n, who in enumerate(WHO)]
    driver.finish()
    for asked in together:
        judge.check(*asked)
    assert WHO[4] == "shrunk" and max(together[4][0].tokens) < 200


def test_greedy_requests_that_want_nothing_told_draw_ids_of_their_own_too(
    start_core, family, judge
) -> None:
    """Where all rows are such nothing is planned, unless one's vocabulary is not the base's."""
    driver = start_core(extra_vocab=EXTRA)
    driver.add(*family.values())
    silent = {"logprobs": None, "prompt_logprobs": None}
    used: set[int] = set()
    for n, who in enumerate(WHO[:6]):
        story, adapter, prompt = ask(driver, family, who, n, **silent)
        driver.finish()
        right, *_ = judge(adapter, prompt, len(story.tokens))
        assert story.tokens == right, who
        used |= set(story.tokens)
    assert max(used) >= V


def test_after_eviction_and_reload_and_under_preemption_they_say_the_same(
    start_core, family, judge
) -> None:
    driver = start_core(extra_vocab=EXTRA, slots=2, num_blocks=28, lookahead=True)
    driver.add(family["few"], family["many"], family["plain"])
    for name in ("few", "many"):
        driver.call(lambda i, name=name: Load(command_id=i, rev=family[name].rev))
        driver.call(lambda i, name=name: Evict(command_id=i, rev=family[name].rev))
    asked = [
        ask(driver, family, who, n, max_tokens=40, prompt_logprobs=None)
        for n, who in enumerate(("few", "many", "few", None, "plain", "many", "few"))
    ]
    driver.finish()
    for one in asked:
        judge.check(*one)
    assert driver.core.scheduler.num_preemptions > 0


def test_prefixes_that_hold_ids_of_its_own_are_found_by_its_own_requests(
    start_core, family, judge
) -> None:
    driver = start_core(extra_vocab=EXTRA, max_batch_tokens=24)  # in chunks
    driver.add(family["few"], family["many"])
    wish = {"logprobs": 0, "ignore_eos": True, "max_tokens": 6}
    shared = [*own_prompt(family["few"], 40, 1), 256]
    cached = []
    for n, who in enumerate(("few", "few", "many", "few")):
        prompt = [*shared, *own_prompt(family["few"], 3 + n, n)]
        story = driver.submit(f"p{n}", prompt, family[who].rev, **wish)
        driver.finish()
        judge.check(story, family[who], prompt)
        cached.append(story.cached)
    assert cached == [0, 32, 0, 32]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_bases_rows_have_the_same_bits_with_more_ids_and_beside_those_who_use_them(
    start_core, family, make_adapter, deterministic
) -> None:
    plain = {0: make_adapter("plain", seed=5), EXTRA: family["plain"]}
    wishes = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "seed": 3, "top_p": 0.8, "logprobs": 0},
        {"temperature": 0.7, "seed": 4, "top_k": 300, "logprobs": 2},
    ]
    told = []
    for extra, beside in ((0, False), (EXTRA, False), (EXTRA, True)):
        driver = start_core(extra_vocab=extra, deterministic=deterministic)
        if beside:
            driver.add(family["few"], family["whole"])
        driver.add(plain[extra])
        stories = []
        for n, wish in enumerate(wishes):
            for rev in (None, plain[extra].rev):
                prompt = own_prompt(None, 20, n)
                stories.append(driver.submit(f"b{n}{rev}", prompt, rev, prompt_logprobs=2, **wish))
                if beside and deterministic:
                    ask(driver, family, "few" if n % 2 else "whole", n)
                else:
                    driver.finish()  # bits hang on the company otherwise
        driver.finish()
        told.append([(s.tokens, s.logprobs, s.prompt_logprobs) for s in stories])
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("lookahead", [True, False])
def test_drafts_of_the_text_itself_hold_ids_of_its_own(
    start_core, family, judge, lookahead
) -> None:
    driver = start_core(
        extra_vocab=EXTRA, lookahead=lookahead, speculation="ngram", speculation_tokens=4
    )
    driver.add(family["few"], family["many"])
    said = []
    for n, who in enumerate(("few", "many", None)):
        adapter = family[who] if who else None
        prompt = own_prompt(adapter, 9, n) * 4
        wish = {"max_tokens": 24, "logprobs": 0, "ignore_eos": True}
        story = driver.submit(f"d{n}", prompt, adapter and adapter.rev, **wish)
        said.append((story, adapter, prompt))
    driver.finish()
    for one in said:
        judge.check(*one)
    assert driver.core.stats.drafted_by_rev[family["few"].rev] > 0


def test_ids_that_a_revision_has_not_are_refused_by_name(start_core, family) -> None:
    driver = start_core(extra_vocab=EXTRA)
    driver.add(family["few"], family["shrunk"])
    for rev, token, last in (
        (None, V, V - 1),
        (family["few"].rev, 259, 258),
        (family["shrunk"].rev, 200, 199),
        (None, -1, V - 1),
    ):
        story = driver.submit(f"r{token}{rev}", [5, token], rev)
        driver.finish()
        assert story.code == "invalid_value"
        assert story.message == f"the prompt holds a token id outside 0..{last}: {token}"
    story = driver.submit("a", [5, 258], family["few"].rev, allowed_token_ids=(258, 259))
    unknown = driver.submit("u", [5, 1000], "f" * 64)
    driver.finish()
    assert story.message == "allowed_token_ids holds 259, which is outside 0..258"
    assert unknown.code == "model_not_found"


def test_wishes_about_single_ids_are_heeded_for_ids_of_its_own(start_core, family) -> None:
    driver = start_core(extra_vocab=EXTRA)
    driver.add(family["few"])
    few, prompt = family["few"].rev, [7, 256, 9]
    biased = driver.submit("b", prompt, few, logit_bias={257: 1e4}, max_tokens=4)
    allowed = driver.submit("o", prompt, few, allowed_token_ids=(258,), max_tokens=3)
    beyond = driver.submit("y", prompt, few, logit_bias={259: 1e9, 257: 1e4}, max_tokens=2)
    foreign = driver.submit("f", [7], None, logit_bias={256: 1e9}, max_tokens=3)
    ended = driver.submit("e", prompt, few, logit_bias={257: 1e4}, stop_token_ids=(257,))
    top = driver.submit("t", prompt, few, logprobs=20, max_tokens=1)
    driver.finish()
    assert biased.tokens == [257] * 4 and allowed.tokens == [258] * 3 and beyond.tokens == [257] * 2
    assert max(foreign.tokens) < V and (ended.tokens, ended.finish) == ([257], "stop")
    assert max(token for token, _ in top.logprobs[0].top) < 259


def test_a_request_that_tells_of_its_prompt_and_may_draw_nothing_ends_alone(start_core) -> None:
    """What was drawn for it is no token: the next step would look up row -1."""
    driver = start_core()
    beside = driver.submit("b", [5, 6, 7], max_tokens=8)
    nothing = {"allowed_token_ids": (2,), "min_tokens": 3, "prompt_logprobs": 1}
    story = driver.submit("n", [8, 9, 10], **nothing)
    driver.finish()
    assert (story.finish, story.code, story.tokens) == ("error", "invalid_value", [])
    assert len(beside.tokens) == 8


def test_a_manifest_that_lacks_rows_for_its_ids_is_not_taken(start_core, make_adapter) -> None:
    driver = start_core(extra_vocab=EXTRA)
    ids = (3, *range(256, 260))
    for name, rows, count in (
        ("no rows", {}, 260),
        ("an end", {"embed_tokens": ids}, 260),
        ("a hole", {"embed_tokens": ids, "lm_head": (3, 256, 258, 259)}, 260),
        ("too many", {"embed_tokens": (), "lm_head": ()}, V + EXTRA + 1),
    ):
        adapter = make_adapter(name, rows=rows, num_tokens=count, extra_vocab=EXTRA)
        answer = driver.call(lambda i, a=adapter: AddRevision(command_id=i, manifest=a.manifest))
        assert answer.code == "load_failed" and f"{count} token ids" in answer.message


def test_an_adapters_tokenizer_may_use_rows_that_the_bases_leaves_empty(
    start_core, make_adapter, model_dir, tmp_path, judge
) -> None:
    """The base's tokenizer has 200 ids of 256; neither it nor plain adapters ever draw others."""
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = {f"w{n}": n for n in range(200)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    rows = {"embed_tokens": (230, 239), "lm_head": (230, 239)}
    own, plain = make_adapter("own", rows=rows, num_tokens=240, seed=6), make_adapter("p", seed=7)
    driver = start_core(tmp_path)
    driver.add(own, plain)
    prompt = own_prompt(own, 12, 3)
    story = driver.submit("o", prompt, own.rev, logprobs=0, prompt_logprobs=0, max_tokens=30)
    others = [
        driver.submit(f"p{n}", own_prompt(None, 9, n), rev, max_tokens=30, **how)
        for n, (rev, how) in enumerate(
            itertools.product((None, plain.rev), ({}, {"temperature": 3.0, "seed": 1}))
        )
    ]
    driver.finish()
    judge.check(story, own, prompt)
    assert max(story.tokens) >= 200 > max(max(other.tokens) for other in others)


@pytest.fixture(scope="module")
def own_words(worded_dir, tmp_path_factory) -> Path:
    """The base's tokenizer with two words behind its 256 ids, where two adapters have it."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(worded_dir / "tokenizer.json"))
    words = [f"<{n}>" for n in range(tokenizer.get_vocab_size(), V)] + ["<yes!>", "<no!>"]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    assert tokenizer.token_to_id("<no!>") == V + 1
    folder = tmp_path_factory.mktemp("own-words")
    for name in ("one.json", "two.json"):
        tokenizer.save(str(folder / name))
    return folder


def test_guided_answers_are_of_their_own_tokenizers_words(
    start_core, make_adapter, worded_dir, own_words
) -> None:
    pytest.importorskip("llguidance")
    from engine import grammar

    rows = {"embed_tokens": (256, 257), "lm_head": (256, 257)}
    own = [
        make_adapter(
            name,
            rows=rows,
            num_tokens=258,
            extra_vocab=EXTRA,
            tokenizer=str(own_words / f"{name}.json"),
        )
        for name in ("one", "two")
    ]
    driver = start_core(worded_dir, extra_vocab=EXTRA)
    driver.add(*own)
    words = grammar.lark('start: (<[256]> | <[257]>) "x"')
    guided = [
        driver.submit(f"g{n}", [5, 256, 7], a.rev, grammar=words, max_tokens=5)
        for n, a in enumerate(own)
    ]
    text = grammar.regex("[a-d]{4}")
    beside = [driver.submit(f"b{rev}", [9, 8], rev, grammar=text) for rev in (None, own[0].rev)]
    redefined = driver.submit(
        "ends", [5, 9], own[0].rev, grammar=text, ignore_eos=True, stop_token_ids=(257,)
    )
    free = driver.submit("f", [5, 256], own[0].rev, max_tokens=9)
    driver.finish()
    x = worded_dir_id(worded_dir, "x")
    for story in guided:
        assert story.tokens[0] in (256, 257) and story.tokens[1] == x and story.finish == "stop"
    for story in beside:
        assert len(story.tokens) == 5 and story.finish == "stop" and max(story.tokens) < V
    assert redefined.tokens[-1] == 257 and redefined.finish == "stop" and free.tokens
    # Two paths, one content: one reading; another where the answer ends with other tokens.
    shelf = driver.core.guides._find.__self__
    assert len(shelf._digests) == 2 and len(shelf._held) == 2


def worded_dir_id(folder: Path, word: str) -> int:
    return json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][word]


def test_a_model_that_drafts_knows_the_bases_ids_alone(
    start_core, make_adapter, judge, model_dir, monkeypatch
) -> None:
    monkeypatch.setattr(speculation, "WORTH", 0.0)
    driver = start_core(
        extra_vocab=EXTRA, speculation="draft", draft_model=str(model_dir), speculation_tokens=3
    )
    driver.core.scheduler.speculation.cost = 0.0
    ids, block = (*range(5, 99, 7), 256, 257, 258), driver.core.info.draft_block_bytes
    rows = {"embed_tokens": ids, "lm_head": ids}
    more = {"extra_vocab": EXTRA, "draft_bytes": block}
    few = make_adapter("few", rows=rows, num_tokens=259, seed=1, **more)
    driver.add(few)
    asked = []
    for n, adapter in enumerate((few, None, few)):
        prompt = own_prompt(adapter, 20 + n, n)
        wish = {"max_tokens": 20, "logprobs": 0, "ignore_eos": True}
        story = driver.submit(f"m{n}", prompt, adapter and adapter.rev, **wish)
        asked.append((story, adapter, prompt))
    biased = {"logit_bias": {258: 1e4, 9: 1.0}, "presence_penalty": 0.5, "max_tokens": 6}
    odd = driver.submit("odd", own_prompt(few, 30, 4), few.rev, **biased)
    driver.finish()
    for one in asked:
        judge.check(*one)
    assert driver.core.draft_model.forward_passes > 0 and odd.tokens == [258] * 6
