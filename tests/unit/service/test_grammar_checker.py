"""The process that checks grammars: what it refuses, what ends it, and who comes after."""

import json
import os
import signal

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytest.importorskip("llguidance")

from engine import grammar
from engine.errors import EngineError, GrammarInvalid
from lorad.service.grammar_checker import GrammarChecker, TooMuchWork

#: Its remainders are a million states, each of which the library looks at before it begins.
ENDLESS = grammar.json_schema('{"type": "integer", "multipleOf": 1000003}')


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return path


@pytest.fixture
def checker(path):
    made = GrammarChecker(path, 257, [256])
    yield made
    made.close()


def test_what_can_be_followed_passes_and_what_cannot_is_named(checker):
    checker.check(grammar.json_object())
    with pytest.raises(GrammarInvalid, match="not"):
        checker.check(grammar.json_schema(json.dumps({"not": {}})))
    checker.check(grammar.choice(["after", "it"]))


def test_work_without_end_is_ended_and_the_process_serves_on(checker):
    checker.check(grammar.json_object())
    process = checker._free[0]
    with pytest.raises(TooMuchWork, match="within 2 s"):
        checker.check(ENDLESS)
    checker.check(grammar.json_object())
    assert checker._free == [process] and process.poll() is None


def test_a_process_that_was_killed_is_replaced(checker):
    checker.check(grammar.json_object())
    gone = checker._free[0]
    os.kill(gone.pid, signal.SIGKILL)
    gone.wait()
    checker.check(grammar.json_object())
    assert checker._free[0] is not gone


def test_a_tokenizer_that_cannot_be_used_is_a_refusal(tmp_path):
    checker = GrammarChecker(tmp_path / "tokenizer.json", 257, [256])
    with pytest.raises(GrammarInvalid, match="cannot be guided") as refused:
        checker.check(grammar.json_object())
    assert str(tmp_path) not in str(refused.value)
    checker.close()


def test_nothing_is_left_when_it_is_closed(checker):
    checker.check(grammar.json_object())
    process = checker._free[0]
    checker.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(EngineError, match="stopping"):
        checker.check(grammar.json_object())
