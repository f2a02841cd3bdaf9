"""Adapters of a resized vocabulary, as PEFT writes them: which rows are packed, and what embedding
and head become with them."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.adapters.manifest import AdapterManifest
from engine.adapters.pack import pack_for_base
from engine.adapters.peft import inspect
from engine.errors import AdapterInvalid
from engine.layout import BlockLayout, PlacedModule, RowRun, place
from engine.messages import PackedManifest
from engine.models.bases import read_base

V, HIDDEN, EXTRA = 100, 32, 24
BOTH = ["embed_tokens", "lm_head"]
EITHER = {
    "nothing trained": {},
    "both saved": {"modules_to_save": BOTH},
    "the embedding saved": {"modules_to_save": BOTH[:1]},
    "the head saved": {"modules_to_save": BOTH[1:]},
    "the embedding saved, tied": {"modules_to_save": BOTH[:1], "ensure_weight_tying": True},
    "both with factors": {"target_modules": ["q_proj", *BOTH]},
    "both with factors, tied": {"target_modules": ["q_proj", *BOTH], "ensure_weight_tying": True},
    "factors beside a saved head": {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "factors beside a saved embedding": {
        "target_modules": ["q_proj", "lm_head"],
        "modules_to_save": ["embed_tokens"],
    },
    "trained tokens": {"trainable_token_indices": [83, 3, 81]},
    "trained tokens of both": {
        "trainable_token_indices": {"embed_tokens": [83, 3, 81], "lm_head": [3, 82]}
    },
}
#: PEFT saves no more than the end with factors: of the other one the new rows are lost.
ONE = {
    "the embedding with factors": {"target_modules": ["q_proj", "embed_tokens"]},
    "the head with factors": {"target_modules": ["q_proj", "lm_head"]},
    "the head with DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "the head with lora_bias": {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
}
CASES = [
    (tied, size, name) for tied in (False, True) for size in (104, 90) for name in (EITHER | ONE)
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folders = {}
    for tied in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=V,
                hidden_size=HIDDEN,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=tied,
            )
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        folders[tied] = tmp_path_factory.mktemp("base")
        model.save_pretrained(folders[tied])
        words = {f"w{i}": i for i in range(88)}
        tokenizer = {"version": "1.0", "added_tokens": [], "model": {"vocab": words}}
        (folders[tied] / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folders


@dataclass
class Tuned:
    """What PEFT makes of the ends: of every token its embedding, and its column of the head."""

    folder: Path
    embedding: Tensor  # [tokens, hidden]
    head: Tensor  # [tokens, hidden]
    bias: Tensor  # [tokens]


def tune(base: Path, size: int, config: dict[str, Any], folder: Path) -> Tuned:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(base)
        torch.manual_seed(1)
        model.resize_token_embeddings(size, mean_resizing=False)
        config = {"target_modules": ["q_proj"], "r": 3, "lora_alpha": 5} | config
        tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        tuned.save_pretrained(folder)
        fresh = LlamaForCausalLM.from_pretrained(base)
        fresh.resize_token_embeddings(size, mean_resizing=False)
        loaded = PeftModel.from_pretrained(fresh, folder)
    with torch.no_grad():
        bias = loaded.get_output_embeddings()(torch.zeros(1, HIDDEN))[0]
        head = (loaded.get_output_embeddings()(torch.eye(HIDDEN)) - bias).T
        return Tuned(folder, loaded.get_input_embeddings()(torch.arange(size)), head, bias)


def pack(
    base: Path, folder: Path, dtype: str = "float32", extra: int = EXTRA
) -> tuple[AdapterManifest, PackedManifest, BlockLayout]:
    spec = read_base(base, extra_vocab=extra)
    manifest = inspect(folder, spec, base=base, served_dtype=dtype)
    out = folder / "packed"
    out.mkdir(exist_ok=True)
    sizes: dict[str, Any] = {"block_size": 16, "dtype": dtype, "max_rank": 16}
    return manifest, *pack_for_base(folder, base, out, extra_vocab=extra, **sizes)


def read(data: bytes, run: RowRun, layout: BlockLayout, width: int) -> Tensor:
    """(rows, width) of a float32 packed file, folds undone."""
    rows = []
    for piece in run.pieces:
        at = piece.block * layout.block_bytes + piece.offset
        for i in range(piece.rows):
            rows.append(np.frombuffer(data, "<f4", run.width, at + i * run.stride))
    whole = torch.from_numpy(np.stack(rows)).reshape(run.rows // run.folds, -1)
    assert not whole[:, width:].any()
    return whole[:, :width]


def served(
    base: Path, packed: PackedManifest, layout: BlockLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, head and its bias, (num_ids, ...), by what the modules say; NaN without a row."""
    weights = load_file(base / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    held = {"embed_tokens": embedding, "lm_head": weights.get("lm_head.weight", embedding)}
    num_ids = V + EXTRA
    ends = {n: torch.full((num_ids, HIDDEN), torch.nan) for n in held}
    data = Path(packed.path).read_bytes()
    placed: dict[str, PlacedModule] = {}
    told = {m.module: m for m in packed.modules}
    for module in place(packed.modules, layout).modules:
        placed[module.module] = module
    bias = torch.zeros(num_ids)
    for name, end in ends.items():
        end[:V] = held[name]
        if rows := placed.get(f"{name}.rows"):
            ids = told[f"{name}.rows"].tokens
            assert list(ids) == sorted(set(ids))
            end[list(ids) or slice(0, rows.rank)] = read(data, rows.a, layout, HIDDEN)
        if pair := placed.get(name):
            widths = (num_ids, HIDDEN) if name == "embed_tokens" else (HIDDEN, num_ids)
            a = read(data, pair.a, layout, widths[0])
            b = read(data, pair.b, layout, widths[1])
            delta = pair.scaling * a[: pair.rank].T @ b[: pair.rank]
            end += delta if name == "embed_tokens" else delta.T
            if pair.bias:
                bias = pair.scaling * b[pair.rank]
            if pair.gain:
                end *= b[-2:].sum(0)[:, None]
    return ends["embed_tokens"], ends["lm_head"], bias


@pytest.mark.parametrize(("tied", "size", "name"), CASES)
def test_embedding_and_head_are_what_peft_loads_into_a_resized_base(
    tied: bool, size: int, name: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    config = (EITHER | ONE)[name]
    lost = name in ONE and not tied and size > V
    if not lost and size > V and "trainable_token_indices" in config:
        more = json.dumps(config).replace("83", "103").replace("82", "102")
        config = json.loads(more)
    tuned = tune(bases[tied], size, config, tmp_path / "adapter")
    if lost:
        with pytest.raises(AdapterInvalid) as caught:
            pack(bases[tied], tuned.folder)
        assert caught.value.reason == "E_VOCAB_RESIZED"
        other = "embed_tokens" if "head" in name else "lm_head"
        assert other in caught.value.message and "modules_to_save" in caught.value.hint
        return
    manifest, packed, layout = pack(bases[tied], tuned.folder)
    embedding, head, bias = served(bases[tied], packed, layout)
    assert (embedding[:size] - tuned.embedding).abs().max() < 1e-5
    assert (head[:size] - tuned.head).abs().max() < 1e-5
    assert (bias[:size] - tuned.bias).abs().max() < 1e-5
    assert packed.modules == manifest.modules
    assert packed.num_tokens == manifest.num_tokens == (88 if size < V else 0)
