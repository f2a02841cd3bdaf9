"""Every refusal: its code, a message that names the thing, and a next step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.peft import Limits, inspect
from engine.adapters.reasons import READING
from engine.errors import AdapterInvalid
from engine.models.spec import ModelSpec

P = "base_model.model.model."
Q = f"{P}layers.0.self_attn.q_proj"
MLX_Q = "model.layers.0.self_attn.q_proj"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
Spoil = Callable[[Any], object]


def config(**fields: Any) -> Spoil:
    return lambda draft: draft.config.update(fields)


def without(*fields: str) -> Spoil:
    return lambda draft: [draft.config.pop(name) for name in fields]


def only(**files: bytes) -> Spoil:
    """A folder with these files and neither config nor weights, unless they are among them."""

    def spoil(draft: Any) -> None:
        names = {
            name.replace("__", "/").replace("_DOT_", "."): data for name, data in files.items()
        }
        gone = {"adapter_config.json": b"absent", "adapter_model.safetensors": b"absent"}
        draft.files = gone | names

    return spoil


def weights_replaced_by(*names: str) -> Spoil:
    """A config whose weights have these names instead."""
    files = dict.fromkeys(names, b"x") | {"adapter_model.safetensors": b"absent"}
    return lambda draft: draft.files.update(files)


def add(name: str, *shape: int, dtype: str = "F32") -> Spoil:
    return lambda draft: draft.add(name, *shape, dtype=dtype)


def instead(*tensors: tuple[str, tuple[int, ...]]) -> Spoil:
    def spoil(draft: Any) -> None:
        draft.tensors.clear()
        for name, shape in tensors:
            draft.add(name, *shape)

    return spoil


def pair(path: str, a: tuple[int, ...], b: tuple[int, ...]) -> Spoil:
    def spoil(draft: Any) -> None:
        draft.add(f"{path}.lora_A.weight", *a)
        draft.add(f"{path}.lora_B.weight", *b)

    return spoil


def embedding(a: tuple[int, ...], b: tuple[int, ...]) -> Spoil:
    def spoil(draft: Any) -> None:
        draft.add(f"{P}embed_tokens.lora_embedding_A", *a)
        draft.add(f"{P}embed_tokens.lora_embedding_B", *b)

    return spoil


def alora_on_the_embedding(draft: Any) -> None:
    draft.config["alora_invocation_tokens"] = [5]
    embedding((4, 128), (64, 4))(draft)


def trained(ids: list[int], rows: int) -> Spoil:
    def spoil(draft: Any) -> None:
        draft.config["trainable_token_indices"] = ids
        draft.add(f"{P}embed_tokens.token_adapter.trainable_tokens_delta", rows, 64)

    return spoil


def saved(name: str, *shape: int) -> Spoil:
    def spoil(draft: Any) -> None:
        draft.config["modules_to_save"] = [name]
        draft.add(f"base_model.model.{name}.weight", *shape)

    return spoil


def saved_and_adapted(draft: Any) -> None:
    saved("lm_head", 128, 64)(draft)
    pair("base_model.model.lm_head", (4, 64), (128, 4))(draft)


def two_heads(draft: Any) -> None:
    for name in ("base_model.model.lm_head", "base_model.model.model.unembed_tokens"):
        pair(name, (4, 64), (128, 4))(draft)


def mlx(**fields: Any) -> Spoil:
    """The same adapter as mlx-lm saves it, with these fields of the config."""

    def spoil(draft: Any) -> None:
        draft.config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}}
        draft.config |= fields
        for name, (dtype, shape, data) in list(draft.tensors.items()):
            renamed = name.removeprefix("base_model.model.").removesuffix(".weight")
            del draft.tensors[name]
            draft.tensors[renamed.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = (
                dtype,
                shape[::-1],
                data,
            )

    return spoil


def besides(name: str, shape: tuple[int, ...] = (64,), dtype: str = "F32", **fields: Any) -> Spoil:
    """A tensor more of q_proj alone, and these fields of the config."""

    def spoil(draft: Any) -> None:
        draft.config |= fields
        draft.add(f"{Q}.{name}", *shape, dtype=dtype)

    return spoil


def twice(name: str) -> Spoil:
    """The tensor of two adapters."""
    return lambda draft: [draft.add(f"{Q}.{name}.{adapter}", 64) for adapter in ("one", "two")]


def value(bits: int, dtype: str) -> Spoil:
    """One value of q_proj's lora_B, the last, has these bits."""

    def spoil(draft: Any) -> None:
        word = np.uint32 if dtype == "F32" else np.uint16
        words = np.zeros((64, 4), word)
        words[-1, -1] = bits
        draft.tensors[f"{Q}.lora_B.weight"] = (dtype, [64, 4], words.tobytes())

    return spoil


