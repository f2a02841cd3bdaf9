"""SmolLM2-135M and the demo's adapters as an embedder and a reranker, against transformers and
PEFT."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = ("What is a computer?", "a", "Tell me about love. " * 12, "My printer does not work.")


def test_vectors_and_scores_of_base_and_adapters_in_one_batch(
    smollm2_folder: Path,
    demo_adapters: dict[str, Path],
    engines: Callable[..., Any],
    tmp_path: Path,
) -> None:
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    batch = [tokenizer(text).input_ids for text in TEXTS]
    words = tuple(tokenizer(word).input_ids[0] for word in ("yes", "no"))
    room = {"adapter_pool": 128 << 20, "ram_cache": 128 << 20}
    engine = engines(smollm2_folder, score_tokens=words, max_length=512, **room)
    names = ["bible", None, "devil", "bofh"]
    revs = {n: engine.add_folder(demo_adapters[n], tmp_path) for n in names if n is not None}
    owners = [revs.get(name or "") for name in names]
    vectors, scores = engine.embed(batch, owners), engine.classify(batch, owners)

    base = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers for deprecated attributes
        model = peft.PeftModel.from_pretrained(
            base, demo_adapters["bible"], adapter_name="bible"
        ).eval()
        for name in ("devil", "bofh"):
            model.load_adapter(demo_adapters[name], adapter_name=name)
    for name, tokens, vector, score in zip(names, batch, vectors, scores, strict=True):
        told = theirs(model, name, tokens)
        last = told.hidden_states[-1][0, -1].numpy()
        assert np.abs(vector - last).max() < 1e-3 * np.abs(last).max()
        logits = told.logits[0, -1]
        assert abs(score.logits[0] - float(logits[words[0]] - logits[words[1]])) < 1e-3


@torch.no_grad()
def theirs(model: Any, name: str | None, tokens: list[int]) -> Any:
    ids = torch.tensor([tokens])
    if name is None:
        with model.disable_adapter():
            return model(input_ids=ids, output_hidden_states=True)
    model.set_adapter(name)
    return model(input_ids=ids, output_hidden_states=True)
