"""The demo's reranker on the published MiniLM: scores as PEFT has them, and what it is worth."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine
from lorad import demo_minilm

#: PEFT asks transformers in a way that is going.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

RAG = Path(__file__).parents[3] / "demo" / "rag"
ROWS = [json.loads(line) for line in (RAG / "book.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_minilm.ensure()


@pytest.fixture(scope="module")
def pairs(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids and types of questions beside passages, right ones and others."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    asked = [(row["questions"][-1], row["text"]) for row in ROWS[:24]]
    asked += [(q, text) for (q, _), (_, text) in zip(asked, asked[5:], strict=False)]
    return [(e.ids, e.type_ids) for e in tokenizer.encode_batch(asked)]


def test_scores_are_pefts(folder: Path, pairs: list, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import BertForSequenceClassification

    config = PoolingConfig(model=str(folder), device="cpu", adapter_pool=4 << 20)
    with PoolingEngine(config) as engine:
        rev = engine.add_folder(RAG / "entries", tmp_path)
        ids, types = zip(*pairs, strict=True)
        results = engine.pool("classify", ids, [rev] * len(ids), types)
    got = np.array([result.logits[0] for result in results])
    base = BertForSequenceClassification.from_pretrained(folder, num_labels=1)
    model = PeftModel.from_pretrained(base, RAG / "entries").eval()
    with torch.no_grad():
        theirs = np.array(
            [
                model(
                    input_ids=torch.tensor([tokens]), token_type_ids=torch.tensor([kinds])
                ).logits.item()
                for tokens, kinds in pairs
            ]
        )
    assert np.abs(got - theirs).max() < 1e-4
    assert got[:24].mean() > got[24:].mean() + 1.0, "questions fit their own passages better"
