"""A tiny BERT with random weights, adapters for it, and a way to drive a pooling core."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.adapters.pack import pack_into
from engine.messages import PackedManifest
from engine.pooling.config import PoolingConfig
from engine.pooling.core import PoolingCore
from engine.pooling.requests import PoolRequest, PoolResult

HIDDEN, FFN, LAYERS = 32, 64, 2
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 50,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "dtype": "float32",
    "id2label": {"0": "no", "1": "yes"},
}
DEADLINE = 60.0  # seconds: what no test ever needs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights."""
    from engine.models.encoder import Encoder
    from engine.models.encoder_spec import read_encoder_spec
    from engine.models.layers import Build

    folder = tmp_path_factory.mktemp("tiny-bert")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = read_encoder_spec(folder)
    torch.manual_seed(3)
    shapes = {
        "pooler.dense.weight": (HIDDEN, HIDDEN),
        "pooler.dense.bias": (HIDDEN,),
        "classifier.weight": (2, HIDDEN),
        "classifier.bias": (2,),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    for name, place in (
        Encoder(spec, Build(torch.device("cpu"), torch.float32, False)).places(frozenset()).items()
    ):
        tensors[published(name)] = 0.3 * torch.randn(place.shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def published(name: str) -> str:
    """BERT's name of one of ours."""
    for ours, theirs in (
        ("embeddings.word", "embeddings.word_embeddings"),
        ("embeddings.position", "embeddings.position_embeddings"),
        ("embeddings.type", "embeddings.token_type_embeddings"),
        ("embeddings.norm", "embeddings.LayerNorm"),
        ("layers.", "encoder.layer."),
        ("q_proj", "attention.self.query"),
        ("k_proj", "attention.self.key"),
        ("v_proj", "attention.self.value"),
        ("o_proj", "attention.output.dense"),
        ("attention_norm", "attention.output.LayerNorm"),
        ("up_proj", "intermediate.dense"),
        ("down_proj", "output.dense"),
        ("ffn_norm", "output.LayerNorm"),
    ):
        name = name.replace(ours, theirs)
    return name


@pytest.fixture(scope="module")
def pack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], PackedManifest]:
    """`pack(seed)`: an adapter on every query and value."""
    store = tmp_path_factory.mktemp("store")

    def packed(seed: int) -> PackedManifest:
        folder = tmp_path_factory.mktemp(f"adapter{seed}")
        torch.manual_seed(seed)
        tensors = {}
        for layer in range(LAYERS):
            for module in ("query", "value"):
                start = f"base_model.model.bert.encoder.layer.{layer}.attention.self.{module}"
                tensors[f"{start}.lora_A.weight"] = torch.randn(4, HIDDEN)
                tensors[f"{start}.lora_B.weight"] = torch.randn(HIDDEN, 4)
        plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": None}
        (folder / "adapter_config.json").write_text(json.dumps(plain))
        save_file(tensors, folder / "adapter_model.safetensors")
        return pack_into(folder, model, store, block_size=0, dtype="float32", max_rank=64)

    return packed


class Driver:
    """A core, its results and events so far, and a clock that stands still."""

    def __init__(self, model: Path, **options: Any) -> None:
        small = {"adapter_pool": 1 << 20, "ram_cache": 1 << 20, "device": "cpu"}
        self.now, self.tick = 100.0, 0.0  # seconds that `until` lets pass with each step
        told = {"deterministic": True} | small | options
        config = PoolingConfig(model=str(model), **told)
        self.core = PoolingCore(config, clock=lambda: self.now)
        self.results: dict[str, PoolResult] = {}
        self.events: list[tuple[str, str]] = []
        self.answers: dict[int, str] = {}

    def step(self) -> None:
        frame = self.core.step()
        for result in frame.results:
            assert result.request_id not in self.results, "a second result"
            self.results[result.request_id] = result
        self.events += [(event.rev, event.after) for event in frame.adapters]
        self.answers |= {answer.command_id: answer.code for answer in frame.answers}

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < end, "it does not come to an end"
            self.now += self.tick
            self.step()
            if self.core.idle and not done():
                self.core.wait()

    def ask(self, name: str, rev: str | None = None, **more: Any) -> None:
        told = {"tokens": [5, 6, 7, 8]} | more
        self.core.take(PoolRequest(request_id=name, rev=rev, **told))


@pytest.fixture
def drive(model: Path) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def make(folder: Path = model, **options: Any) -> Driver:
        made.append(Driver(folder, **options))
        return made[-1]

    yield make
    for driver in made:
        driver.core.residency.check()
        driver.core.close()
