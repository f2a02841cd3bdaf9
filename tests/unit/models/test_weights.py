"""safetensors files → a filled decoder, and which files are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError, ModelUnsupported
from engine.models.decoder import Decoder, load_model
from engine.models.layers import Build
from engine.models.spec import read_spec

Folder = Callable[..., Path]


def load(where: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(where, device="cpu", dtype=dtype, deterministic=False)


def tensors(where: Path) -> dict[str, Tensor]:
    """A random bf16 tensor for every name that the published checkpoint would hold."""
    places = Decoder(read_spec(where), Build(torch.device("cpu"), torch.float32, False)).places()
    torch.manual_seed(0)
    return {
        name if name == "lm_head.weight" else f"model.{name}": torch.randn(p.shape).bfloat16()
        for name, p in places.items()
    }


def single(where: Path, held: dict[str, Tensor]) -> None:
    save_file(held, where / "model.safetensors")


def sharded(where: Path, held: dict[str, Tensor]) -> None:
    names = sorted(held)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        save_file({name: held[name] for name in inside}, where / file)
    weight_map = {name: file for file, inside in parts.items() for name in inside}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (where / "model.safetensors.index.json").write_text(index)


def state(decoder: Decoder) -> dict[str, Tensor]:
    return dict(decoder.named_parameters())


def same(one: Decoder, other: Decoder) -> bool:
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_projections_land_side_by_side_in_their_fused_weight(folder: Folder) -> None:
    where = folder(attention_bias=True)
    held = tensors(where)
    single(where, held)
    attention = load(where).layers[2].attention
    names = [f"model.layers.2.self_attn.{m}_proj" for m in "qkv"]
    assert torch.equal(
        attention.qkv.weight, torch.cat([held[f"{n}.weight"] for n in names]).float()
    )
    assert torch.equal(attention.qkv.bias, torch.cat([held[f"{n}.bias"] for n in names]).float())


def test_shards_are_read_like_one_file(folder: Folder) -> None:
    where = folder()
    held = tensors(where)
    sharded(where, held)
    from_shards = load(where)
    single(where, held)
    assert same(from_shards, load(where))


def test_names_may_lack_the_leading_model(folder: Folder) -> None:
    where = folder(tie_word_embeddings=True)
    held = tensors(where)
    single(where, held)
    with_prefix = load(where)
    single(where, {name.removeprefix("model."): tensor for name, tensor in held.items()})
    assert same(with_prefix, load(where))


def gemma(folder: Folder) -> Path:
    """A text model within a multimodal one: its config in place of the folder's."""
    where = folder(model_type="gemma3_text")
    text = json.loads((where / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (where / "config.json").write_text(json.dumps(whole))
    return where


@pytest.mark.parametrize("lead", ["model.language_model.", "language_model.model."])
def test_a_text_model_is_found_within_a_multimodal_one_and_its_towers_are_passed_over(
    folder: Folder, lead: str
) -> None:
    where = gemma(folder)
    held = tensors(where)
    single(where, held)
    alone = load(where)
    vision = "model." if lead.startswith("model.") else ""
    around = {
        f"{vision}vision_tower.vision_model.embeddings.patch_embedding.weight": torch.ones(3),
        f"{vision}multi_modal_projector.mm_input_projection_weight": torch.ones(8, 64),
    }
    single(where, {n.replace("model.", lead, 1): t for n, t in held.items()} | around)
    assert same(alone, load(where))


def test_a_tower_beside_a_model_that_has_none_is_an_error(folder: Folder) -> None:
    where = folder(model_type="gemma3_text")
    single(where, tensors(where) | {"vision_tower.post_layernorm.bias": torch.ones(3)})
    with pytest.raises(ModelUnsupported, match=r"vision_tower\.post_layernorm"):
        load(where)


def test_the_four_norms_of_a_gemma_layer_land_where_they_belong(folder: Folder) -> None:
    where = folder(model_type="gemma2")
    held = tensors(where)
    single(where, held)
    layer = load(where).layers[3]
    places = {
        "input_layernorm": layer.attention_norm,
        "post_attention_layernorm": layer.attention_after,
        "pre_feedforward_layernorm": layer.ffn_norm,
        "post_feedforward_layernorm": layer.ffn_after,
    }
    for name, norm in places.items():
        assert torch.equal(norm.weight, held[f"model.layers.3.{name}.weight"].float())


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 55.5), (torch.float32, 3072**0.5)])
def test_the_scale_of_an_embedding_is_rounded_to_its_dtype(
    folder: Folder, dtype: torch.dtype, scale: float
) -> None:
    spec = read_spec(folder(model_type="gemma2", hidden_size=3072, num_hidden_layers=1))
    decoder = Decoder(spec, Build(torch.device("cpu"), dtype, False))
    assert decoder.embedding_scale == pytest.approx(scale, rel=1e-7)


