"""Vectors and scores: tokens a second of encoders against the floor and against others.

    python benchmarks/pooling.py [--shapes minilm,bge-large | DIR,...] [--lengths 32,256,512,ragged]
                                 [--inputs 2048] [--peers hf,st] [--documents 100] [--device auto]

A shape is that of a published model with random weights; DIR is a model folder.  First the inputs
of each length are embedded all at once, best of --rounds.  `ragged` draws lengths as texts have
them: most short, few long.  All sides begin with the same texts, each a known number of tokens, and
end with normalised vectors on the host.  Then one query is scored against --documents of 64 to 256
tokens, again and again, by a classifier of the same shape.

Ours and the peers compute in bf16 on a card.  `lorad` and `hf` pool and norm in fp32,
sentence-transformers in bf16: its vectors are coarser, and not quite of length 1.

Peers run on the same weights, in the same process, one after another: `hf` is transformers' model
with scaled dot product attention on batches of 64 that are sorted by length and padded, `st` is
sentence-transformers as its `encode` and `CrossEncoder.predict` are called.  Whoever is not
installed is left out, and said to be.

One JSON line each on stdout:
  tokens_per_s  of all inputs, tokenizing included
  tflop_s       of the multiplications that the inputs need, none for padding; `of_peak` of --peak
  over_hf, over_st  how many times as fast as those; `least_cos_hf`, `least_cos_st` say whether they
                computed the same
"""

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch

from engine.config import Device
from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

#: hidden, layers, heads, ffn of all-MiniLM-L6-v2 and of bge-large-en-v1.5.
SHAPES = {"minilm": (384, 6, 12, 1536), "bge-large": (1024, 24, 16, 4096)}
VOCAB, MAX_LENGTH = 30522, 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PEERS = ("hf", "st")
#: Inputs whose vectors are held against the peers'.
CHECKED = 64
#: What sentence-transformers takes at once unless it is told otherwise, and what is usual with it.
PEER_BATCH = 64
#: Texts that our side's tokenizer takes at once, on all its threads: a few steps' rows.
AT_ONCE = 64
#: bf16 on a card, PERFORMANCE.md's measured ceiling; of a CPU nobody knows it here.
PEAK_TFLOP_S = 740.0


@dataclass(frozen=True)
class Work:
    """Texts and what they become: a token a word, and one at each end."""

    texts: list[str]
    ids: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def flops(self, hidden: int, layers: int, ffn: int) -> float:
        """Multiplications and additions of all layers, attention included, padding not."""
        square = sum(len(tokens) ** 2 for tokens in self.ids)
        each = 2 * (4 * hidden * hidden + 2 * hidden * ffn)
        return float(layers * (each * self.tokens + 4 * hidden * square))


def draw(lengths: Sequence[int]) -> Work:
    """Random words, as many as make inputs of those lengths."""
    random = np.random.default_rng(len(lengths))
    texts, ids = [], []
    for length in lengths:
        words = random.integers(len(SPECIAL), VOCAB, length - 2).tolist()
        texts.append(" ".join(f"w{word}" for word in words))
        ids.append([2, *words, 3])
    return Work(texts, ids)


def lengths_of(name: str, count: int) -> list[int]:
    """So many alike, or ragged: log-normal with a median of 60 tokens, cut at the model's end."""
    if name != "ragged":
        return [int(name)] * count
    drawn = np.random.default_rng(5).lognormal(np.log(60), 0.9, count)
    return [int(n) for n in np.clip(drawn, 4, MAX_LENGTH)]


