"""Adapters that PEFT has made on resized bases, in an engine, and what PEFT says of the same.

Goes in: a kind of base, a device, a dtype.  Comes out: a `Zoo`, whose requests hold and draw ids
behind the base's.  Whatever is drawn is held against PEFT in fp32, on the base that was resized.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.messages import SamplingParams

EXTRA = 64
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: transformers' class -> what it has besides: rows that are folded, and logits that are capped.
BASES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True, "vocab_size": 2001},
    "Gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 4.0},
}
QKV, BOTH = ["q_proj", "k_proj", "v_proj"], ["embed_tokens", "lm_head"]
#: Name -> tokens more than the base has, and LoraConfig's fields.
ADAPTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "resized alone": (3, {"target_modules": QKV}),
    "saved ends": (7, {"target_modules": ["o_proj", "up_proj"], "modules_to_save": BOTH}),
    "factors": (20, {"target_modules": [*QKV, *BOTH]}),
    "trained tokens": (3, {"target_modules": QKV, "trainable_token_indices": [5, -2, -1]}),
    "all there is room for": (EXTRA, {"target_modules": ["down_proj"], "modules_to_save": BOTH}),
    "shrunk": (-20, {"target_modules": QKV}),
    "plain": (0, {"target_modules": QKV}),
}


@dataclass
class Zoo:
    """Adapters by name, "" = the base."""

    engine: Engine
    revs: dict[str, str | None]
    limits: dict[str, int]
    models: dict[str, Any]

    def prompt(self, name: str, length: int, seed: int) -> list[int]:
        """The ids of an adapter's own are every third of it."""
        draw, limit = torch.Generator().manual_seed(seed), self.limits[name]
        ids = torch.randint(3, limit, (length,), generator=draw)
        size = self.limits[""]
        if limit > size:
            own = torch.randint(size, limit, (length,), generator=draw)
            ids[::3] = own[::3]
        return ids.tolist()

    def ask(
        self, work: Sequence[tuple[str, list[int]]], tokens: int = 8, **more: Any
    ) -> list[Generation]:
        """All of (adapter, prompt) in one batch."""
        wish = {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True, **more}
        sampling = SamplingParams(max_tokens=tokens, **wish)
        revs = [self.revs[name] for name, _ in work]
        return self.engine.generate([prompt for _, prompt in work], sampling, revs)

    def apart(self, name: str, prompt: list[int], got: Generation) -> float:
        """The worst of what it tells, as a share of how far apart log-probabilities lie."""
        assert got.finish_reason == "length", got
        told = [one.logprob for one in (*got.prompt_logprobs[1:], *got.logprobs) if one]
        right = self.right(name, [*prompt, *got.tokens])
        return float((torch.tensor(told) - right).abs().max() / right.std())

    def regret(self, name: str, prompt: list[int], got: Generation) -> float:
        """How far its greedy tokens are from PEFT's likeliest, at the worst."""
        rows = self._rows(name, [*prompt, *got.tokens])[len(prompt) - 1 : -1]
        own = rows.gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
        return float((rows.amax(1) - own).max())

    def right(self, name: str, tokens: list[int]) -> Tensor:
        """Log-probability of each token but the first, of the ids that may be drawn."""
        return self._rows(name, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def _rows(self, name: str, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.models[name](input_ids=torch.tensor([tokens])).logits[0]
        return logits[:, : self.limits[name]].log_softmax(-1)


@contextmanager
def zoo_of(
    kind: str,
    root: Path,
    *,
    names: Sequence[str] = tuple(ADAPTERS),
    vocab_size: int = 0,
    **settings: Any,
) -> Iterator[Zoo]:
    """Adapters of ADAPTERS on a base of this kind, of `vocab_size` if that is not 0; `settings` are
    EngineConfig's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT on configs without a Hub name, and on tied ends
        size = vocab_size or (SIZES | BASES[kind])["vocab_size"]
        _make_base(kind, root / "base", size)
        models: dict[str, Any] = {"": _load(kind, root / "base")}
        limits = {"": size}
        for seed, name in enumerate(names):
            more, fields = ADAPTERS[name]
            models[name] = _make_adapter(
                kind, root / "base", size + more, fields, root / name, seed
            )
            limits[name] = size + more
    usual: dict[str, Any] = {
        "num_blocks": 600,
        "max_num_seqs": 16,
        "max_batch_tokens": 512,
        "max_rank": 16,
        "slots": 16,
        "ram_cache": 8 << 20,
        "extra_vocab": EXTRA,
    }
    with Engine(EngineConfig(model=str(root / "base"), **usual | settings)) as engine:
        store = root / "packed"
        store.mkdir()
        revs: dict[str, str | None] = {"": None}
        revs |= {name: engine.add_folder(root / name, store) for name in names}
        yield Zoo(engine, revs, limits, models)


def _make_base(kind: str, folder: Path, size: int) -> None:
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**SIZES | BASES[kind] | {"vocab_size": size})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.5)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def _load(kind: str, folder: Path) -> Any:
    import transformers

    # Others than eager leave Gemma2's cap on scores out, in some versions.
    load = getattr(transformers, f"{kind}ForCausalLM").from_pretrained
    return load(folder, attn_implementation="eager", dtype=torch.float32).eval()


def _make_adapter(
    kind: str, base: Path, size: int, fields: dict[str, Any], folder: Path, seed: int
) -> Any:
    """Saved, and as PEFT loads it into a base that was resized."""
    import peft

    model = _load(kind, base)
    if size != model.config.vocab_size:
        torch.manual_seed(seed)
        model.resize_token_embeddings(size, mean_resizing=False)
    if ids := fields.get("trainable_token_indices"):
        fields = fields | {"trainable_token_indices": [i if i >= 0 else size + i for i in ids]}
    options = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6} | fields
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, 0, 0.2)
            elif parameter.requires_grad:
                parameter += torch.randn_like(parameter) * parameter.std().clamp(min=0.05)
    tuned.save_pretrained(folder)
    fresh = _load(kind, base)
    if size != fresh.config.vocab_size:
        torch.manual_seed(seed + 100)
        fresh.resize_token_embeddings(size, mean_resizing=False)
    return peft.PeftModel.from_pretrained(fresh, folder).eval()