def file(name: str, content: object) -> Spoil:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda draft: draft.files.update({name: data})


def raw_config(data: bytes) -> Spoil:
    return lambda draft: setattr(draft, "raw_config", data)


def raw_weights(data: bytes) -> Spoil:
    return lambda draft: setattr(draft, "raw_weights", data)


def renamed(old: str, new: str) -> Spoil:
    def spoil(draft: Any) -> None:
        draft.tensors = {k.replace(old, new): v for k, v in draft.tensors.items()}

    return spoil


BIG_VOCAB = {"model": {"vocab": {"a": 0, "b": 128}}}

#: code, what spoils the folder, words that the message must hold
CASES: list[tuple[str, Spoil, tuple[str, ...]]] = [
    # the folder
    ("E_NO_CONFIG", file("adapter_config.json", b"absent"), ("adapter_model.safetensors",)),
    ("E_NO_CONFIG", only(README_DOT_md=b"x"), ("adapter_config.json", "README.md")),
    ("E_NO_CONFIG", only(), ("all else",)),
    ("E_NO_WEIGHTS", weights_replaced_by("lora.safetensors"), ("lora.safetensors",)),
    ("E_NESTED", only(checkpoint__adapter_model_DOT_safetensors=b"x"), ("checkpoint",)),
    ("E_NESTED", weights_replaced_by("checkpoint-460/adapter_config.json"), ("checkpoint-460",)),
    ("E_SHARDED", weights_replaced_by("adapter_model-00001-of-00002.safetensors"), ("00001-of",)),
    ("E_SHARDED", weights_replaced_by("adapter_model.safetensors.index.json"), ("index.json",)),
    ("E_PICKLE", weights_replaced_by("adapter_model.bin"), ("adapter_model.bin",)),
    ("E_PICKLE", only(pytorch_model_DOT_pt=b"x"), ("pytorch_model.pt",)),
    ("E_PICKLE", raw_weights(b"PK\x03\x04" + bytes(100)), ("adapter_model.safetensors",)),
    ("E_PICKLE", raw_weights(b"\x80\x04\x95" + bytes(100)), ("adapter_model.safetensors",)),
    ("E_NO_WEIGHTS", weights_replaced_by("packed-0123456789ab.bin"), ("is missing",)),
    ("E_GGUF", only(lora_DOT_gguf=b"GGUF"), ("lora.gguf",)),
    ("E_GGUF", raw_weights(b"GGUF\x03\0\0\0" + bytes(100)), ("begins with GGUF",)),
    ("E_MLX", only(adapters_DOT_npz=b"x"), ("adapters.npz",)),
    ("E_MLX", config(peft_type=None, fine_tune_type="full"), ("fine_tune_type full",)),
    ("E_MLX", add(f"{Q[17:]}.lora_a", 64, 4), ("PEFT's, but the tensors are MLX's", "q_proj")),
    ("E_MLX", config(peft_type=None, lora_parameters={}), ("MLX's, but", "q_proj.lora_A")),
    ("E_NO_WEIGHTS", weights_replaced_by("adapters.safetensors"), ("is PEFT's", "only adapters.")),
    ("E_CONFIG_VALUE", mlx(lora_parameters=None), ("lora_parameters is None",)),
    ("E_CONFIG_VALUE", mlx(lora_parameters={"rank": "8"}), ("lora_parameters.rank is 8",)),
    ("E_ALPHA", mlx(lora_parameters={"rank": 4, "scale": None}), ("lora_parameters.scale",)),
    ("E_ALPHA", mlx(lora_parameters={"alpha": 16, "scale": 10.0}), ("alpha 16", "old versions")),
    ("E_UNKNOWN_FIELD", mlx(lora_parameters={"rank": 4, "gain": 2}), ("gain = 2",)),
    ("E_RANK_MISMATCH", mlx(lora_parameters={"rank": 8, "scale": 1.0}), ("rank 4", "says 8")),
    ("E_HALF_PAIR", mlx(fine_tune_type="dora"), ("no magnitude", "q_proj")),
    ("E_DORA", lambda d: (mlx()(d), d.add(f"{MLX_Q}.m", 64)), ("not set", "q_proj.m")),
    ("E_SHAPE", lambda d: (mlx()(d), d.add(f"{MLX_Q}.lora_a", 65, 4)), ("[4, 65] (transposed)",)),
    ("E_ZERO_SHARD", lambda d: (mlx()(d), d.add(f"{MLX_Q}.lora_b", 0)), ("lora_b [0]",)),
    ("E_HALF_PAIR", lambda d: (mlx()(d), d.tensors.pop(f"{MLX_Q}.lora_b")), ("no lora_B",)),
    ("E_UNKNOWN_TENSOR", lambda d: (mlx()(d), d.add(f"{MLX_Q}.lora_a.x", 4)), ("lora_a.x",)),
    ("E_MODULES_TO_SAVE", lambda d: (mlx()(d), d.add("model.norm.weight", 64)), ("norm.weight",)),
    ("E_LFS_POINTER", raw_weights(LFS), ("adapter_model.safetensors", "Git LFS pointer")),
    ("E_LFS_POINTER", raw_config(LFS), ("adapter_config.json", "Git LFS pointer")),
    ("E_LFS_POINTER", file("tokenizer.json", LFS), ("tokenizer.json", "Git LFS pointer")),
    # the config
    ("E_CONFIG_TOO_LARGE", config(auto_mapping="x" * (64 << 10)), ("65536",)),
    ("E_CONFIG_INVALID", raw_config(b""), ("JSON",)),
    ("E_CONFIG_INVALID", raw_config(b"[1]"), ("list",)),
    ("E_CONFIG_INVALID", raw_config(b'{"r": NaN}'), ("NaN",)),
    ("E_CONFIG_INVALID", raw_config(b'{"r": "\xff"}'), ("JSON",)),
    ("E_CONFIG_INVALID", raw_config(b"[" * 60_000), ("deep",)),
    ("E_CONFIG_INVALID", raw_config(b'{"r": ' + b"9" * 5000 + b"}"), ("JSON",)),
    ("E_DUPLICATE_KEY", raw_config(b'{"peft_type":"LORA","r":4,"r":8}'), (" r ", "twice")),
    ("E_DUPLICATE_KEY", raw_config(b'{"peft_type":"LORA","rank_pattern":{"a":1,"a":2}}'), ("a",)),
    ("E_NO_PEFT_TYPE", without("peft_type"), ("lora_alpha",)),
    ("E_NO_PEFT_TYPE", raw_config(b'{"base_model": "x"}'), ("base_model",)),
    ("E_NO_PEFT_TYPE", raw_config(b"{}"), ("none",)),
    *[
        ("E_PEFT_TYPE", config(peft_type=kind), (kind,))
        for kind in ("IA3", "ADALORA", "LOHA", "LOKR", "OFT", "VERA", "PREFIX_TUNING", "XLORA")
    ],
    ("E_PEFT_TYPE", config(peft_type=["LORA"]), ("['LORA']",)),
    ("E_PEFT_TYPE", add(f"{Q}.lora_E", 4, 1), ("AdaLoRA", "lora_E")),
    ("E_UNKNOWN_FIELD", config(use_tomorrow=True), ("use_tomorrow", "True", "0.21.2")),
    ("E_UNKNOWN_FIELD", config(x_config={"a": 1}, peft_version=None), ("x_config", "not given")),
    ("E_UNKNOWN_FIELD", config(megatron_config={"a": 1}), ("megatron_config",)),
    ("E_UNKNOWN_FIELD", config(use_zero=0), ("use_zero",)),
    ("E_CONFIG_VALUE", config(r="16"), ("r is 16",)),
    ("E_CONFIG_VALUE", config(r=4.0), ("r is 4.0",)),
    ("E_CONFIG_VALUE", config(r=True), ("r is True",)),
    ("E_CONFIG_VALUE", config(r=0), ("r is 0",)),
    ("E_CONFIG_VALUE", config(lora_alpha="16"), ("lora_alpha is 16",)),
    ("E_CONFIG_VALUE", config(use_rslora="yes"), ("use_rslora is yes",)),
    ("E_CONFIG_VALUE", config(rank_pattern=["q_proj"]), ("rank_pattern is",)),
    ("E_CONFIG_VALUE", config(rank_pattern={"q_proj": [True]}), ("rank_pattern[q_proj]",)),
    ("E_CONFIG_VALUE", config(alpha_pattern={"q_proj": "x"}), ("alpha_pattern[q_proj]",)),
    ("E_CONFIG_VALUE", config(alpha_pattern={"q\ud800": 1}), (r"q\ud800",)),
    ("E_ALPHA", without("lora_alpha"), ("lora_alpha",)),
    ("E_ALPHA", config(lora_alpha=None), ("lora_alpha",)),
    ("E_ALPHA", config(alpha_pattern={"q_proj": None}), ("alpha_pattern[q_proj]",)),
    ("E_ALPHA", config(lora_alpha=1e300), ("1e+300",)),
    ("E_ALPHA", config(lora_alpha=10**400), ("lora_alpha",)),
    ("E_RANK_TOO_LARGE", config(r=513), ("r is 513", "512")),
    ("E_RANK_TOO_LARGE", config(rank_pattern={"k_proj": 600}), ("rank_pattern[k_proj]", "600")),
    ("E_PATTERN", config(rank_pattern={"(": 4}), ("regular expression",)),
    ("E_PATTERN", config(alpha_pattern={r"(?=q)q_proj": 4}), ("assert",)),
    ("E_PATTERN", config(alpha_pattern={"x" * 2000: 4}), ("1024",)),
    ("E_PATTERN", config(alpha_pattern={f"k{n}": 4 for n in range(2049)}), ("2048",)),
    ("E_PATTERN", config(alpha_pattern={"(((a{1,99}){1,99}){1,99})": 4}), ("states",)),
    *[
        ("E_INIT", config(init_lora_weights=word), (str(word),))
        for word in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new", 1, {})
    ],
    ("E_DORA", add(f"{Q}.lora_magnitude_vector", 64), ("use_dora is not set", "magnitude_vector")),
    ("E_HALF_PAIR", config(use_dora=True), ("use_dora is set", "no magnitude", "q_proj")),
    ("E_HALF_PAIR", besides("lora_magnitude_vector", use_dora=True), ("magnitude", "up_proj")),
    ("E_SHAPE", besides("lora_magnitude_vector", (1, 64), use_dora=True), ("is [1, 64]",)),
    ("E_DTYPE", besides("lora_magnitude_vector", dtype="F64", use_dora=True), ("F64",)),
    ("E_UNKNOWN_TENSOR", add(f"{Q}.lora_magnitude_vector.a.b.weight", 64), ("a.b.weight",)),
    ("E_MIXED_ADAPTERS", twice("lora_magnitude_vector"), ("belong to", "one", "two")),
    ("E_KOHYA", add(f"{Q}.dora_scale", 64), ("dora_scale",)),
    ("E_LORA_BIAS", config(use_dora=True, lora_bias=True), ("both",)),
    *[
        ("E_ALORA", config(alora_invocation_tokens=value), ("alora_invocation_tokens", said))
        for value, said in (
            ([], "is []"),
            ([-1], "[-1]"),
            ([True], "[True]"),
            ([1, "2"], "2"),
            ({}, "is {}"),
            (False, "is False"),
            ("<call>", "<call>"),
            ([1] * 257, "256"),
            ([3, 100_000_000], "100000000"),
        )
    ],
    ("E_ALORA", config(alora_invocation_tokens=[1], use_dora=True), ("both", "use_dora")),
    ("E_QALORA", config(use_qalora=True), ("use_qalora",)),
    ("E_LORA_BIAS", add(f"{Q}.lora_B.bias", 64), ("not set", "q_proj.lora_B.bias")),
    ("E_CONFIG_VALUE", config(lora_bias="all"), ("lora_bias is all",)),
    ("E_UNKNOWN_TENSOR", add(f"{Q}.lora_A.bias", 4), ("lora_A.bias",)),
    ("E_HALF_PAIR", besides("lora_B.bias", lora_bias=True), ("no lora_B.bias", "up_proj")),
    (
        "E_HALF_PAIR",
        lambda d: (besides("lora_B.bias")(d), d.tensors.pop(f"{Q}.lora_A.weight")),
        ("no lora_A",),
    ),
    ("E_SHAPE", besides("lora_B.bias", (65,), lora_bias=True), ("bias is [65]", "wanted [64]")),
    (
        "E_SHAPE",
        besides("lora_B.bias", (64, 1), lora_bias=True),
        ("bias is [64, 1]", "wanted [64]"),
    ),
    ("E_SHAPE", besides("lora_B.bias", (0,), lora_bias=True), ("bias is [0]",)),
    ("E_DTYPE", besides("lora_B.bias", dtype="F64", lora_bias=True), ("bias has dtype F64",)),
    ("E_MIXED_ADAPTERS", add(f"{Q}.lora_B.other.bias", 64), ("other", "(none)")),
    ("E_BIAS", add(f"{Q}.bias", 64), ("q_proj.bias",)),
    ("E_BIAS", add(f"{Q}.base_layer.bias", 64), ("base_layer.bias",)),
    ("E_LAYER_REPLICATION", config(layer_replication=[[0, 2], [1, 3]]), ("layer_replication",)),
    ("E_MOE", config(target_parameters=["mlp.experts.down_proj"]), ("experts",)),
    ("E_MOE", pair(f"{P}layers.0.mlp.experts.7.gate_proj", (4, 64), (96, 4)), ("experts.7",)),
    ("E_MOE", pair(f"{P}layers.0.mlp.experts.base_layer", (4, 64), (96, 4)), ("experts",)),
    ("E_MOE", pair(f"{P}layers.0.mlp.gate", (4, 64), (8, 4)), ("mlp.gate.lora_A",)),
    ("E_MOE", pair(f"{P}layers.0.mlp.shared_expert_gate", (4, 64), (1, 4)), ("expert_gate",)),
    ("E_MOE", add(f"{P}layers.0.feed_forward.router.weight", 8, 64), ("router.weight",)),
    *[
        ("E_MLA", pair(f"{P}layers.0.self_attn.{name}", (4, 64), (24, 4)), (f"{name}.lora_A",))
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    ],
    ("E_MLA", renamed("layers.0.self_attn.q_proj", "layers.0.self_attn.q_a_proj"), ("q_a_proj",)),
    (
        "E_MLA",
        lambda d: (mlx()(d), d.add("model.layers.0.self_attn.kv_b_proj.lora_a", 64, 4)),
        ("kv_b_proj.lora_a",),
    ),
    ("E_BDLORA", config(use_bdlora={"nblocks": 2}), ("use_bdlora",)),
    ("E_MONTECLORA", config(monteclora_config={"a": 1}), ("monteclora",)),
    ("E_MONTECLORA", add(f"{Q}.lora_monteclora_sampler.x", 4), ("sampler",)),
    ("E_ARROW", config(arrow_config={"top_k": 2}), ("arrow_config",)),
    ("E_KASA", config(kasa_config={"a": 1}), ("kasa_config",)),
    ("E_KASA", add(f"{Q}.lora_diag", 4), ("lora_diag",)),
    ("E_TRAINABLE_TOKENS", config(trainable_token_indices=[5]), ("1 tokens", "no rows")),
    ("E_TRAINABLE_TOKENS", config(trainable_token_indices={"wte": [5]}), ("wte",)),
    ("E_TRAINABLE_TOKENS", config(trainable_token_indices=[-1]), ("[-1]",)),
    ("E_TRAINABLE_TOKENS", trained([5, 5], 2), ("twice",)),
    ("E_VOCAB_RESIZED", trained([5, 128], 2), ("129", "128")),
    ("E_VOCAB_RESIZED", trained([5, 1 << 40], 2), (str((1 << 40) + 1), "128")),
    ("E_SHAPE", trained([5, 6], 3), ("[3, 64]", "[2, 64]")),
    ("E_VOCAB_RESIZED", saved("lm_head", 130, 64), ("130", "128")),
    ("E_SHAPE", saved("model.embed_tokens", 128, 60), ("[128, 60]", "[128, 64]")),
    ("E_DUPLICATE_MODULE", saved_and_adapted, ("lm_head.weight", "lm_head.lora_A")),
    (
        "E_TRAINABLE_TOKENS",
        add(f"{P}embed_tokens.token_adapter.trainable_tokens_delta", 1, 64),
        ("trainable_tokens_delta",),
    ),
    # the names of the tensors
    (
        "E_NO_MATCH",
        instead(
            ("base_model.model.encoder.layer.0.attention.self.query.lora_A.weight", (4, 64)),
            ("base_model.model.encoder.layer.0.attention.self.query.lora_B.weight", (64, 4)),
        ),
        ("none of 2", "query.lora_A", "q_proj is [64, 64]"),
    ),
    ("E_NO_MATCH", instead(), ("no LoRA tensor",)),
    ("E_UNKNOWN_MODULE", pair(f"{P}layers.0.self_attn.qkv_proj", (4, 64), (96, 4)), ("qkv_proj",)),
    ("E_UNKNOWN_MODULE", pair(f"{P}layers.0.mlp.q_proj", (4, 64), (64, 4)), ("mlp.q_proj",)),
    ("E_UNKNOWN_MODULE", pair(f"{P}layers.00.self_attn.k_proj", (4, 64), (32, 4)), ("layers.00",)),
    ("E_UNKNOWN_TENSOR", add(f"{Q}.lora_C", 4), ("lora_C",)),
    ("E_UNKNOWN_TENSOR", add(f"{Q}.lora_A.a.b.weight", 4, 64), ("lora_A.a.b.weight",)),
    ("E_LAYER_RANGE", pair(f"{P}layers.3.self_attn.q_proj", (4, 64), (64, 4)), ("layers.3", "2")),
    ("E_LAYER_RANGE", renamed("layers.", "layers.9"), ("layers.90", "layers 0 to 2")),
    ("E_HALF_PAIR", lambda d: d.tensors.pop(f"{Q}.lora_B.weight"), (f"{Q}.lora_A", "lora_B")),
    ("E_HALF_PAIR", lambda d: d.tensors.pop(f"{Q}.lora_A.weight"), (f"{Q}.lora_B", "lora_A")),
    ("E_MIXED_ADAPTERS", renamed("q_proj.lora_A", "q_proj.lora_A.other"), ("other", "(none)")),
    ("E_DUPLICATE_MODULE", add(f"{Q[11:]}.lora_A.weight", 4, 64), ("q_proj", "layer 0")),
    (
        "E_VISION",
        pair("base_model.model.model.visual.blocks.0.attn.qkv", (4, 64), (64, 4)),
        ("visual.blocks.0",),
    ),
    ("E_VISION", add("model.vision_tower.patch.weight", 4, 4), ("vision_tower",)),
    ("E_SHAPE", pair("base_model.model.lm_head", (4, 60), (128, 4)), ("lm_head", "[r, 64]")),
    ("E_VOCAB_RESIZED", pair("base_model.model.lm_head", (4, 64), (130, 4)), ("130", "128")),
    ("E_VOCAB_RESIZED", embedding((4, 130), (64, 4)), ("130", "128")),
    ("E_SHAPE", embedding((4, 128), (60, 4)), ("lora_embedding_B", "[64, r]")),
    ("E_EMBEDDING_LORA", pair(f"{P}embed_tokens", (4, 64), (128, 4)), ("embed_tokens.lora_A",)),
    ("E_EMBEDDING_LORA", add(f"{Q}.lora_embedding_A", 4, 64), ("q_proj.lora_embedding_A",)),
    ("E_EMBEDDING_LORA", add(f"{P}embed_tokens.lora_magnitude_vector", 64), ("magnitude",)),
    ("E_UNKNOWN_MODULE", add("transformer.wte.lora_embedding_A", 4, 128), ("wte",)),
    ("E_ALORA", alora_on_the_embedding, ("embedding",)),
    ("E_DUPLICATE_MODULE", two_heads, ("lm_head", "unembed_tokens")),
    ("E_HEAD_LORA", pair("gpt_neox.embed_out", (4, 64), (128, 4)), ("embed_out",)),
    ("E_HALF_PAIR", add(f"{P}embed_tokens.lora_embedding_A", 4, 128), ("lora_embedding_A",)),
    ("E_MODULES_TO_SAVE", add("base_model.model.lm_head.weight", 128, 64), ("[128, 64]",)),
    ("E_MODULES_TO_SAVE", add("base_model.model.score.weight", 2, 64), ("score.weight",)),
    ("E_MODULES_TO_SAVE", add("base_model.model.classifier.bias", 2), ("classifier.bias",)),
    ("E_MODULES_TO_SAVE", add(f"{P}norm.weight", 64), ("norm.weight",)),
    ("E_VOCAB_RESIZED", add(f"{P}embed_tokens.weight", 130, 64), ("130", "128")),
    ("E_BASE_COPY", add(f"{P}embed_tokens.base_layer.weight", 128, 64), ("base_layer",)),
    ("E_KOHYA", add("lora_unet_down_blocks_0.lora_down.weight", 4, 4), ("lora_unet",)),
    ("E_KOHYA", add("lora_te_text_model_0.alpha", 1), ("lora_te",)),
    ("E_LYCORIS", add(f"{Q}.hada_w1_a", 4, 4), ("hada_w1_a",)),
    ("E_LYCORIS", add(f"{Q}.lokr_w1", 4, 4), ("lokr_w1",)),
    ("E_ZERO_SHARD", add(f"{Q}.lora_A.weight", 0), ("q_proj.lora_A.weight [0]", "sharded")),
    ("E_ZERO_SHARD", add(f"{Q}.lora_A.weight", 256), ("[256]",)),
    ("E_ZERO_SHARD", pair(Q, (0, 64), (64, 0)), ("[0, 64]",)),
    # shapes and values
    ("E_SHAPE", pair(Q, (4, 65), (64, 4)), ("lora_A.weight is [4, 65]", "[r, 64]", "1 of 2")),
    ("E_SHAPE", pair(Q, (4, 64), (96, 4)), ("lora_B.weight is [96, 4]", "[64, r]")),
    ("E_SHAPE", pair(Q, (4, 64), (64, 3)), ("[64, 3]", "[64, 4]")),
    ("E_SHAPE", pair(Q, (4, 64, 1), (64, 4)), ("[4, 64, 1]",)),
    ("E_RANK_MISMATCH", pair(Q, (8, 64), (64, 8)), ("self_attn.q_proj has rank 8", "says 4")),
    ("E_RANK_MISMATCH", config(rank_pattern={"q_proj": 8}), ("rank 4", "says 8")),
    ("E_RANK_MISMATCH", lambda d: (config(r=None)(d), pair(Q, (8, 64), (64, 8))(d)), ("4, 8",)),
    ("E_DTYPE", add(f"{Q}.lora_A.weight", 4, 64, dtype="F64"), ("F64",)),
    ("E_DTYPE", add(f"{Q}.lora_A.weight", 4, 64, dtype="I8"), ("I8",)),
    ("E_NONFINITE", value(0x7FC0_0000, "F32"), (f"{Q}.lora_B.weight",)),
    ("E_NONFINITE", value(0xFF80_0000, "F32"), (f"{Q}.lora_B.weight",)),
    ("E_NONFINITE", value(0x7F81, "BF16"), (f"{Q}.lora_B.weight",)),
    ("E_NONFINITE", value(0xFF80, "BF16"), (f"{Q}.lora_B.weight",)),
    ("E_NONFINITE", value(0x7E00, "F16"), (f"{Q}.lora_B.weight",)),
    ("E_NONFINITE", value(0xFC00, "F16"), (f"{Q}.lora_B.weight",)),
    # text files
    ("E_TOKENIZER_TOO_LARGE", file("tokenizer.json", BIG_VOCAB), ("128",)),
    (
        "E_TOKENIZER_TOO_LARGE",
        file("tokenizer.json", {"model": {"vocab": [["a", 0.0]] * 129}}),
        ("128",),
    ),
    (
        "E_TOKENIZER_TOO_LARGE",
        file("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": [{"id": 200}]}),
        ("200",),
    ),
    ("E_TOKENIZER_TOO_LARGE", file("added_tokens.json", {"<x>": 128}), ("added_tokens.json",)),
    (
        "E_TOKENIZER_TOO_LARGE",
        file("added_tokens.json", {f"<{n}>": 1 for n in range(5000)}),
        ("5000",),
    ),
    (
        "E_TOKENIZER_TOO_LARGE",
        file("tokenizer_config.json", {"added_tokens_decoder": {"500": {}}}),
        ("500",),
    ),
    ("E_TOKENIZER_INVALID", file("tokenizer.json", b"{"), ("tokenizer.json",)),
    ("E_TOKENIZER_INVALID", file("tokenizer.json", b"[" * 100_000), ("tokenizer.json",)),
    ("E_TOKENIZER_INVALID", file("tokenizer.json", {"model": 1}), ("tokenizer.json",)),
    ("E_TOKENIZER_INVALID", file("added_tokens.json", {"a": "b"}), ("added_tokens.json",)),
]
#: Codes with tests of their own, in the files beside this one.
ELSEWHERE = {
    "E_NOT_A_FOLDER",
    "E_UNREADABLE",
    "E_NOT_REGULAR",
    "E_FILE_TOO_LARGE",
    "E_TRUNCATED",
    "E_HEADER_TOO_LARGE",
    "E_HEADER",
    "E_TOO_MANY_TENSORS",
    "E_OFFSETS",
    "E_SPAN",
    "E_OVERFLOW",
    "E_ROW_TOO_LARGE",
}


