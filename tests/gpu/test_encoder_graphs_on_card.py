"""Small steps of an encoder on a card, in bf16: a graph has the bits of the eager step that is
padded alike, and vectors are those of the CPU but for what bf16 rounds."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.ladder import INPUTS
from engine.pooling.config import PoolingConfig
from engine.pooling.encoder_graphs import EncoderGraphs
from engine.pooling.engine import PoolingEngine
from engine.recording import WORTH_IT

pytestmark = pytest.mark.gpu

HIDDEN, FFN, LAYERS = 128, 256, 3
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
}
#: Norms behind the sums; norms ahead, rotations, a gate, and windows in two of three layers.
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "ModernBert": {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 16,
    },
}
CARD: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "adapter_pool": 16 << 20}
#: Inputs of a step, in the least rung and the largest, one row and all, few inputs and many.
STEPS = (
    (1,),
    (64,),
    (5, 1, 40, 17),
    (65,),
    (128, 128),
    (200, 100, 83),
    (512,),
    (256, 256),
    (2,) * 60,
    (2,) * INPUTS[-1],
    (300, 213),
)
#: What two vectors have between them that differ by bf16's rounding alone.
COSINE = 0.999


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, as transformers saves it."""
    import transformers

    family = request.param
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family])
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}Model")(config)
    where = tmp_path_factory.mktemp(family)
    model.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[PoolingEngine]:
    with PoolingEngine(PoolingConfig(model=str(folder), **CARD)) as started:
        yield started


def inputs_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(4, 331, length).tolist() for length in lengths]


def graphs_of(engine: PoolingEngine) -> EncoderGraphs:
    graphs: EncoderGraphs | None = engine.core.machine.backbone.graphs  # type: ignore[union-attr]
    assert graphs is not None
    return graphs


def rows_of(engine: PoolingEngine, inputs: list[list[int]], **more: Any) -> list[np.ndarray]:
    """Every row's hidden state, where there was NaN before the step."""
    graphs_of(engine)._hidden.fill_(torch.nan)
    return [one.values.copy() for one in engine.pool("tokens", inputs, **more)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(
        np.isfinite(a).all() and np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


def test_a_graph_computes_the_bits_of_the_eager_step(engine: PoolingEngine) -> None:
    graphs = graphs_of(engine)
    assert graphs.num_graphs == len(graphs._ladder.all), "all were captured at the start"
    for number, lengths in enumerate(STEPS):
        inputs = inputs_of(lengths, number)
        graphs.use_graphs = False
        eager = rows_of(engine, inputs, normalize=False)
        graphs.use_graphs, before = True, graphs.num_replays
        replayed = rows_of(engine, inputs, normalize=False)
        fits = sum(lengths) <= 512
        assert graphs.num_replays == before + fits, lengths
        assert same(eager, replayed), lengths


def test_vectors_are_those_of_a_cpu(folder: Path, engine: PoolingEngine) -> None:
    told = {"device": "cpu", "dtype": "float32", "threads": 2}
    with PoolingEngine(PoolingConfig(model=str(folder), **told)) as cpu:
        for number, lengths in enumerate(STEPS):
            inputs = inputs_of(lengths, number)
            right, got = cpu.embed(inputs), engine.embed(inputs)
            for a, b in zip(right, got, strict=True):
                assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > COSINE, lengths


def test_launching_never_waits_for_the_device(engine: PoolingEngine) -> None:
    inputs = inputs_of((100, 30, 3))
    engine.embed(inputs)
    runner, replays = engine.core._runner, graphs_of(engine).num_replays
    launch = runner.launch

    def watched(placed: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(placed)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = watched  # type: ignore[method-assign]
    try:
        for _ in range(3):
            engine.embed(inputs)
    finally:
        runner.launch = launch  # type: ignore[method-assign]
    assert graphs_of(engine).num_replays == replays + 3


def test_steps_that_replay_allocate_nothing(engine: PoolingEngine) -> None:
    for _ in range(2):  # vectors on their way have memory of their own, which is kept
        for number, lengths in enumerate(STEPS):
            engine.embed(inputs_of(lengths, number))
    reserved = torch.cuda.memory_reserved()
    for number, lengths in enumerate(STEPS):
        engine.embed(inputs_of(lengths, number))
    assert torch.cuda.memory_reserved() == reserved


def test_what_was_planned_for_graphs_holds_what_they_take(folder: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    config = PoolingConfig(model=str(folder), **CARD)
    with PoolingEngine(config) as started:
        info, took = started.info, torch.cuda.memory_reserved() - before
        taken = info.weight_bytes + info.adapter_bytes + info.graph_bytes
        assert info.graph_bytes > 0 and took <= taken + (64 << 20), (took, taken)


def write_adapter(folder: Path, seed: int, rank: int) -> Path:
    """On what a BERT attends with and on either product of its MLP."""
    folder.mkdir()
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (d_in, d_out) in {
            "attention.self.query": (HIDDEN, HIDDEN),
            "attention.self.value": (HIDDEN, HIDDEN),
            "attention.output.dense": (HIDDEN, HIDDEN),
            "intermediate.dense": (HIDDEN, FFN),
            "output.dense": (FFN, HIDDEN),
        }.items():
            at = f"base_model.model.encoder.layer.{layer}.{module}"
            tensors[f"{at}.lora_A.weight"] = 0.1 * torch.randn(rank, d_in)
            tensors[f"{at}.lora_B.weight"] = 0.1 * torch.randn(d_out, rank)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("folder", ["Bert"], indirect=True)
def test_steps_with_adapters_get_graphs_with_the_bits_of_the_eager_step(
    folder: Path, engine: PoolingEngine, tmp_path: Path
) -> None:
    """Ranks of either kind of tiles, alone and mixed, beside base rows; and vectors of a CPU's."""
    folders = [write_adapter(tmp_path / f"a{n}", n, rank) for n, rank in enumerate((4, 16, 40))]
    revs = [engine.add_folder(each, store=tmp_path / "store") for each in folders]
    graphs = graphs_of(engine)
    told = {"device": "cpu", "dtype": "float32", "threads": 2}
    with PoolingEngine(PoolingConfig(model=str(folder), **told)) as cpu:
        alike = [cpu.add_folder(each, store=tmp_path / "cpu-store") for each in folders]
        for number, lengths in enumerate(((60, 4), (250, 200, 62), (3,) * 50, (100, 1, 2, 90))):
            for picked in ((0,), (None, 0), (1, None, 2), (2, 0, 1)):
                asked = (picked * len(lengths))[: len(lengths)]
                mine, theirs = (
                    [None if p is None else names[p] for p in asked] for names in (revs, alike)
                )
                inputs = inputs_of(lengths, number)
                for _ in range(WORTH_IT):
                    rows_of(engine, inputs, revs=mine, normalize=False)
                before = graphs.num_replays
                replayed = rows_of(engine, inputs, revs=mine, normalize=False)
                assert graphs.num_replays == before + 1, (lengths, picked)
                graphs.use_graphs = False
                eager = rows_of(engine, inputs, revs=mine, normalize=False)
                graphs.use_graphs = True
                assert same(eager, replayed), (lengths, picked)
                right = cpu.embed(inputs, revs=theirs)
                got = engine.embed(inputs, revs=mine)
                for a, b in zip(right, got, strict=True):
                    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > COSINE
