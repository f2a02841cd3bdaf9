"""A model in parts equals the whole: every rank a thread, and messages that meet at a barrier.

No processes and no collectives of torch: what is looked at is who has which part of what, and how
often the ranks talk.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.adapters.pack import cut_pair
from engine.kernels.lora_meta import LoraRows
from engine.layout import MODULES, PlacedModule, RowRun
from engine.models.decoder import Decoder, load_model
from engine.models.layers import Build
from engine.models.shard import Shard
from engine.models.spec import read_spec

SIZES: dict[str, Any] = {
    "vocab_size": 333,  # no multiple of any number of ranks here
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # ranks beyond two share them
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "biased": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "normed": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "fused": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
    "tied": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    },
}
RANK = 5
Slots = dict[int, dict[tuple[int, str], LoraRows]]


class Meeting:
    """`size` ranks in threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.said: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.said[rank] = value
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


class Talking:
    """What `Ranks` does, at a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.count = 0

    def add_up(self, x: Tensor) -> None:
        self.count += 1
        x.copy_(torch.stack(self.meeting.gather(self.rank, x.clone())).sum(0))

    def side_by_side(self, x: Tensor, out: Tensor) -> None:
        self.count += 1
        out.copy_(torch.cat(self.meeting.gather(self.rank, x.clone()), dim=1)[:, : out.shape[1]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family with random weights, biases included."""
    made = {}
    for name, config in FAMILIES.items():
        where = tmp_path_factory.mktemp(name)
        (where / "config.json").write_text(json.dumps(SIZES | config))
        build = Build(torch.device("cpu"), torch.float32, False)
        generator = torch.Generator().manual_seed(3)
        held = {
            place: 1 + 0.2 * torch.randn(p.shape, generator=generator)
            if "norm" in place
            else torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5
            for place, p in Decoder(read_spec(where), build).places().items()
        }
        save_file(held, where / "model.safetensors")
        made[name] = where
    return made


def pairs(folder: Path) -> Slots:
    """Two adapters of all modules: one with a bias and a gain on each of them."""
    generator = torch.Generator().manual_seed(4)
    dims, slots = read_spec(folder).shapes.dims, {}
    for slot, extras in ((0, False), (1, True)):
        slots[slot] = {
            (layer, module): LoraRows(
                0.5,
                RANK,
                (torch.randn(RANK, d_in, generator=generator) * d_in**-0.5,),
                (torch.randn(RANK + 3 * extras, d_out, generator=generator) * 0.4,),
                bias=extras,
                gain=extras,
            )
            for layer in range(2)
            for module, (d_in, d_out) in zip(MODULES, dims, strict=True)
        }
    return slots


def part_of(slots: Slots, shard: Shard) -> Slots:
    """As the packer cuts them."""
    run = RowRun(0, 0, 0, ())

    def cut(module: str, rows: LoraRows) -> LoraRows:
        placed = PlacedModule(0, module, rows.rank, 0.5, run, run, rows.bias, rows.gain)
        a, b = cut_pair(rows.a[0].numpy(), rows.b[0].numpy(), placed, shard)
        own = (torch.from_numpy(a.copy()),), (torch.from_numpy(b.copy()),)
        return LoraRows(rows.scaling, rows.rank, *own, bias=rows.bias, gain=rows.gain)

    return {
        slot: {key: cut(key[1], rows) for key, rows in held.items()} for slot, held in slots.items()
    }


def on_ranks(
    folder: Path, size: int, slots: Slots, rig: Callable[..., Any], ask: Callable[[Any], Any]
) -> list[tuple[Any, int]]:
    """What every rank answers, and how often it talked."""
    meeting = Meeting(size)

    def one(rank: int) -> tuple[Any, int]:
        ranks = Talking(meeting, rank)
        decoder = load_model(
            folder,
            device="cpu",
            dtype=torch.float32,
            deterministic=False,
            ranks=ranks,  # type: ignore[arg-type]
        )
        own = part_of(slots, Shard(read_spec(folder), rank, size))
        return ask(rig(decoder, slots=own)), ranks.count

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 333, (n,), generator=generator).tolist() for n in (23, 1, 40, 7)]


@pytest.mark.parametrize(
    ("family", "size"), [("biased", 2), ("biased", 8), ("normed", 4), ("fused", 2), ("tied", 2)]
)
def test_all_ranks_together_say_what_one_says(
    family: str, size: int, folders: dict[str, Path], rig: Callable[..., Any]
) -> None:
    """The base and both adapters in one step, then token by token."""
    folder = folders[family]
    slots = pairs(folder)

    def ask(of: Any) -> list[Tensor]:
        mixed: Sequence[Tensor] = of.together(prompts(), [-1, 0, 1, 0])
        return [*mixed, of.in_chunks(prompts()[0], [9], slot=1)]

    expected = ask(rig(folder, slots=slots))
    for said, _ in on_ranks(folder, size, slots, rig, ask):
        for got, want in zip(said, expected, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_adapters_add_no_message_to_a_step(
    folders: dict[str, Path], rig: Callable[..., Any]
) -> None:
    """One for the embeddings, two a layer, one for the logits."""
    folder = folders["biased"]
    for slot in (-1, 0, 1):
        answers = on_ranks(folder, 2, pairs(folder), rig, lambda of, s=slot: of.logits([5, 6], s))
        assert [count for _, count in answers] == [1 + 2 * 2 + 1] * 2
