"""Answers that follow a grammar, on the tiny model, whose own wish is to write rubbish."""

import itertools
import json
import random
import time

import pytest
from tokenizers import Tokenizer

pytest.importorskip("llguidance")

from engine import grammar, guides
from engine.messages import Abort, GetSnapshot, SamplingParams, Submit

EOS = 2
NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


# ----------------------------------------------------------------- random schemas, and a judge
def schema_of(draw: random.Random, depth: int = 2) -> dict:
    """A schema whose documents end after some tokens."""
    kind = draw.choice(
        ["enum", "integer", "string", "boolean", "any"] + ["object", "array"] * depth
    )
    if kind == "enum":
        return {"enum": draw.sample(["red", "blue", 7, None, True, "gr\u00fcn"], 3)}
    if kind == "integer":
        low = draw.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(200)}
    if kind == "string":
        low = draw.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(1, 6)}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "any":
        return {"anyOf": [schema_of(draw, 0), {"type": "null"}]}
    if kind == "array":
        low = draw.randrange(2)
        items = schema_of(draw, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    names = draw.sample(["a", "bb", "c c", "d\u00e9"], draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: schema_of(draw, depth - 1) for name in names},
        "required": names[: draw.randrange(len(names) + 1)],
        "additionalProperties": False,
    }


