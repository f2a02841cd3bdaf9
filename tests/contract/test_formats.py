"""The form of an answer: what openai-python asks for reaches the engine, or is refused by name."""

import json
import threading

import openai
import pytest

pytest.importorskip("llguidance")

from engine import grammar
from lorad.service.grammar_checker import GrammarChecker

ASK = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def named(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def sent(api) -> str:
    [submit] = api.engine.submits
    return submit.sampling.grammar


@pytest.mark.parametrize(
    ("extra", "made"),
    [
        ({"response_format": {"type": "json_object"}}, grammar.json_object),
        ({"response_format": named(SCHEMA)}, lambda: grammar.json_schema(json.dumps(SCHEMA))),
        ({"extra_body": {"guided_json": SCHEMA}}, lambda: grammar.json_schema(json.dumps(SCHEMA))),
        (
            {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
            lambda: grammar.json_schema(json.dumps(SCHEMA)),
        ),
        ({"extra_body": {"guided_regex": "[ab]+"}}, lambda: grammar.regex("[ab]+")),
        ({"extra_body": {"guided_choice": ["a", 'b"c']}}, lambda: grammar.choice(["a", 'b"c'])),
        ({"extra_body": {"guided_grammar": 'start: "a"'}}, lambda: grammar.lark('start: "a"')),
        (
            {"extra_body": {"structured_outputs": {"regex": "[ab]+"}}},
            lambda: grammar.regex("[ab]+"),
        ),
        ({"extra_body": {"guided_json": None, "structured_outputs": None}}, lambda: ""),
    ],
)
def test_the_grammar_of_a_format_reaches_the_engine(api, client, extra, made):
    client.chat.completions.create(model="tiny", messages=ASK, n=1, **extra)
    assert same(sent(api), made())


def same(one: str, other: str) -> bool:
    """Grammars that hold JSON, whatever its blanks are."""
    return one == other or json.loads(one) == json.loads(other)


def test_all_answers_of_a_request_have_its_grammar_and_completions_too(api, client):
    client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, extra_body={"guided_regex": "x+"}
    )
    assert [s.sampling.grammar for s in api.engine.submits] == [grammar.regex("x+")] * 4


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"response_format": named({"not": {}})}, "response_format.json_schema.schema", '["not"]'),
        (
            {"response_format": named({"type": "frob"})},
            "response_format.json_schema.schema",
            "frob",
        ),
        (  # llguidance panics: its message is cut within a character
            {"response_format": named({"type": "object", "required": {"ab": "é" * 99}})},
            "response_format.json_schema.schema",
            "broke off",
        ),
        ({"response_format": named(True)}, "response_format.json_schema.schema", "JSON object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": named({"x": "y" * 70_000})}, None, "limits.schema_bytes"),
        (
            {
                "response_format": {"type": "json_object"},
                "extra_body": {"guided_regex": "a"},
            },
            "guided_regex",
            "contradicts response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
            "ignore_eos",
            "contradicts response_format",
        ),
        ({"extra_body": {"guided_regex": "(?=a)b"}}, "guided_regex", "look-around"),
        ({"extra_body": {"guided_regex": ""}}, "guided_regex", "must not be empty"),
        ({"extra_body": {"guided_regex": "a\0[\u2028"}}, "guided_regex", "regex parse error"),
        ({"extra_body": {"guided_grammar": "\0\x1b"}}, "guided_grammar", "guided_grammar"),
        (
            {
                "response_format": {"type": "json_object"},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "response_format",
            "contradicts tools",
        ),
        ({"extra_body": {"guided_choice": []}}, "guided_choice", "at least one"),
        ({"extra_body": {"guided_grammar": "start: foo"}}, "guided_grammar", "foo"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json", "no JSON schema"),
        (
            {"extra_body": {"guided_json": "[" * 70 + "]" * 70}},
            "guided_json",
            "deeper than 64 levels",
        ),
        (
            {"extra_body": {"structured_outputs": {"structural_tag": "x"}}},
            "structured_outputs.structural_tag",
            "unknown field",
        ),
    ],
)
def test_a_format_that_cannot_be_followed_is_a_400_that_names_what_is_wrong(
    api, client, extra, param, says
):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, **extra)
    assert caught.value.code in ("invalid_value", "unsupported_parameter")
    assert param is None or caught.value.param == param
    assert says in caught.value.message and "\n" not in caught.value.message
    assert not api.engine.submits


def test_without_the_library_the_answer_names_what_to_install(api, client, monkeypatch):
    monkeypatch.setattr(grammar, "available", lambda: False)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"guided_regex": "never seen before"}
        )
    assert caught.value.code == "unsupported_parameter"
    assert "llguidance" in caught.value.message
    assert not api.engine.submits


def test_formats_that_take_too_long_to_compile_are_refused_and_in_nobodys_way(api, client):
    # llguidance is busy with each for minutes, and its memory grows all the while
    for number in (1000003, 1000033):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny",
                messages=ASK,
                response_format=named({"type": "integer", "multipleOf": number}),
            )
        assert caught.value.param == "response_format.json_schema.schema"
        assert "was not compiled within 2 s" in caught.value.message
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, extra_body={"guided_choice": ["after", "them"]}
    )
    assert answer.choices


def test_what_waits_too_long_behind_others_is_asked_to_come_again(api, client, monkeypatch):
    refused = threading.Event()
    monkeypatch.setattr(GrammarChecker, "check", lambda self, text: refused.wait(60))
    monkeypatch.setattr(api.guides, "_wait_seconds", 0.05)
    with pytest.raises(openai.RateLimitError, match="waits behind others") as caught:
        client.with_options(max_retries=0).chat.completions.create(
            model="tiny", messages=ASK, extra_body={"guided_regex": "slow one"}
        )
    refused.set()
    assert caught.value.code == "queue_full" and caught.value.param == "guided_regex"


def test_the_same_schema_is_compiled_once(api, client, monkeypatch):
    compiled = []
    real = GrammarChecker.check
    monkeypatch.setattr(
        GrammarChecker, "check", lambda self, text: (compiled.append(text), real(self, text))
    )
    for _ in range(3):
        client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"guided_choice": ["once", "twice"]}
        )
    assert len(compiled) == 1