LIMITS = Limits()


def refusal(folder: Path, spec: ModelSpec, limits: Limits = LIMITS, **more: Any) -> AdapterInvalid:
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec, limits, **more)
    return caught.value


def test_the_unspoiled_folder_is_good(draft: Any, spec: ModelSpec) -> None:
    assert [m.module for m in inspect(draft.write(), spec).modules] == ["q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("code", "spoil", "words"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_the_folder_is_refused_by_name(
    code: str, spoil: Spoil, words: tuple[str, ...], draft: Any, spec: ModelSpec
) -> None:
    spoil(draft)
    error = refusal(draft.write(), spec)
    assert error.reason == code, error.message
    for word in words:
        assert word in error.message
    assert error.hint
    assert "\n" not in error.message + error.hint
    assert len(error.message) < 1000


def test_every_code_of_the_table_has_a_case() -> None:
    assert {case[0] for case in CASES} | ELSEWHERE == READING.keys()


@pytest.mark.parametrize(
    ("dtype", "bits", "served", "refused"),
    [
        ("F32", 0x477F_F000, "float16", True),  # 65520 rounds to infinity
        ("F32", 0x477F_EFFF, "float16", False),
        ("BF16", 0x4780, "float16", True),
        ("BF16", 0xC780, "float16", True),
        ("BF16", 0x477F, "float16", False),
        ("F32", 0x7F7F_8000, "bfloat16", True),
        ("F32", 0x7F7F_7FFF, "bfloat16", False),
        ("F16", 0x7BFF, "bfloat16", False),
        ("BF16", 0x7F7F, "float32", False),
        ("F32", 0x7F7F_FFFF, "float32", False),
        ("F32", 0x7F7F_FFFF, "auto", False),
    ],
)
def test_values_that_overflow_in_the_served_dtype_are_refused(
    dtype: str, bits: int, served: str, refused: bool, draft: Any, spec: ModelSpec
) -> None:
    value(bits, dtype)(draft)
    folder = draft.write()
    if not refused:
        assert inspect(folder, spec, served_dtype=served).modules
        return
    error = refusal(folder, spec, served_dtype=served)
    assert error.reason == "E_OVERFLOW"
    assert served in error.message and f"{Q}.lora_B.weight" in error.message
    assert "dtype" in error.hint


