"""A Qwen3 of two layers with random weights and a tokenizer of bytes, that knows the words yes and
no and the marks of a chat; and PEFT adapters for it.

Made of numpy: nothing here waits for torch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, LENGTH = 32, 48, 4, 2, 8, 2, 640
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("yes", "no", "<think>", "</think>")
VOCAB = 256 + len(SPECIALS) + len(WORDS)
END, YES, NO = 256, 256 + len(SPECIALS), 257 + len(SPECIALS)
DIMS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}


def write_qwen3(folder: Path, *, embeds: bool = False) -> Path:
    """One that generates, or with `embeds` one that lies there as Qwen3-Embedding does."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)

    def weight(*shape: int) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    start = "" if embeds else "model."
    tensors = {
        f"{start}embed_tokens.weight": weight(VOCAB, HIDDEN),
        f"{start}norm.weight": 1 + weight(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"{start}layers.{layer}"
        for module, (d_in, d_out) in DIMS.items():
            tensors[f"{at}.{module}.weight"] = weight(d_out, d_in)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = 1 + weight(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{norm}.weight"] = 1 + weight(HEAD_DIM)
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    _write_tokenizer(folder, ends=embeds)
    if embeds:
        _write_pooling(folder)
    return folder


def write_qwen3_adapter(folder: Path, seed: int, *, rank: int = 4, labels: int = 0) -> Path:
    """On every q and down projection; `labels`: with a score of its own, of so many."""
    folder.mkdir(parents=True)
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for module in ("self_attn.q_proj", "mlp.down_proj"):
            at, (d_in, d_out) = f"base_model.model.model.layers.{layer}.{module}", DIMS[module]
            for half, shape in (("A", (rank, d_in)), ("B", (d_out, rank))):
                tensors[f"{at}.lora_{half}.weight"] = random.standard_normal(shape, np.float32)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    }
    if labels:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
        tensors["base_model.model.score.weight"] = random.standard_normal(
            (labels, HIDDEN), np.float32
        )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _write_tokenizer(folder: Path, *, ends: bool) -> None:
    """A token a byte, and the words; with `ends` an end mark behind each text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIALS[0]}",
            pair=f"$A $B {SPECIALS[0]}",
            special_tokens=[(SPECIALS[0], END)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": SPECIALS[2], "pad_token": SPECIALS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def _write_pooling(folder: Path) -> None:
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds)
    ]
    prompts = {"query": "Instruct: Find it\nQuery:", "document": ""}
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True, "include_prompt": True}),
        ("config_sentence_transformers.json", {"prompts": prompts}),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
