"""What a model that generates and pools reads the inputs of an adapter by."""

import json
from types import SimpleNamespace

import pytest

from lorad.errors import LoradError
from lorad.service import pooling_facts
from lorad.service.pooling_facts import PoolingFacts
from lorad.service.text import TextService
from lorad.text.pooling import Fit
from tests.unit.service.test_own_text import END, own, write

SPEC = SimpleNamespace(late=None, prompts={}, default_prompt=None, lower_case=False)
FIT = Fit(64)


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """`known[rev]` is what the registry knows; scores are told by the base's first two ids."""
    specials = {"eos_token": "<|end|>", "add_eos_token": True}
    base = write(tmp_path / "base", config=specials)
    monkeypatch.setattr(pooling_facts, "read_pooling", lambda folder: SPEC)
    known = {}
    texts = TextService(base, lambda rev: tmp_path / rev, known.get)
    info = SimpleNamespace(pooling=SimpleNamespace(score_tokens=(0, 1)))
    made = PoolingFacts(
        base,
        texts.base.tokenizer,
        lambda: info,
        lambda rev: None,
        tasks=("generate", "embed"),
        num_types=0,
        truncate=False,
        texts=texts,
    )()
    return SimpleNamespace(known=known, text=made.text, text_of=made.text_of)


def test_an_adapters_own_tokenizer_reads_its_inputs_and_the_bases_all_others(facts, tmp_path):
    write(tmp_path / "r1", "<tool>")
    write(tmp_path / "r2", "<tool>")
    facts.known |= {"r1": own(259), "r2": own(0, False)}
    assert facts.text_of("r2") is facts.text
    found = facts.text_of("r1")
    assert found.one("<tool>", FIT).tokens == [258, END], "with the end mark that the base adds"
    assert len(facts.text.one("<tool>", FIT).tokens) == 7
    (tmp_path / "r3").mkdir()
    no_end = json.dumps({"add_eos_token": False})
    write(tmp_path / "r3", "<tool>")
    (tmp_path / "r3" / "tokenizer_config.json").write_text(no_end)
    facts.known["r3"] = own(259)
    assert facts.text_of("r3").one("<tool>", FIT).tokens == [258]


def test_scores_that_are_told_by_words_are_refused_where_these_are_others(facts, tmp_path):
    path = write(tmp_path / "r1", "<tool>") / "tokenizer.json"
    file = json.loads(path.read_text())
    words = sorted(file["model"]["vocab"], key=file["model"]["vocab"].get)
    file["model"]["vocab"] |= {words[0]: 1, words[1]: 0}
    path.write_text(json.dumps(file))
    facts.known["r1"] = own(259)
    with pytest.raises(LoradError, match="scores are told by") as caught:
        facts.text_of("r1")
    assert caught.value.hint.startswith("ask the base model")
