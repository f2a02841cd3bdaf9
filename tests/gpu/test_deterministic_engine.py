"""Deterministic mode on a card, through the whole engine: bf16, adapters, several families.

A request's tokens and log-probabilities are the same bits in a batch, alone, behind a cached
prefix, and with its prompt cut into other chunks.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.kernels import gemm_tiles
from engine.messages import SamplingParams
from tests.fakes.random_lora import write_lora

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 128},
    "Qwen3": {
        "num_attention_heads": 6,
        "use_sliding_window": True,
        "sliding_window": 50,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "Gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 64},
}
LENGTHS = (150, 3, 61, 64, 301, 17, 90)
ADAPTERS = (None, 0, 1, 0, 1, None, 1)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)
DEVICE = {"device": "cuda", "dtype": "bfloat16"}
#: Whose prompts all lie in one step of an engine of so many rows, and in many of a small one.
ROWS, FEW_ROWS = 768, 40


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    built = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    built.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def adapters(model: Path, tmp_path: Path) -> list[Path]:
    """Of unlike ranks."""
    return [write_lora(tmp_path / f"rank-{rank}", model, rank) for rank in (16, 5)]


def start(model: Path, adapters: Sequence[Path], rows: int = ROWS) -> tuple[Engine, Sequence[str]]:
    """An engine and the revisions of the adapters that it has loaded."""
    engine = Engine(
        EngineConfig(
            **DEVICE,
            model=str(model),
            deterministic=True,
            num_blocks=256,
            max_num_seqs=8,
            max_batch_tokens=rows,
            max_rank=16,
            slots=2,
        )
    )
    store = model.parent / "packed"
    store.mkdir(exist_ok=True)
    revs = [engine.add_folder(folder, store) for folder in adapters]
    for rev in revs:
        engine.load(rev)
    return engine, revs


def parting(got: Generation, want: Generation) -> str:
    """Where two answers part first, and by how much; "" if all their bits are the same."""
    if len(got.logprobs) != len(want.logprobs):
        return f"{len(got.logprobs)} tokens, not {len(want.logprobs)}"
    for at, (one, other) in enumerate(zip(got.logprobs, want.logprobs, strict=True)):
        if one.token != other.token:
            mine, theirs = (f"token {t.token} at {t.logprob:.6f}" for t in (one, other))
            return f"token {at} is {mine}, not {theirs}"
        if one.logprob != other.logprob:
            return f"token {at}'s log-probability is {one.logprob - other.logprob:+.3e} off"
        if one.top != other.top:
            return f"token {at}'s best are {one.top}, not {other.top}"
    return "" if got.tokens == want.tokens else f"{got.tokens}, not {want.tokens}"


def partings(
    company: str, got: Iterable[Generation], want: Sequence[Generation], first: int = 0
) -> list[str]:
    """A line for every request whose bits differ; requests count from `first`."""
    lines = []
    for n, (one, other) in enumerate(zip(got, want, strict=True), start=first):
        if line := parting(one, other):
            who = f"request {n} ({LENGTHS[n]} tokens, adapter {ADAPTERS[n]})"
            lines.append(f"{who}, {company}: {line}")
    return lines


def test_a_request_gets_the_same_bits_in_any_company(model: Path, adapters: list[Path]) -> None:
    """The first step together makes the splits of a product in turn, all others side by side."""
    ffn = 2 * SIZES["intermediate_size"], SIZES["hidden_size"]
    tile = gemm_tiles.fixed(*ffn, itemsize=2)
    serial = [gemm_tiles.is_serial(tile, rows, ffn[0]) for rows in (sum(LENGTHS), max(LENGTHS))]
    assert serial == [True, False] and sum(LENGTHS) <= ROWS
    torch.manual_seed(2)
    prompts = [torch.randint(3, 331, (n,)).tolist() for n in LENGTHS]
    found: list[str] = []
    engine, names = start(model, adapters)
    revs = [None if n is None else names[n] for n in ADAPTERS]
    with engine:
        together = engine.generate(prompts, SAMPLING, revs)
        for n, (prompt, rev) in enumerate(zip(prompts, revs, strict=True)):
            alone = engine.generate([prompt], SAMPLING, [rev])
            assert (alone[0].cached_tokens > 0) == (len(prompt) > 16)
            found += partings("alone behind its cached prefix", alone, together[n : n + 1], n)
    with start(model, adapters, rows=FEW_ROWS)[0] as engine:
        in_chunks = engine.generate(prompts, SAMPLING, revs)
        found += partings("in chunks", in_chunks, together)
    with start(model, adapters)[0] as engine:
        cold = engine.generate(prompts[4:5], SAMPLING, revs[4:5])
        assert cold[0].cached_tokens == 0
        found += partings("alone with nothing cached", cold, together[4:5], 4)
    assert not found, "\n".join(found)