# ----------------------------------------------------------------- models
def write_model(folder: Path, shape: tuple[int, int, int, int], *, scores: bool) -> Path:
    """Random weights of a BERT, with all files that sentence-transformers looks for."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    hidden, layers, heads, ffn = shape
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=ffn,
        max_position_embeddings=MAX_LENGTH,
        num_labels=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config) if scores else BertModel(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    if not scores:
        steps = ("Transformer", "Pooling", "Normalize")
        modules = [
            {
                "idx": n,
                "name": str(n),
                "path": "" if n == 0 else f"{n}_{step}",
                "type": f"sentence_transformers.models.{step}",
            }
            for n, step in enumerate(steps)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(
            json.dumps({"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True})
        )
        (folder / "2_Normalize").mkdir()
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a word: what takes time is then the model's, as far as it can be."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), VOCAB))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    named = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=MAX_LENGTH, **named
    ).save_pretrained(folder)


# ----------------------------------------------------------------- sides
def sides(folder: Path, options: argparse.Namespace, *, scores: bool) -> Iterator[Any]:
    """(name, function) of ours and each peer that is there, one in memory at a time."""
    device = options.device
    makers = {"lorad": partial(ours, rows=options.rows), "hf": hf, "st": st}
    for name in ("lorad", *options.peers):
        package = {"hf": "transformers", "st": "sentence_transformers"}.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            print(json.dumps({"side": name, "left_out": f"{package} is not installed"}))
            continue
        with makers[name](folder, device, scores) as function:
            yield name, function
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def ours(folder: Path, device: Device, scores: bool, rows: int = 0) -> Iterator[Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()

    def encoded(inputs: Sequence[Any]) -> Iterator[Any]:
        """A thread is ahead of the engine, which reads these as it has room for them."""
        with ThreadPoolExecutor(1) as thread:
            parts = [inputs[at : at + AT_ONCE] for at in range(0, len(inputs), AT_ONCE)]
            for part in [thread.submit(tokenizer.encode_batch_fast, part) for part in parts]:
                yield from part.result()

    def embed(texts: list[str]) -> Any:
        return engine.embed(one.ids for one in encoded(texts))

    def score(query: str, texts: list[str]) -> Any:
        one, other = tee(encoded([(query, text) for text in texts]))
        found = engine.classify((p.ids for p in one), types=(p.type_ids for p in other))
        return [result.logits for result in found]

    config = PoolingConfig(
        model=str(folder), device=device, max_num_seqs=1024, max_batch_tokens=rows
    )
    with PoolingEngine(config) as engine:
        yield score if scores else embed


@contextmanager
def hf(folder: Path, device: Device, scores: bool) -> Iterator[Any]:
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = AutoModelForSequenceClassification if scores else AutoModel
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = kind.from_pretrained(folder, dtype=dtype).to(device).eval()

    def batches(texts: list[str], query: str | None) -> Iterator[Any]:
        for at in range(0, len(texts), PEER_BATCH):
            chosen = texts[at : at + PEER_BATCH]
            first = chosen if query is None else [query] * len(chosen)
            second = None if query is None else chosen
            yield tokenizer(first, second, padding=True, truncation=True, return_tensors="pt").to(
                device
            )

    def embedded(batch: Any) -> torch.Tensor:
        hidden, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    @torch.no_grad()
    def sorted_by_length(texts: list[str], query: str | None, run: Any) -> np.ndarray:
        """So that a batch is padded little, as is usual; the answers in the texts' order."""
        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
        made = torch.cat([run(b) for b in batches([texts[n] for n in order], query)])
        found = torch.empty_like(made)
        found[order] = made
        return found.cpu().numpy()

    def embed(texts: list[str]) -> np.ndarray:
        return sorted_by_length(texts, None, embedded)

    def score(query: str, texts: list[str]) -> np.ndarray:
        return sorted_by_length(texts, query, lambda batch: model(**batch).logits.float())

    yield score if scores else embed


@contextmanager
def st(folder: Path, device: Device, scores: bool) -> Iterator[Any]:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    named: dict[str, Any] = {"device": device, "model_kwargs": {"dtype": dtype}}
    if scores:
        judge = CrossEncoder(str(folder), **named)
        yield lambda query, texts: judge.predict([(query, text) for text in texts])
    else:
        model = SentenceTransformer(str(folder), **named)
        yield lambda texts: model.encode(texts, batch_size=PEER_BATCH, convert_to_tensor=False)


