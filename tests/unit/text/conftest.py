"""Small vocabularies of each kind, trained on nothing, and the converted SmolLM2."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lorad.demo_model import model_path
from lorad.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|im_end|>"]


def _byte_level() -> tokenizers.Tokenizer:
    """All 256 bytes, and merges that split characters in the middle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("ä", "½"), ("ð", "Ł"), ("h", "e")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIALS)
    inner.add_tokens(["<tool> x"])  # not special, with a character outside the alphabet
    return inner


def _space_mark() -> tokenizers.Tokenizer:
    """Sentencepiece's spelling: few characters, everything else as bytes."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for text in ["▁", *"abcdeht.", "▁h", "▁the", "é"]:
        vocab[text] = len(vocab)
    merges = [("▁", "h")]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(SPECIALS)
    return inner


def _other() -> tokenizers.Tokenizer:
    """A decoder that only the library knows: words with a suffix mark."""
    words = ["un", "##believ", "##able", "word", ",", "é", "你", "🙂", "##s", "[UNK]"]
    inner = tokenizers.Tokenizer(
        models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    inner.add_special_tokens(SPECIALS)
    return inner


KINDS = {"byte-level": _byte_level, "space-mark": _space_mark, "other": _other}


@pytest.fixture(scope="session", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One of each kind, in turn."""
    return Tokenizer(KINDS[request.param](), specials={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(_byte_level(), specials={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def space_mark() -> Tokenizer:
    return Tokenizer(_space_mark(), specials={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def other() -> Tokenizer:
    return Tokenizer(_other(), specials={})


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a model folder: tokenizer.json, and JSON files by name (without .json)."""

    def make(**files: object) -> Path:
        _byte_level().save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.fixture(scope="session")
def smollm() -> Path:
    return model_path()
