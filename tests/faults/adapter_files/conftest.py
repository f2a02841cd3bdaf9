"""Adapter folders written by hand, so that they can be wrong in every way."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.spec import ModelSpec
from tests.fakes.tiny_spec import SPEC

ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I8": 1}
PREFIX = "base_model.model.model."
Q = "layers.0.self_attn.q_proj"


@dataclass
class Draft:
    """A folder before it is written; every test spoils one thing.  Starts as a good adapter of
    rank 4 on q_proj and up_proj in fp32."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[str, list[int], bytes]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    raw_config: bytes | None = None
    raw_weights: bytes | None = None

    def __post_init__(self) -> None:
        self.config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.21.2"}
        self.pair(Q, 64, 64)
        self.pair("layers.1.mlp.up_proj", 64, 96)

    def pair(self, path: str, d_in: int, d_out: int, rank: int = 4) -> None:
        """Add the two factors of one module."""
        self.put(f"{PREFIX}{path}.lora_A.weight", np.ones((rank, d_in), np.float32))
        self.put(f"{PREFIX}{path}.lora_B.weight", np.ones((d_out, rank), np.float32))

    def put(self, name: str, values: np.ndarray | list[Any], dtype: str = "F32") -> None:
        """Add or replace a tensor; 16-bit ones are given as uint16 bits."""
        array = np.asarray(values, np.float32 if dtype == "F32" else None)
        self.tensors[name] = (dtype, list(array.shape), array.tobytes())

    def add(self, name: str, *shape: int, dtype: str = "F32") -> None:
        """Add a tensor of zeros."""
        self.tensors[name] = (dtype, list(shape), bytes(math.prod(shape) * ITEMSIZE[dtype]))

    def weights(self) -> bytes:
        """A correct safetensors file of the tensors."""
        entries, body = {}, b""
        for name, (dtype, shape, data) in self.tensors.items():
            offsets = [len(body), len(body) + len(data)]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            body += data
        header = json.dumps(entries).encode()
        return len(header).to_bytes(8, "little") + header + body

    def write(self) -> Path:
        """The folder, now on disk."""
        self.path.mkdir()
        config = (
            self.raw_config if self.raw_config is not None else json.dumps(self.config).encode()
        )
        weights = self.raw_weights if self.raw_weights is not None else self.weights()
        files = {"adapter_config.json": config, "adapter_model.safetensors": weights} | self.files
        for name, data in files.items():
            if data != b"absent":
                (self.path / name).parent.mkdir(exist_ok=True)
                (self.path / name).write_bytes(data)
        return self.path


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return Draft(tmp_path / "adapter")


@pytest.fixture
def new_draft(tmp_path: Path) -> Callable[[], Draft]:
    """A factory, for tests that write many folders."""
    count = 0

    def make() -> Draft:
        nonlocal count
        count += 1
        return Draft(tmp_path / f"adapter{count}")

    return make


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return SPEC
