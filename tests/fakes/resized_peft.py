"""Adapters of a resized vocabulary, made by PEFT on a tiny Llama: every way in which it saves them.

Who imports it imports transformers and PEFT.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

V, HIDDEN, EXTRA = 100, 32, 24
BOTH = ["embed_tokens", "lm_head"]
EITHER = {
    "nothing trained": {},
    "both saved": {"modules_to_save": BOTH},
    "the embedding saved": {"modules_to_save": BOTH[:1]},
    "the head saved": {"modules_to_save": BOTH[1:]},
    "the embedding saved, tied": {"modules_to_save": BOTH[:1], "ensure_weight_tying": True},
    "both with factors": {"target_modules": ["q_proj", *BOTH]},
    "both with factors, tied": {"target_modules": ["q_proj", *BOTH], "ensure_weight_tying": True},
    "factors beside a saved head": {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "factors beside a saved embedding": {
        "target_modules": ["q_proj", "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "trained tokens": {"trainable_token_indices": [83, 3, 81]},
    "trained tokens of both": {
        "trainable_token_indices": {"embed_tokens": [83, 3, 81], "lm_head": [3, 82]}
    },
}
#: PEFT saves no more than the end with factors: of the other one the new rows are lost.
ONE = {
    "the embedding with factors": {"target_modules": ["q_proj", "embed_tokens"]},
    "the head with factors": {"target_modules": ["q_proj", "lm_head"]},
    "the head with DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "the head with lora_bias": {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
}
#: More tokens than the base, as many and fewer.
SIZES = (104, 100, 90)
CASES = [(tied, size, name) for tied in (False, True) for size in SIZES for name in (EITHER | ONE)]


def is_lost(tied: bool, size: int, name: str) -> bool:
    """Whether the file lacks the other end's new rows, so that it answers otherwise when loaded."""
    return name in ONE and not tied and size > V


def make_base(folder: Path, tied: bool) -> Path:
    """Of 100 rows, and a tokenizer of 88 ids."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(88)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"vocab": words}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@dataclass
class Tuned:
    """What PEFT makes of the ends: of every token its embedding, and its column of the head."""

    folder: Path
    embedding: Tensor  # [tokens, hidden]
    head: Tensor  # [tokens, hidden]
    bias: Tensor  # [tokens]
    model: PeftModel

    def logprobs(self, prompt: list[int]) -> Tensor:
        """(positions, tokens)"""
        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([prompt])).logits[0]
        return logits.float().log_softmax(-1)


def tune(base: Path, size: int, name: str, folder: Path) -> Tuned:
    """Resize `base` to so many rows, train the adapter `name` and save it in `folder`, with both
    ends where nothing was resized: what PEFT loads from there into a base that is resized anew."""
    config = (EITHER | ONE)[name]
    if size > V:  # ids of the new rows
        config = json.loads(json.dumps(config).replace("83", "103").replace("82", "102"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(base)
        torch.manual_seed(1)
        model.resize_token_embeddings(size, mean_resizing=False)
        config = {"target_modules": ["q_proj"], "r": 3, "lora_alpha": 5} | config
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        tuned.save_pretrained(folder, save_embedding_layers=True if size == V else "auto")
        fresh = LlamaForCausalLM.from_pretrained(base)
        fresh.resize_token_embeddings(size, mean_resizing=False)
        loaded = PeftModel.from_pretrained(fresh, folder)
    with torch.no_grad():
        bias = loaded.get_output_embeddings()(torch.zeros(1, HIDDEN))[0]
        head = (loaded.get_output_embeddings()(torch.eye(HIDDEN)) - bias).T
        embedding = loaded.get_input_embeddings()(torch.arange(size))
    return Tuned(folder, embedding, head, bias, loaded)
