"""Random decoders of each kind that pools, made and saved by transformers' own classes."""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported anywhere below

import pytest
import torch

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

#: head_dim is not hidden / heads, three heads share a KV head, sizes are no powers of two.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PADDING = 3
GEMMA: dict[str, Any] = {
    "sliding_window": 9,
    "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.5,
}
#: Name of the case -> what transformers' classes begin with, and the config's own fields.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "pad_token_id": PADDING}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "pad_token_id": PADDING}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "gemma2": ("Gemma2", GEMMA),
    "phi3": ("Phi3", {"hidden_size": 96}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1], "pad_token_id": PADDING}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
#: One token; two of one length; a block, and more than a window.
LENGTHS = (1, 7, 40, 7, 16, 33)
SMALL = {"adapter_pool": 4 << 20, "ram_cache": 4 << 20, "device": "cpu"}


def build(case: str, ending: str, **more: Any) -> Any:
    """transformers' model with weights that leave no bias and no norm at its neutral value."""
    import transformers

    family, options = CASES[case]
    text = "Text" if family == "Gemma3" else ""  # a part of a larger model, by its name
    config = getattr(transformers, f"{family}{text}Config")(**SIZES | options | more)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    whole = "" if ending == "ForCausalLM" else text
    model = getattr(transformers, f"{family}{whole}{ending}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and not family.startswith("Gemma") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    return model


@dataclass
class Case:
    name: str
    folder: Path
    model: Any  # transformers' own
    vocab: int = 97

    @property
    def batch(self) -> list[list[int]]:
        """Random token ids, none of them a special one."""
        torch.manual_seed(3)
        return [torch.randint(4, self.vocab, (length,)).tolist() for length in LENGTHS]

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Any:
        """transformers' hidden states of one sequence, (tokens, hidden)."""
        states = self.model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state
        return states[0].numpy()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Any:
        """Of a classifier (labels,), of one that generates (tokens, vocab)."""
        return self.model(input_ids=torch.tensor([tokens])).logits[0].numpy()


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """`make(case, ending)`: transformers' class of that ending, saved."""
    made: dict[tuple[str, str, str], Case] = {}

    def case(name: str, ending: str = "ForCausalLM", **more: Any) -> Case:
        key = name, ending, str(more)
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            model = build(name, ending, **more)
            model.save_pretrained(folder)
            made[key] = Case(name, folder, model)
        return made[key]

    return case


#: Of other kinds than those that most vectors are made with.
RARE = ("gemma3", "mistral", "phi3", "smollm3")


@pytest.fixture(
    params=[pytest.param(n, marks=[pytest.mark.slow] * (n in RARE)) for n in sorted(CASES)]
)
def case(request: pytest.FixtureRequest, make: Callable[..., Case]) -> Case:
    return make(request.param)


@pytest.fixture
def engines() -> Iterator[Callable[..., PoolingEngine]]:
    made: list[PoolingEngine] = []

    def make_one(folder: Path, **options: Any) -> PoolingEngine:
        made.append(PoolingEngine(PoolingConfig(model=str(folder), **SMALL | options)))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()


@dataclass
class Trained:
    folder: Path
    model: Any  # PEFT's

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Any:
        return self.model(input_ids=torch.tensor([tokens])).logits[0].numpy()

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> Any:
        decoder = self.model.get_base_model().base_model
        return decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0].numpy()


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """`train(base, seed, task, ...)`: a PEFT adapter with every weight moved."""

    def trained(base: Case, seed: int, task: str = "SEQ_CLS", **options: Any) -> Trained:
        import peft
        import transformers

        folder, labels = tmp_path_factory.mktemp(f"adapter-{seed}"), options.pop("labels", 2)
        kind, more = type(base.model), dict[str, Any]()
        if task == "SEQ_CLS":
            named = kind.__name__.replace("ForCausalLM", "ForSequenceClassification")
            kind, more = getattr(transformers, named), {"num_labels": labels}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            model = kind.from_pretrained(base.folder, ignore_mismatched_sizes=True, **more)
            model.config._attn_implementation = "eager"
            told = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear"} | options
            adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=task, **told))
            torch.manual_seed(seed)
            with torch.no_grad():
                for key, parameter in adapted.named_parameters():
                    if parameter.requires_grad and "magnitude" not in key:
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    elif parameter.requires_grad:
                        parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            adapted.save_pretrained(folder)
        return Trained(folder, adapted.eval())

    return trained