# ----------------------------------------------------------------- measurements
def best(work: Callable[[], Any], rounds: int) -> float:
    """Seconds, after one round that nobody counts."""
    work()
    seconds = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds = min(seconds, time.perf_counter() - started)
    return seconds


def alike(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosines of rows.  A vector that was normed in bf16 is not of length 1, by up to 0.004: that
    says nothing of its direction."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    cosines: np.ndarray = (ours * theirs).sum(-1) / lengths
    return cosines


def embedding(
    name: str, folder: Path, options: argparse.Namespace, dims: tuple[int, int, int] | None
) -> None:
    works = {n: draw(lengths_of(n, options.inputs)) for n in options.lengths}
    found: dict[tuple[str, str], float] = {}
    vectors: dict[tuple[str, str], np.ndarray] = {}
    for side, embed in sides(folder, options, scores=False):
        for length, work in works.items():
            found[side, length] = seconds = best(partial(embed, work.texts), options.rounds)
            vectors[side, length] = np.asarray(embed(work.texts[:CHECKED]))
            line: dict[str, Any] = {
                "case": "embed",
                "shape": name,
                "length": length,
                "side": side,
                "inputs": len(work.ids),
                "tokens": work.tokens,
                "tokens_per_s": round(work.tokens / seconds),
            }
            if dims is not None:
                tflop_s = work.flops(*dims) / seconds / 1e12
                line["tflop_s"] = round(tflop_s, 3)
                if options.device == "cuda":
                    line["of_peak"] = round(tflop_s / options.peak, 3)
            print(json.dumps(line), flush=True)
    for length in works:
        told: dict[str, Any] = {"case": "compared", "shape": name, "length": length}
        for peer in options.peers:
            if (peer, length) in found:
                told[f"over_{peer}"] = round(found[peer, length] / found["lorad", length], 2)
                cosines = alike(vectors["lorad", length], vectors[peer, length])
                told[f"least_cos_{peer}"] = round(float(cosines.min()), 6)
        if length == "ragged" and "over_st" in told:
            over = told["over_st"]
            told["bars"] = {"ragged_over_st": {"value": over, "limit": 3.0, "met": over >= 3.0}}
        print(json.dumps(told), flush=True)


def reranking(name: str, folder: Path, options: argparse.Namespace) -> None:
    query = draw([16]).texts[0]
    spread = np.random.default_rng(6).integers(64, 257, options.documents)
    texts = draw([int(n) for n in spread]).texts
    for side, score in sides(folder, options, scores=True):
        score(query, texts)
        spent = []
        for _ in range(options.repeats):
            started = time.perf_counter()
            score(query, texts)
            spent.append(1e3 * (time.perf_counter() - started))
        spent.sort()
        line = {
            "case": "rerank",
            "shape": name,
            "side": side,
            "documents": len(texts),
            "p50_ms": round(statistics.median(spent), 2),
            "p99_ms": round(spent[int(0.99 * (len(spent) - 1))], 2),
        }
        print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), type=_words)
    parser.add_argument("--lengths", default="32,256,512,ragged", type=_words)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--rows", type=int, default=0, help="of a step of ours; 0 = its own choice")
    parser.add_argument("--peers", default=",".join(PEERS), type=_words)
    parser.add_argument("--peak", type=float, default=PEAK_TFLOP_S, help="TFLOP/s of the card")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args(argv)
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}: {', '.join(PEERS)}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.shapes:
            if name not in SHAPES:
                embedding(Path(name).name, Path(name), options, None)
                continue
            shape, root = SHAPES[name], Path(scratch) / name
            hidden, layers, _, ffn = shape
            model = write_model(root / "embed", shape, scores=False)
            embedding(name, model, options, (hidden, layers, ffn))
            if options.documents:
                reranking(name, write_model(root / "score", shape, scores=True), options)
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
