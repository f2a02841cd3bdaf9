"""Guided answers that hold the text of a special token: it is spelled, and ends nothing."""

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine import grammar
from engine.grammar import Grammars

pytest.importorskip("llguidance")

END, TOOL = 257, 260
MORE = ["<\uff5cx\u2581y\uff5c>", "<a\nb>", "<\U0001f600>"]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Bytes, and `</s>`, `<think>`, `|done|`, `<tool>`; the first and the third are special."""
    texts = {"<s>": True, "</s>": True, "<think>": False, "|done|": True, "<tool>": False}
    return of(tmp_path_factory.mktemp("tokenizer"), texts)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return of(
        tmp_path_factory.mktemp("more"), {"<s>": True, "</s>": True} | dict.fromkeys(MORE, False)
    )


def of(folder: Path, texts: dict[str, bool]) -> Grammars:
    """Bytes, and texts that are special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, special=special) for text, special in texts.items()])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return Grammars(path, 270, [END])


def written(grammars: Grammars, made: str) -> list[int]:
    """What is drawn if the lowest id that may be is; the end token left out."""
    matcher, ids = grammars.matcher(made), list[int]()
    for _ in itertools.count():
        mask = matcher.mask()
        token = next(i for i in range(270) if mask[i // 32] >> i % 32 & 1)
        if token == END:
            return ids
        ids.append(token)
        matcher.take([token])
    raise AssertionError


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def spelled(ids: list[int]) -> str:
    return "".join(ALPHABET[i] for i in ids)


@pytest.mark.parametrize("mark", ["<s>", "</s>", "<think>", "|done|", "<tool>", "plain"])
def test_a_text_that_is_a_tokens_is_spelled(grammars: Grammars, mark: str) -> None:
    pattern = mark.replace("|", r"\|")
    assert spelled(written(grammars, grammar.choice([f"a{mark}b"]))) == f"a{mark}b"
    assert spelled(written(grammars, grammar.regex(f"{pattern}[x]{{2}}"))) == f"{mark}xx"
    schema = f'{{"type": "object", "properties": {{"{mark}": {{"const": "{mark}"}}}}, ' + (
        f'"required": ["{mark}"], "additionalProperties": false}}'
    )
    document = spelled(written(grammars, grammar.json_schema(schema)))
    assert "".join(document.split("Ġ")) == f'{{"{mark}":"{mark}"}}'


@pytest.mark.parametrize("mark", MORE)
def test_so_is_one_that_json_has_to_escape(more: Grammars, mark: str) -> None:
    """DeepSeek's have wide bars."""
    schema = {"type": "object", "properties": {"a": {"const": mark}}, "required": ["a"]}
    schema["additionalProperties"] = False
    decode = decoders.ByteLevel().decode
    for made, text in (
        (grammar.choice([f"a{mark}b"]), f"a{mark}b"),
        (grammar.regex(f"{mark}x"), f"{mark}x"),
        (grammar.lark(f"start: {json.dumps(mark)}"), mark),
        (grammar.json_schema(json.dumps(schema)), json.dumps({"a": mark}, ensure_ascii=False)),
    ):
        found = decode([ALPHABET[i] for i in written(more, made)])
        assert found.replace('": "', '":"') == text.replace('": "', '":"')


def test_a_token_that_is_named_as_one_is_one(grammars: Grammars) -> None:
    ids = written(grammars, grammar.lark('start: <tool> "ok"'))
    assert ids[0] == TOOL and spelled(ids[1:]) == "ok"


def test_a_grammar_with_settings_of_its_own_keeps_them(grammars: Grammars) -> None:
    made = grammar.lark('%llguidance {"no_forcing": true}\nstart: "<tool>"')
    assert spelled(written(grammars, made)) == "<tool>"
