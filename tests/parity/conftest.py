"""A rig that drives a decoder without engine or scheduler, a PEFT reader, and the model folders."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported anywhere below

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.lora_meta import LoraMeta, LoraRows, Segment
from engine.layout import MODULES
from engine.models.decoder import Decoder, load_model
from engine.models.layers import Build
from engine.models.spec import read_spec
from lorad.demo_model import ensure

Slots = Mapping[int, Mapping[tuple[int, str], LoraRows]]

ADAPTERS = Path(__file__).parents[2] / "demo" / "adapters"
NAMES = ("bible", "devil", "jargon", "bofh")

RANDOM = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 333,
    "hidden_size": 200,
    "intermediate_size": 520,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 34,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "use_sliding_window": True,
    "sliding_window": 50,
    "layer_types": ["full_attention", "sliding_attention"],
}


@dataclass
class Line:
    """A sequence: its tokens, how many of them have been computed, and its blocks."""

    tokens: list[int]
    slot: int = -1
    done: int = 0
    blocks: list[int] = field(default_factory=list)


class Rig:
    """Runs steps over a small arena that starts as NaN and hands out blocks in a random order."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: Slots | None = None,
        num_blocks: int = 64,
        block_size: int = 16,
    ) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.slots = slots or {}
        self.block_size = block_size
        self.device = decoder.embedding.device
        arena = torch.full(
            (num_blocks, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim),
            torch.nan,
            dtype=decoder.embedding.dtype,
            device=self.device,
        )
        self.kv = [arena[:, layer] for layer in range(spec.num_layers)]
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()

    def step(self, *work: tuple[Line, int]) -> list[Tensor]:
        """Run the next n tokens of each line in one forward; logits (n, vocab) of each."""
        size = self.block_size
        tokens, positions, mapping, segments = [], [], [], []
        for line, count in work:
            last = line.done + count
            while len(line.blocks) * size < last:
                line.blocks.append(self.free.pop())
            if line.slot >= 0:
                segments.append(Segment(len(tokens), len(tokens) + count, line.slot))
            tokens += line.tokens[line.done : last]
            positions += range(line.done, last)
            mapping += [line.blocks[p // size] * size + p % size for p in range(line.done, last)]
            line.done = last
        tables = torch.zeros(len(work), max(len(w[0].blocks) for w in work), dtype=torch.int32)
        for table, (line, _) in zip(tables, work, strict=True):
            table[: len(line.blocks)] = torch.tensor(line.blocks)
        counts = [count for _, count in work]
        meta = AttentionMeta(
            tuple(itertools.accumulate(counts, initial=0)),
            tuple(line.done for line, _ in work),
            torch.tensor(mapping, device=self.device),
            tables.to(self.device),
            size,
        )
        lora = LoraMeta(tuple(segments), self.slots) if segments else None
        rows = torch.tensor([tokens, positions], device=self.device)
        hidden = self.decoder(rows[0], rows[1], self.kv, meta, lora)
        return list(torch.split(self.decoder.logits(hidden), counts))

    def logits(self, tokens: Sequence[int], slot: int = -1) -> Tensor:
        """All of `tokens` alone in one step: (n, vocab)."""
        line = Line(list(tokens), slot)
        (result,) = self.step((line, len(line.tokens)))
        self.close(line)
        return result

    def together(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> list[Tensor]:
        """All prompts in one step, each on its slot."""
        lines = [Line(list(p), slot) for p, slot in zip(prompts, slots, strict=True)]
        results = self.step(*((line, len(line.tokens)) for line in lines))
        for line in lines:
            self.close(line)
        return results

    def in_chunks(self, tokens: Sequence[int], sizes: Sequence[int], slot: int = -1) -> Tensor:
        """Chunks of the given sizes, then one token a step: (n, vocab)."""
        line, rows = Line(list(tokens), slot), []
        for size in itertools.chain(sizes, itertools.repeat(1)):
            if line.done >= len(line.tokens):
                break
            rows += self.step((line, min(size, len(line.tokens) - line.done)))
        self.close(line)
        return torch.cat(rows)

    def greedy(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], count: int
    ) -> list[list[int]]:
        """`count` greedy tokens after each prompt, all lines in every step."""
        lines = [Line(list(p), slot) for p, slot in zip(prompts, slots, strict=True)]
        for _ in range(count):
            results = self.step(*((line, len(line.tokens) - line.done) for line in lines))
            for line, rows in zip(lines, results, strict=True):
                line.tokens.append(int(rows[-1].argmax()))
        for line in lines:
            self.close(line)
        return [line.tokens[-count:] for line in lines]

    def close(self, line: Line) -> None:
        self.free += line.blocks


def read_adapter(folder: Path, *, cut: int = 0) -> dict[tuple[int, str], LoraRows]:
    """PEFT's files as the op takes them; rows are cut into pieces after `cut` rows."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in tensors.items():
        match = re.fullmatch(
            r"base_model\.model\.(.*layers\.(\d+)\..*?(\w+))\.lora_A\.weight", name
        )
        if match is None:
            continue
        path, layer, module = match.groups()
        b = tensors[name.replace("lora_A", "lora_B")].t().contiguous()
        patterns = config.get("alpha_pattern") or {}
        alphas = [v for k, v in patterns.items() if re.fullmatch(rf"(.*\.)?({k})", path)]
        alpha, rank = (alphas or [config["lora_alpha"]])[0], a.shape[0]
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pieces = [(t[:cut], t[cut:]) if 0 < cut < rank else (t,) for t in (a.float(), b.float())]
        found[int(layer), module] = LoraRows(scaling, rank, *pieces)
    return found


@contextmanager
def merged(decoder: Decoder, adapter: Mapping[tuple[int, str], LoraRows]) -> Iterator[None]:
    """Weights W + scaling · B A while inside; the very same W after it."""
    places = decoder.places()
    kept: dict[str, Tensor] = {}
    for (layer, module), rows in adapter.items():
        name = f"layers.{layer}.mlp.{module}.weight"
        if name not in places:
            name = f"layers.{layer}.self_attn.{module}.weight"
        kept[name] = places[name].clone()
        places[name] += rows.scaling * torch.cat(rows.b).t() @ torch.cat(rows.a)
    try:
        yield
    finally:
        for name, weight in kept.items():
            places[name].copy_(weight)


@pytest.fixture(autouse=True, scope="session")
def quiet_libraries() -> None:
    """transformers' progress bars and advice are not what these tests are about."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # tiny products lose more to a second thread than they win


@pytest.fixture(scope="session")
def rig() -> Callable[..., Rig]:
    """`rig(folder, deterministic=..., device=..., dtype=..., slots=...)`; or of a decoder."""

    def make(
        source: Path | Decoder,
        *,
        deterministic: bool = False,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_len: int = 0,
        **options: Any,
    ) -> Rig:
        if isinstance(source, Path):
            source = load_model(
                source, device=device, dtype=dtype, deterministic=deterministic, max_len=max_len
            )
        return Rig(source, **options)

    return make


@pytest.fixture(scope="session")
def line() -> type[Line]:
    return Line


@pytest.fixture(scope="session")
def peft_reader() -> Callable[..., dict[tuple[int, str], LoraRows]]:
    return read_adapter


@pytest.fixture(scope="session")
def with_merged() -> Callable[..., Any]:
    return merged


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, converted if the cache does not hold it yet."""
    return ensure()


@pytest.fixture(scope="session")
def demo_adapters() -> dict[str, Path]:
    """The demo's four adapters; their absence is a failure, not a skip."""
    folders = {name: ADAPTERS / name for name in NAMES}
    for folder in folders.values():
        assert (folder / "adapter_model.safetensors").is_file(), f"{folder} is missing"
    return folders


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3 of odd sizes, one of its layers windowed, made without transformers."""
    where = tmp_path_factory.mktemp("deterministic")
    (where / "config.json").write_text(json.dumps(RANDOM))
    places = Decoder(read_spec(where), Build(torch.device("cpu"), torch.float32, False)).places()
    torch.manual_seed(3)
    held = {
        name: 1 + 0.2 * torch.randn(p.shape)
        if "norm" in name
        else torch.randn(p.shape) * 2 * p.shape[-1] ** -0.5
        for name, p in places.items()
    }
    save_file(held, where / "model.safetensors")
    return where


@pytest.fixture(scope="session")
def random_slots(random_folder: Path) -> Slots:
    """Two adapters of unlike ranks on all modules of all layers."""
    dims = read_spec(random_folder).shapes.dims
    torch.manual_seed(4)
    return {
        slot: {
            (layer, module): LoraRows(
                0.5,
                rank,
                (torch.randn(rank, d_in) * d_in**-0.5,),
                (torch.randn(rank, d_out) * rank**-0.5,),
            )
            for layer in range(2)
            for module, (d_in, d_out) in zip(MODULES, dims, strict=True)
        }
        for slot, rank in ((0, 16), (1, 3))
    }
