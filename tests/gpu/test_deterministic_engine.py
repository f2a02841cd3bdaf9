"""Deterministic mode on a card, through the whole engine: bf16, adapters, several families.

A request's tokens and log-probabilities are the same bits in a batch, alone, behind a cached
prefix, and with its prompt cut into other chunks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.adapters.digest import revision_digest
from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect
from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.layout import MODULE_ID, MODULES
from engine.messages import PackedManifest, SamplingParams
from engine.models.spec import read_spec

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


def write_adapter(folder: Path, base: Path, rank: int) -> Path:
    """A random adapter on all modules, in PEFT's layout."""
    dims, tensors = read_spec(base).shapes.dims, {}
    for layer in range(2):
        for module in MODULES:
            d_in, d_out = dims[MODULE_ID[module]]
            part = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, d_in) * d_in**-0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(d_out, rank) * rank**-0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    built = getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16)
    built.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def packed(model: Path, tmp_path: Path) -> list[PackedManifest]:
    """Adapters of unlike ranks."""
    spec = read_spec(model)
    layout = spec.block_layout(block_size=16, dtype="bfloat16")
    made = []
    for rank in (16, 5):
        folder = write_adapter(tmp_path / f"rank-{rank}", model, rank)
        manifest = inspect(folder, spec)
        rev = revision_digest(folder, manifest)
        (tmp_path / rev).mkdir()
        made.append(pack_folder(folder, manifest, layout, tmp_path / rev, rev))
    return made


def start(model: Path, packed: Sequence[PackedManifest], **settings: Any) -> Engine:
    engine = Engine(
        EngineConfig(
            **DEVICE,
            model=str(model),
            deterministic=True,
            num_blocks=512,
            max_num_seqs=8,
            **settings,
        )
    )
    for manifest in packed:
        engine.add_adapter(manifest)
        engine.load(manifest.rev)
    return engine


def test_a_request_gets_the_same_bits_in_any_company(
    model: Path, packed: list[PackedManifest]
) -> None:
    torch.manual_seed(2)
    prompts = [torch.randint(3, 331, (n,)).tolist() for n in LENGTHS]
    revs = [None if n is None else packed[n].rev for n in ADAPTERS]

    def told(generation: Generation) -> tuple[Any, ...]:
        return generation.tokens, generation.logprobs

    with start(model, packed) as engine:
        together = engine.generate(prompts, SAMPLING, revs)
        for prompt, rev, expected in zip(prompts, revs, together, strict=True):
            [alone] = engine.generate([prompt], SAMPLING, [rev])
            assert (alone.cached_tokens > 0) == (len(prompt) > 16)
            assert told(alone) == told(expected)
    with start(model, packed, max_batch_tokens=40) as engine:
        in_chunks = engine.generate(prompts, SAMPLING, revs)
        assert [told(one) for one in in_chunks] == [told(one) for one in together]
    with start(model, packed) as engine:
        [cold] = engine.generate(prompts[4:5], SAMPLING, revs[4:5])
        assert cold.cached_tokens == 0 and told(cold) == told(together[4])
