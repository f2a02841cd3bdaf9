"""A BERT of two layers with random weights and a tokenizer of bytes, and PEFT adapters for it.

Made of numpy: nothing here waits for torch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

HIDDEN, FFN, HEADS, LAYERS, LENGTH = 32, 64, 4, 2, 64
SPECIALS = ("[CLS]", "[SEP]", "[PAD]", "[UNK]")
VOCAB = 256 + len(SPECIALS)
DIMS = {
    "attention.self.query": (HIDDEN, HIDDEN),
    "attention.self.key": (HIDDEN, HIDDEN),
    "attention.self.value": (HIDDEN, HIDDEN),
    "attention.output.dense": (HIDDEN, HIDDEN),
    "intermediate.dense": (HIDDEN, FFN),
    "output.dense": (FFN, HIDDEN),
}
NORMS = ("attention.output.LayerNorm", "output.LayerNorm")


def write_bert(
    folder: Path, *, labels: int = 0, pooling: str = "", marks: tuple[str, ...] = ()
) -> Path:
    """`labels`: a classifier of so many; `pooling`: the files of sentence-transformers, with that
    mode (`cls`, `mean`) and a length of 1; `marks`: more tokens, behind the others."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)

    def weight(*shape: int) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    start = "bert." if labels else ""
    tensors = {
        f"{start}embeddings.word_embeddings.weight": weight(VOCAB + len(marks), HIDDEN),
        f"{start}embeddings.position_embeddings.weight": weight(LENGTH, HIDDEN),
        f"{start}embeddings.token_type_embeddings.weight": weight(2, HIDDEN),
        f"{start}embeddings.LayerNorm.weight": 1 + weight(HIDDEN),
        f"{start}embeddings.LayerNorm.bias": weight(HIDDEN),
        f"{start}pooler.dense.weight": weight(HIDDEN, HIDDEN),
        f"{start}pooler.dense.bias": weight(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"{start}encoder.layer.{layer}"
        for module, (d_in, d_out) in DIMS.items():
            tensors[f"{at}.{module}.weight"] = weight(d_out, d_in)
            tensors[f"{at}.{module}.bias"] = weight(d_out)
        for norm in NORMS:
            tensors[f"{at}.{norm}.weight"] = 1 + weight(HIDDEN)
            tensors[f"{at}.{norm}.bias"] = weight(HIDDEN)
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "vocab_size": VOCAB + len(marks),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "type_vocab_size": 2,
        "dtype": "float32",
    }
    if labels:
        config["id2label"] = {str(n): f"class {n}" for n in range(labels)}
        tensors["classifier.weight"] = weight(labels, HIDDEN)
        tensors["classifier.bias"] = weight(labels)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    _write_tokenizer(folder, marks)
    if pooling:
        _write_pooling(folder, pooling)
    return folder


def write_bert_adapter(folder: Path, seed: int, *, rank: int = 4, labels: int = 0) -> Path:
    """On every query and value; `labels`: with a classifier of its own, of so many."""
    folder.mkdir(parents=True)
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for module in ("query", "value"):
            at = f"base_model.model.encoder.layer.{layer}.attention.self.{module}"
            for half, shape in (("A", (rank, HIDDEN)), ("B", (HIDDEN, rank))):
                tensors[f"{at}.lora_{half}.weight"] = random.standard_normal(shape, np.float32)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["query", "value"],
        "bias": "none",
    }
    if labels:
        config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
        for name, shape in (("weight", (labels, HIDDEN)), ("bias", (labels,))):
            at = f"base_model.model.classifier.{name}"
            tensors[at] = random.standard_normal(shape, np.float32)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _write_tokenizer(folder: Path, marks: tuple[str, ...]) -> None:
    """A token a byte; [CLS] in front, [SEP] behind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*letters, *SPECIALS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(text, vocab[text]) for text in SPECIALS[:2]],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles | {"unk_token": "[UNK]"}))


def _write_pooling(folder: Path, mode: str) -> None:
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    told = {"word_embedding_dimension": HIDDEN, "pooling_mode": mode}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
