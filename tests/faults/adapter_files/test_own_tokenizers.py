"""Thousands of tokenizer files that somebody changed: each works or is refused, in one line."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lorad.text.own_tokenizer import OwnTokenizers
from lorad.text.tokenizer import TextError, Tokenizer
from tests.unit.text.test_own_tokenizer import make

ODD: list[Any] = [
    *("\ud800", "a\udfffb"),  # halves of characters
    *(None, True, -1, 1 << 31, 1 << 63, 1.5, "", "x", "<|new|>", "\x00", [], {}, [[]], {"a": 1}),
    *("BPE", "WordPiece", "Unigram", "Metaspace", "Sequence", "Split", "Replace", "Prepend"),
    *("Precompiled", "TemplateProcessing", "RobertaProcessing", "ByteFallback", "Strip"),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of a few of everything that is in it."""
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())[:12]
    elif isinstance(value, list):
        items = list(enumerate(value))[:6]
    return [at, *(place for key, inside in items for place in places(inside, (*at, key)))]


def changed(content: Any, draw: random.Random) -> Any:
    content = copy.deepcopy(content)
    for _ in range(draw.randint(1, 3)):
        found = [place for place in places(content) if place]
        if not found:
            break
        *path, key = draw.choice(found)
        inside = content
        for step in path:
            inside = inside[step]
        if draw.random() < 0.8:
            inside[key] = copy.deepcopy(draw.choice(ODD))
        else:
            inside.pop(key)
    return content


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_changed_it_works_or_is_refused(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    base = make(tmp_path / "base", split=r"\d")
    folder = make(tmp_path / "a", "<tool>", "<|new|>", split=r"\d", before="<|new|>")
    config = {"eos_token": "<|end|>", "bos_token": {"content": "<|new|>"}, "add_eos_token": True}
    config |= {"added_tokens_decoder": {"263": {"content": "<q>"}, "262": {"content": "<p>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|end|>"}))
    tokenizer, refused = Tokenizer.load(base), 0
    whole = {file: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    for _ in range(200):
        one = draw.choice(sorted(whole))
        for file, content in whole.items():
            file.write_text(json.dumps(changed(content, draw) if file == one else content))
        try:
            own, _ = OwnTokenizers(tokenizer, base).read(folder)
        except TextError as error:
            refused += 1
            assert "\n" not in str(error)
            continue
        for text in ("", "hello <tool> 12 <|new|> über", "\u2581 a"):
            ids = own.encode(text, add_special=True)
            assert all(0 <= token < own.vocab_size for token in ids)
            own.decode(ids)
            assert len(own.spell(ids)) == len([own.token_bytes(token) for token in ids])
    assert 50 < refused < 150, "and the others work"
