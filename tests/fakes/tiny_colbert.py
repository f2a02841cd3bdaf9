"""The tiny BERT as a model of late interaction, in either dialect that such are published in.

Made of numpy: nothing here waits for torch.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.fakes.tiny_bert import HIDDEN, VOCAB, write_bert

WIDTH, QUERY_LENGTH, DOCUMENT_LENGTH = 8, 12, 20
CLS, SEP, MASK, QUERY, DOCUMENT = 256, 257, VOCAB, VOCAB + 1, VOCAB + 2
Dialect = Literal["pylate", "colbert"]
MARKS = {"pylate": ("[Q] ", "[D] "), "colbert": ("[unused0]", "[unused1]")}


def write_colbert(folder: Path, dialect: Dialect, **told: Any) -> Path:
    """`told`: fields of the file that says how texts are read, in the dialect's own words; None
    leaves one out."""
    write_bert(folder, marks=("[MASK]", *MARKS[dialect]))
    roles = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder / "tokenizer_config.json", roles | {"mask_token": "[MASK]"})
    projection = np.random.default_rng(7).standard_normal((WIDTH, HIDDEN), np.float32)
    (_write_pylate if dialect == "pylate" else _write_colbert)(folder, projection, told)
    return folder


def _write_pylate(folder: Path, projection: Any, told: dict[str, Any]) -> None:
    listed = (("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense"))
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"{kind}.{kind.rpartition('.')[2]}"}
        for n, (path, kind) in enumerate(listed)
    ]
    ours = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "prompts": {"query": "", "document": ""},
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": QUERY_LENGTH,
        "document_length": DOCUMENT_LENGTH,
        "attend_to_expansion_tokens": False,
        "do_query_expansion": True,
        "skiplist_words": [".", "!"],
    }
    dense = {
        "in_features": HIDDEN,
        "out_features": WIDTH,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "module_input_name": "token_embeddings",
        "module_output_name": "token_embeddings",
    }
    _write(folder / "modules.json", modules)
    _write(folder / "config_sentence_transformers.json", _changed(ours, told))
    # What it was saved with is the length of what it had read last.
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 7, "do_lower_case": False})
    _write(folder / "1_Dense" / "config.json", dense)
    save_file({"linear.weight": projection}, folder / "1_Dense" / "model.safetensors")


def _write_colbert(folder: Path, projection: Any, told: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    _write(folder / "config.json", config | {"architectures": ["HF_ColBERT"]})
    tensors = {f"bert.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": projection}, folder / "model.safetensors")
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "dim": WIDTH,
        "query_maxlen": QUERY_LENGTH,
        "doc_maxlen": DOCUMENT_LENGTH,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
        "interaction": "colbert",
        "lr": 1e-5,
        "nbits": 2,
        "meta": {"version": "colbert-v0.4"},
    }
    _write(folder / "artifact.metadata", _changed(metadata, told))


def _changed(values: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (values | told).items() if value is not None}


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