def fits(value: object, schema: dict) -> bool:
    """Whether a document is one of the schema, of those that `schema_of` makes."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            low, high = schema["minimum"], schema["maximum"]
            return type(value) is int and low <= value <= high
        case "string":
            low, high = schema.get("minLength", 0), schema["maxLength"]
            return isinstance(value, str) and low <= len(value) <= high
        case "array":
            low, high = schema.get("minItems", 0), schema["maxItems"]
            good = isinstance(value, list) and low <= len(value) <= high
            return good and all(fits(item, schema["items"]) for item in value)
    if not isinstance(value, dict) or not set(schema["required"]) <= set(value):
        return False
    return all(
        name in schema["properties"] and fits(one, schema["properties"][name])
        for name, one in value.items()
    )


def test_the_judge_of_these_tests_tells_good_from_bad() -> None:
    good = {"name": "x", "tags": ["red"]}
    assert fits(good, NESTED)
    for bad in ({}, {**good, "more": 1}, {**good, "tags": ["blue"]}, {**good, "name": "x" * 9}, 3):
        assert not fits(bad, NESTED)


@pytest.fixture(scope="session")
def read(worded_dir):
    """The text of an answer without its end."""
    tokenizer = Tokenizer.from_file(str(worded_dir / "tokenizer.json"))

    def text(story) -> str:
        ids = story.tokens[:-1] if story.finish == "stop" else story.tokens
        return tokenizer.decode(ids, skip_special_tokens=False)

    return text


@pytest.fixture
def begin(start_core, worded_dir):
    def start(**settings):
        return start_core(worded_dir, **{"max_num_seqs": 6, **settings})

    return start


def asked(schema: dict) -> str:
    return grammar.json_schema(json.dumps(schema))


def slowly(monkeypatch, seconds: float, every: int = 1) -> None:
    """Masks take at least so long, or every so-manieth."""
    real, made = grammar.Matcher.mask, itertools.count()

    def mask(self, ends=()):
        if next(made) % every == 0:
            time.sleep(seconds)
        return real(self, ends)

    monkeypatch.setattr(grammar.Matcher, "mask", mask)


# ----------------------------------------------------------------- what comes out
@pytest.mark.parametrize(
    ("lookahead", "wait"),
    [
        (True, 0.0),
        (False, guides.WAIT_SECONDS),
        pytest.param(True, guides.WAIT_SECONDS, marks=pytest.mark.late),
        pytest.param(False, 0.0, marks=pytest.mark.late),
    ],
)
def test_answers_to_random_schemas_validate(
    begin, adapters, prompt, read, lookahead, wait, monkeypatch
) -> None:
    draw = random.Random(17)
    driver = begin(lookahead=lookahead, num_blocks=28, max_batch_tokens=48)
    driver.core.guides._wait_seconds = wait
    if not wait:  # and some masks take longer than any step here
        slowly(monkeypatch, 0.03, every=40)
    driver.add(*adapters)
    revs = [None, *(a.rev for a in adapters)]
    schemas = [schema_of(draw) for _ in range(16)]
    stories = [
        driver.submit(
            f"r{n}",
            prompt(draw.randrange(3, 40), n),
            draw.choice(revs),
            grammar=asked(schema),
            temperature=draw.choice([0.0, 1.0]),
            max_tokens=180,
            seed=n,
            **({"top_p": 0.95} if n % 2 else {"logprobs": 2}),
        )
        for n, schema in enumerate(schemas)
    ]
    driver.finish()
    driver.until(lambda: driver.core.idle)
    driver.core.scheduler.check()
    assert not driver.core.guides, "something is kept for answers that have ended"
    snapshot = driver.call(GetSnapshot).snapshot
    assert snapshot.running == snapshot.pool.kv_active == 0
    assert snapshot.generated_tokens == sum(len(story.tokens) for story in stories)
    ended = 0
    for story, schema in zip(stories, schemas, strict=True):
        if story.finish == "length":  # blanks between parts can take all that there is
            continue
        assert story.finish == "stop" and story.tokens[-1] == EOS
        assert fits(json.loads(read(story)), schema), (schema, read(story))
        ended += 1
    assert ended >= 12
    assert driver.core.guides.num_late > 0 or wait


def test_an_answer_is_the_same_however_late_its_masks_are(begin, prompt, monkeypatch) -> None:
    told = []
    for seconds in (0.0, 0.004):
        with monkeypatch.context() as patched:
            slowly(patched, seconds)
            driver = begin(lookahead=True)
            for n in range(3):
                driver.submit(
                    f"r{n}", prompt(9 + n, n), grammar=asked(NESTED), temperature=1.0, seed=n
                )
            driver.submit("scored", prompt(20), grammar=asked(NESTED), prompt_logprobs=1)
            driver.finish()
        stories = driver.stories.values()
        told.append([(s.tokens, s.finish, s.prompt_logprobs) for s in stories])
    assert driver.core.guides.num_late >= 12, "no mask was late, and nothing was tried"
    assert driver.core.snapshot().late_masks == driver.core.guides.num_late
    assert told[0] == told[1]
    assert len(told[0][3][2]) == 20


def test_who_waits_for_a_mask_holds_up_nobody_else(begin, prompt, monkeypatch) -> None:
    slowly(monkeypatch, 0.15)
    driver = begin(lookahead=True)
    guided = driver.submit("guided", prompt(5), grammar=asked(NESTED), max_tokens=40)
    free = driver.submit("free", prompt(9), max_tokens=100, ignore_eos=True)
    driver.until(lambda: free.finish)
    assert len(free.tokens) == 100
    assert len(guided.tokens) < 20
    late = driver.core.guides.num_late
    assert late <= len(guided.tokens) + 2, "a row was computed again and again while it waited"
    driver.core.take(Abort("guided"))
    driver.finish()


@pytest.mark.parametrize("lookahead", [False, True])
def test_answers_beside_guided_ones_stay_what_they_are(begin, adapters, prompt, lookahead) -> None:
    told = []
    for beside in (False, True):
        driver = begin(lookahead=lookahead)
        driver.add(adapters[0])
        free = [
            driver.submit(f"r{n}", prompt(10 + n, n), rev, max_tokens=30, ignore_eos=True, **wish)
            for n, (rev, wish) in enumerate(
                [
                    (None, {}),
                    (adapters[0].rev, {"temperature": 1.0, "seed": 4}),
                    (None, {"temperature": 0.9, "seed": 5, "top_p": 0.8, "logprobs": 1}),
                ]
            )
        ]
        if beside:
            for n, rev in enumerate((None, adapters[0].rev)):
                driver.submit(f"g{n}", prompt(7, n), rev, grammar=asked(NESTED), max_tokens=60)
        driver.finish()
        told.append([(story.tokens, story.logprobs) for story in free])
    assert told[0] == told[1]


def test_an_answer_may_end_on_a_stop_token_where_its_grammar_lets_it_end(begin, prompt) -> None:
    stop, quote = 40, 5
    driver = begin()
    story = driver.submit(
        "r",
        prompt(6),
        grammar=grammar.regex("[0-9]{3,}"),
        stop_token_ids=(stop,),
        logit_bias={stop: 100.0, quote: 100.0},
        max_tokens=30,
    )
    driver.finish()
    assert story.finish == "stop"
    assert story.tokens[-1] == stop and len(story.tokens) == 4


def test_an_answer_without_room_is_cut_and_says_so(begin, prompt, read) -> None:
    driver = begin()
    story = driver.submit("r", prompt(6), grammar=grammar.json_object(), max_tokens=3)
    driver.finish()
    assert story.finish == "length" and len(story.tokens) == 3
    assert read(story).startswith("{")


def test_preempted_answers_go_on_where_they_were(begin, prompt, read) -> None:
    driver = begin(num_blocks=9, max_batch_tokens=48, max_num_seqs=4, lookahead=True)
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 8, "maxItems": 9}
    stories = [
        driver.submit(
            f"r{n}", prompt(17, n), grammar=asked(schema), temperature=1.0, seed=n, max_tokens=110
        )
        for n in range(4)
    ]
    driver.finish()
    assert driver.call(GetSnapshot).snapshot.preemptions > 0, "nobody had to give way"
    ended = [story for story in stories if story.finish == "stop"]
    assert ended
    assert all(fits(json.loads(read(story)), schema) for story in ended)


# ----------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda: asked({"not": {}}), 'Unimplemented keys: ["not"]'),
        (lambda: "{}", "grammar"),
    ],
)
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    begin, prompt, text, says
) -> None:
    driver = begin(lookahead=True)
    bad = driver.submit("bad", prompt(5), grammar=text())
    good = driver.submit("good", prompt(5), max_tokens=20, ignore_eos=True)
    driver.finish()
    assert (bad.finish, bad.code, bad.tokens) == ("error", "invalid_value", [])
    assert says in bad.message and "\n" not in bad.message
    assert len(good.tokens) == 20


def test_a_model_without_a_usable_tokenizer_refuses_grammars_alone(start_core, prompt) -> None:
    driver = start_core()
    bad = driver.submit("bad", prompt(5), grammar=grammar.json_object())
    good = driver.submit("good", prompt(5), max_tokens=5, ignore_eos=True)
    driver.finish()
    assert (bad.finish, bad.code) == ("error", "invalid_value")
    assert "this model's tokenizer" in bad.message
    assert len(good.tokens) == 5


def test_on_a_card_the_tokenizer_is_read_at_the_start_and_not_beside_streams(
    begin, start_core, prompt, monkeypatch
) -> None:
    read, init = [], grammar.Grammars.__init__

    def told(self, *arguments) -> None:
        read.append(arguments)
        init(self, *arguments)

    monkeypatch.setattr(grammar.Grammars, "__init__", told)
    monkeypatch.setattr("engine.core.is_card", lambda device: True)
    driver = begin()
    driver.until(lambda: read)
    story = driver.submit("r", prompt(5), grammar=grammar.json_object(), max_tokens=30)
    driver.finish()
    assert story.code == "" and len(read) == 1
    driver = start_core()  # on a model whose tokenizer is none: it serves all the same
    bad = driver.submit("bad", prompt(5), grammar=grammar.json_object())
    driver.finish()
    assert bad.code == "invalid_value" and "this model's tokenizer" in bad.message


def test_a_fault_in_a_guide_ends_its_request_alone(begin, prompt, monkeypatch, capsys) -> None:
    def broken(self, ends=()):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(grammar.Matcher, "mask", broken)
    driver = begin(lookahead=True)
    bad = driver.submit("bad", prompt(5), grammar=grammar.json_object())
    driver.finish()
    assert (bad.finish, bad.code) == ("error", "internal_error")
    assert "ZeroDivisionError" in bad.message and "on purpose" in capsys.readouterr().err


def test_a_request_that_is_aborted_while_it_waits_frees_everything(
    begin, prompt, monkeypatch
) -> None:
    slowly(monkeypatch, 0.2)
    driver = begin(lookahead=True)
    story = driver.submit("r", prompt(20), grammar=grammar.json_object())
    driver.until(lambda: driver.core.guides.num_late)
    driver.core.take(Abort("r"))
    driver.until(lambda: story.finish)
    assert story.finish == "abort"
    driver.until(lambda: driver.core.idle)
    driver.core.scheduler.check()
    assert driver.call(GetSnapshot).snapshot.pool.kv_active == 0
    assert not driver.core.guides


def test_a_second_request_of_the_same_id_leaves_the_guide_of_the_first(begin, prompt, read) -> None:
    driver = begin()
    story = driver.submit("r", prompt(5), grammar=asked({"enum": ["abcdefgh"]}), max_tokens=30)
    driver.step()
    again = Submit(request_id="r", prompt=prompt(4), sampling=SamplingParams())
    driver.core.take(again)
    frame = driver.core.step()
    assert any(d.code == "invalid_value" for d in frame.deltas)
    for delta in frame.deltas:
        if not delta.code:
            story.add(delta, frame.step)
    driver.finish()
    assert json.loads(read(story)) == "abcdefgh"