@pytest.mark.parametrize("at", [0, 1, 5, -1])
def test_a_nan_is_found_wherever_in_a_large_tensor_it_is(
    at: int, draft: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.adapters.value_scan.CHUNK_BYTES", 16)
    words = np.zeros(256, np.float32)
    words[at] = np.nan
    draft.put(f"{Q}.lora_B.weight", words.reshape(64, 4))
    assert refusal(draft.write(), spec).reason == "E_NONFINITE"


def test_a_tensor_rank_above_the_limit_names_the_setting(draft: Any, spec: ModelSpec) -> None:
    draft.config["r"] = None
    error = refusal(draft.write(), spec, Limits(max_rank=3))
    assert error.reason == "E_RANK_TOO_LARGE"
    assert "rank 4" in error.message and "allowed are 3" in error.message
    assert "max_rank" in error.hint


def test_a_file_above_the_size_limit_names_the_setting(draft: Any, spec: ModelSpec) -> None:
    error = refusal(draft.write(), spec, Limits(max_bytes=1000))
    assert error.reason == "E_FILE_TOO_LARGE"
    assert "max_adapter_bytes" in error.hint
    draft.path.rename(draft.path.with_name("moved"))
    draft.files["tokenizer.json"] = b" " * 2000
    error = refusal(draft.write(), spec, Limits(max_text=1000))
    assert error.reason == "E_FILE_TOO_LARGE"
    assert "tokenizer.json has 2000 bytes" in error.message


def test_a_row_larger_than_a_block_is_refused_by_the_layout(spec: ModelSpec) -> None:
    from engine.layout import BlockLayout, place
    from engine.messages import PackedModule

    with pytest.raises(AdapterInvalid) as caught:
        place([PackedModule(0, "q_proj", 1, 1.0)], BlockLayout(spec.shapes, "float32", 128))
    assert caught.value.reason == "E_ROW_TOO_LARGE"


def test_at_most_five_names_are_listed(draft: Any, spec: ModelSpec) -> None:
    for n in range(20):
        pair(f"{P}layers.{n}.self_attn.other_proj", (4, 64), (64, 4))(draft)
    message = refusal(draft.write(), spec).message
    assert message.count("other_proj") == 5
    assert "35 more" in message


@pytest.mark.parametrize("depth", [500, 900, 930, 950, 960, 970, 980, 990, 1500])
def test_a_value_of_any_depth_is_refused_and_no_crash(
    depth: int, draft: Any, spec: ModelSpec
) -> None:
    nested = b"[" * depth + b"]" * depth
    draft.raw_config = b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "x": %s}' % nested
    assert refusal(draft.write(), spec).reason in ("E_UNKNOWN_FIELD", "E_CONFIG_INVALID")


def test_foreign_names_cannot_drive_a_terminal(draft: Any, spec: ModelSpec) -> None:
    draft.add("\x1b]0;owned\x07\u202e.weight", 4)
    draft.config["\x1b[2J"] = None
    message = refusal(draft.write(), spec).message
    assert "\x1b" not in message and "\x07" not in message and "\u202e" not in message