def test_weights_are_cast_to_the_wanted_dtype(folder: Folder) -> None:
    where = folder()
    single(where, tensors(where))
    assert {p.dtype for p in load(where, torch.float16).parameters()} == {torch.float16}


def test_rotary_buffers_and_a_tied_head_are_passed_over(folder: Folder) -> None:
    where = folder(tie_word_embeddings=True)
    held = tensors(where)
    single(
        where,
        held
        | {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.layers.0.self_attn.position_ids": torch.arange(4),
            "lm_head.weight": torch.ones(1000, 64),
        },
    )
    decoder = load(where)
    assert decoder.head is decoder.embedding
    assert torch.equal(decoder.embedding, held["model.embed_tokens.weight"].float())


def test_a_tensor_that_nobody_asked_for_is_an_error_with_its_name(folder: Folder) -> None:
    where = folder()
    single(where, tensors(where) | {"model.layers.0.self_attn.o_proj.bias": torch.ones(64)})
    with pytest.raises(ModelUnsupported, match=r"layers\.0\.self_attn\.o_proj\.bias"):
        load(where)


def test_a_missing_tensor_is_an_error_with_its_name(folder: Folder) -> None:
    where = folder()
    held = tensors(where)
    del held["model.layers.3.mlp.up_proj.weight"]
    single(where, held)
    with pytest.raises(ModelUnsupported, match=r"layers\.3\.mlp\.up_proj\.weight"):
        load(where)


def test_an_untied_model_without_a_head_is_refused(folder: Folder) -> None:
    where = folder()
    held = tensors(where)
    del held["lm_head.weight"]
    single(where, held)
    with pytest.raises(ModelUnsupported, match=r"lm_head\.weight"):
        load(where)


@pytest.mark.parametrize(
    "wrong", [torch.ones(63), torch.ones(64, dtype=torch.int8), torch.ones(64, 1)]
)
def test_a_tensor_of_another_shape_or_kind_is_refused(folder: Folder, wrong: Tensor) -> None:
    where = folder()
    single(where, tensors(where) | {"model.norm.weight": wrong})
    with pytest.raises(ModelUnsupported, match=r"norm\.weight"):
        load(where)


def test_the_same_tensor_under_two_names_is_an_error(folder: Folder) -> None:
    where = folder()
    single(where, tensors(where) | {"norm.weight": torch.ones(64)})
    with pytest.raises(ConfigError, match=r"norm\.weight twice"):
        load(where)


def test_a_shard_that_the_index_names_must_be_there(folder: Folder) -> None:
    where = folder()
    sharded(where, tensors(where))
    (where / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors") as caught:
        load(where)
    assert "incomplete" in caught.value.hint


def test_a_truncated_file_is_an_error_with_its_name(folder: Folder) -> None:
    where = folder()
    single(where, tensors(where))
    path = where / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(where)


def test_a_folder_without_safetensors_says_so(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="neither"):
        load(folder())


def test_progress_ends_at_one(folder: Folder) -> None:
    where = folder()
    single(where, tensors(where))
    seen: list[float] = []
    load_model(where, device="cpu", dtype=torch.float32, deterministic=False, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0
