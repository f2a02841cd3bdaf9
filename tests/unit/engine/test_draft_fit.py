"""A model that cannot draft for the served one is refused in one line, before it is loaded."""

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.draft_fit import (
    MOST_SHARE,
    check_reach,
    doubt,
    draft_block_bytes,
    num_weights,
    read_draft,
)
from engine.errors import ConfigError
from engine.fit import check_fit
from engine.memory.budget import MemoryPlan
from engine.models.spec import read_spec
from engine.speculation import _Record

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WORDS = {f"w{n}": n for n in range(60)}


@pytest.fixture
def folder(tmp_path):
    """folder(name, words=..., **config): a model's, without weights."""

    def make(name: str, words=WORDS, added=(), **config) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | config))
        if words is not None:
            added = [{"id": number, "content": word} for word, number in added]
            text = {"model": {"vocab": words}, "added_tokens": added}
            (path / "tokenizer.json").write_text(json.dumps(text))
        return path

    return make


@pytest.fixture
def read(folder):
    """read(words=..., **config): the draft's spec, for a base of CONFIG."""

    def call(base=None, **config):
        base = base or folder("base")
        draft = folder("draft", **{"num_hidden_layers": 1, **config})
        asked = EngineConfig(model=str(base), speculation="draft", draft_model=str(draft))
        return read_draft(asked, read_spec(base))

    return call


def test_a_smaller_model_of_the_same_words_may_draft(read, folder) -> None:
    assert read().num_layers == 1
    assert read_draft(EngineConfig(model="m"), None) is None


def test_padding_and_added_tokens_may_differ(read) -> None:
    assert read(vocab_size=128, hidden_size=16, added=[("<new>", 60)]).vocab_size == 128


@pytest.mark.parametrize(
    "config, why",
    [
        ({"num_hidden_layers": 5}, "it has 50,176 weights and the model that it drafts for 40,960"),
        ({"vocab_size": 56}, "another vocabulary: 56 tokens, and not 60"),
        ({"words": {**WORDS, "w60": 60}}, "another vocabulary: 61 words, and not 60"),
        (
            {"words": {**WORDS, "w4": 5, "w5": 4}},
            "another vocabulary: token 4 is another",
        ),
        (
            {"words": {f"v{n}": n for n in range(60)}},
            "another vocabulary: it has no word 'w0'",
        ),
        ({"words": None, "vocab_size": 48}, "another vocabulary: 48 tokens, and not 64"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
    ],
)
def test_any_other_is_refused(read, config, why) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**config)
    text = caught.value.message
    assert text.startswith("draft_model = '") and why in text and "\n" not in text
    assert caught.value.hint


def test_a_folder_that_holds_no_model_is_named(folder, tmp_path) -> None:
    base = folder("base")
    config = EngineConfig(model=str(base), speculation="draft", draft_model=str(tmp_path / "no"))
    with pytest.raises(ConfigError, match=r"^draft_model = '.*no'"):
        read_draft(config, read_spec(base))


@pytest.mark.parametrize("length, fits", [(512, False), (256, True), (0, False)])
def test_sequences_may_not_outgrow_it(folder, length, fits) -> None:
    base, draft = folder("base"), folder("draft", num_hidden_layers=1, max_position_embeddings=256)
    config = EngineConfig(
        model=str(base),
        speculation="draft",
        draft_model=str(draft),
        max_model_len=length,
        device="cpu",
    )
    if fits:
        check_fit(config, read_spec(base))
        return
    with pytest.raises(ConfigError, match="it reaches 256 tokens, and sequences may have 512"):
        check_fit(config, read_spec(base))


def test_its_share_of_a_block_is_its_own_kv(folder) -> None:
    base, draft = (read_spec(folder(name, num_hidden_layers=n)) for name, n in (("b", 4), ("d", 1)))
    config = EngineConfig(model="m", dtype="bfloat16")
    share = draft_block_bytes(config, draft)
    assert share == 16 * 2 * 2 * 8 * 2 and draft_block_bytes(config, None) == 0
    plain = base.block_layout(block_size=16, dtype="bfloat16")
    beside = base.block_layout(block_size=16, dtype="bfloat16", draft_bytes=share)
    assert plain.block_bytes == 4 * share and beside.block_bytes == 5 * share
    assert plain.id != beside.id, "adapters are packed anew"
    check_reach(config, None)
    assert num_weights(base) == 4 * num_weights(draft) - 3 * 2 * 64 * 32


def test_the_memory_plan_says_what_drafting_takes() -> None:
    sizes = {"device": "card", "total": 1 << 30, "weights": 1 << 28, "num_blocks": 100}
    sizes |= {"block_bytes": 5 << 20, "block_size": 16, "adapter_blocks": 4}
    plain = MemoryPlan(**sizes)
    plan = MemoryPlan(**sizes, draft_weights=1 << 26, draft_block_bytes=1 << 20)
    assert (
        "  draft      64.0 MiB  the model that drafts, with 1.0 MiB of each block" in plan.table()
    )
    assert "draft" not in plain.table()
    assert plan.reserve == plain.reserve - (1 << 26)


def test_a_file_in_place_of_a_folder_is_told_as_such(folder):
    base = folder("base")
    file = folder("draft") / "config.json"
    config = EngineConfig(model=str(base), speculation="draft", draft_model=str(file))
    with pytest.raises(ConfigError) as refused:
        read_draft(config, read_spec(base))
    assert refused.value.message == f"draft_model = {str(file)!r}: {file} is not a folder"
    assert refused.value.hint == "give the folder of a Hugging Face model"


def test_one_that_is_too_large_to_pay_is_doubted_with_both_sizes(folder) -> None:
    spec = read_spec(folder("base", num_hidden_layers=8))
    small = read_spec(folder("small", num_hidden_layers=1))
    large = read_spec(folder("large", num_hidden_layers=6))
    assert doubt(small, spec) == ""
    share = num_weights(large) / num_weights(spec)
    assert share > MOST_SHARE
    assert doubt(large, spec).startswith("0.1 M weights, 76% of the 0.1 M that it drafts for: ")


def test_the_share_above_which_it_does_not_pay_is_where_none_is_asked_for_at_first() -> None:
    fresh = _Record()
    assert fresh.length(8, MOST_SHARE) > 0
    assert fresh.length(8, MOST_SHARE + 0.02) == 0
