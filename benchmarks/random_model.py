"""Write a decoder of a given shape with seeded random weights, as a Hugging Face folder.

    python benchmarks/random_model.py OUT [--shape llama3-8b|tiny]

Right for speed, never enough for correctness.  Weights are drawn on the GPU where there is one.
The tokenizer knows a word of plain letters for every id, so that whatever the weights say is text,
and every token of a stream is a piece of it.
"""

import argparse
import itertools
import json
import string
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "llama3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 65536,  # room to decode at 32k
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "tiny": {  # to run the benchmarks themselves anywhere
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "bos_token_id": 510,
        "eos_token_id": 511,
    },
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def ensure_model(folder: Path) -> None:
    """Write the shape of Llama-3-8B, unless a model is there."""
    if not (folder / "config.json").exists():
        write(folder, SHAPES["llama3-8b"])


def write(out: Path, shape: dict[str, float], dtype: torch.dtype = torch.bfloat16) -> None:
    """One shard a layer, so that no more than a layer is held on the host."""
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    hidden, ffn, vocab = (int(shape[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q = int(shape["num_attention_heads"] * shape["head_dim"])
    kv = int(shape["num_key_value_heads"] * shape["head_dim"])

    def draw(rows: int, columns: int) -> torch.Tensor:
        noise = torch.randn(rows, columns, generator=generator, device=device)
        noise *= columns**-0.5
        return noise.to(dtype).cpu()

    places: dict[str, str] = {}

    def shard(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, out / name)
        places.update(dict.fromkeys(tensors, name))

    ones = torch.ones(hidden, dtype=dtype)
    linear = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    for layer in range(int(shape["num_hidden_layers"])):
        stem = f"model.layers.{layer}"
        tensors = {f"{stem}.{k}.weight": draw(*size) for k, size in linear.items()}
        tensors[f"{stem}.input_layernorm.weight"] = ones.clone()
        tensors[f"{stem}.post_attention_layernorm.weight"] = ones.clone()
        shard(f"model-{layer:05d}.safetensors", tensors)
    head = {"model.embed_tokens.weight": draw(vocab, hidden), "lm_head.weight": draw(vocab, hidden)}
    shard("model-head.safetensors", head | {"model.norm.weight": ones})
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **shape,
    }
    write_tokenizer(out, vocab)
    (out / "config.json").write_text(json.dumps(config, indent=2))


def write_tokenizer(out: Path, vocab: int) -> None:
    """Printable ASCII, a character an id, then words of four letters.

    No id is half a character: such a token would have to wait in the stream for its other half.
    """
    characters = [chr(c) for c in range(0x21, 0x7F)] + ["\u0120"]  # U+0120 spells a space
    words = ("\u0120" + "".join(w) for w in itertools.product(string.ascii_lowercase, repeat=4))
    tokens = itertools.islice(itertools.chain(characters, words), vocab)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level | {"use_regex": False},
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [],
        },
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    (out / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    options = parser.parse_args()
    write(options.out, SHAPES[options.shape])


if __name__ == "__main__":
    main()
