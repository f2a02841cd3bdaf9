"""Random models of each encoder family, made and saved by transformers' own classes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported anywhere below

import pytest
import torch
from torch import Tensor

from engine.kernels.ragged_attention import Ragged
from engine.models.encoder import Encoder, load_encoder

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
#: Name of the case -> what transformers' classes begin with, and the config's own fields.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert-of-another-activation": ("Bert", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "roberta": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 3}),
    "modernbert": ("ModernBert", ENDS | {"local_attention": 10, "sep_token_id": 2}),
    "modernbert-biased": (
        "ModernBert",
        ENDS
        | {
            "local_attention": 7,
            "sep_token_id": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "nomic": ("NomicBert", {}),
}
#: One token; two of one length; longer than a strip of attention and a window beside it.
LENGTHS = (1, 7, 290, 7, 33, 12)


def build(case: str, ending: str, **more: Any) -> Any:
    """transformers' model with weights that leave no bias and no norm at its neutral value."""
    import transformers

    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(**SIZES | options | more)
    model = getattr(transformers, f"{family}{ending}")(config).eval()
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.15 * torch.randn_like(parameter))
    return model


def sequences(lengths: tuple[int, ...], lowest: int = 4) -> list[list[int]]:
    """Random token ids, none of them a special one."""
    torch.manual_seed(3)
    return [torch.randint(lowest, 97, (length,)).tolist() for length in lengths]


@dataclass
class Case:
    name: str
    folder: Path
    model: Any  # transformers' own

    def load(self, *, deterministic: bool = False) -> Encoder:
        return load_encoder(
            self.folder, device="cpu", dtype=torch.float32, deterministic=deterministic
        )

    @property
    def batch(self) -> list[list[int]]:
        return sequences(LENGTHS)

    @staticmethod
    def run(
        encoder: Encoder, batch: list[list[int]], types: list[list[int]] | None = None
    ) -> list[Tensor]:
        """Hidden states of each sequence of a packed batch."""
        lengths = tuple(map(len, batch))
        flat = torch.tensor([token for tokens in batch for token in tokens])
        positions = [p for tokens in batch for p in encoder.spec.position_ids(tokens)]
        kinds = None if types is None else torch.tensor([kind for one in types for kind in one])
        hidden = encoder(flat, torch.tensor(positions), kinds, Ragged(lengths))
        return list(hidden.split(lengths))

    @torch.no_grad()
    def theirs(self, tokens: list[int], types: list[int] | None = None) -> Tensor:
        """transformers' hidden states of one sequence."""
        more = {} if types is None else {"token_type_ids": torch.tensor([types])}
        hidden: Tensor = self.model(input_ids=torch.tensor([tokens]), **more).last_hidden_state
        return hidden[0]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """`make(case, ending)`: transformers' class of that ending, saved."""
    made: dict[tuple[str, str, str], Case] = {}

    def case(name: str, ending: str = "Model", **more: Any) -> Case:
        key = name, ending, str(more)
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            model = build(name, ending, **more)
            model.save_pretrained(folder)
            made[key] = Case(name, folder, model)
        return made[key]

    return case


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, make: Callable[..., Case]) -> Case:
    return make(request.param)
