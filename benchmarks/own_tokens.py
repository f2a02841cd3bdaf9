"""Time of the end of a decode step on one card, by the room for token ids of adapters' own.

    python benchmarks/own_tokens.py [--rows 64,1] [--extra 0,256,1024] [--own 0,8,64]
                                    [--tokens 2,256]

Llama-3-8B's head and vocabulary, in bf16.  One JSON line a case, median microseconds on the device
(CUDA events, queued behind a kernel that sleeps, so that no launch is waited for):

- `head_us`: hidden states to logits, into the buffer that a graph writes to.
- `draw_us`: logits to tokens on their way down, greedy; `draw_top_p_us` with top_p = 0.9.
- `ends_us`: what adapters with `tokens` ids of their own do to the logits of `own` rows, an adapter
  each, and `embed_us` what they do to the embeddings of all, base's included: both outside of the
  graph, in a launch for all of them.  With `_apart`: adapter by adapter, as those whose ends have
  factors besides.
- `launch_us`: what `Sampler.launch` takes of the step loop, host time.

A case without own rows draws from the base's columns alone, whatever `extra` is.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import checkout  # noqa: F401
import torch

from engine.adapters.own_rows import OwnTable
from engine.kernels.lora_meta import LoraMeta, LoraRows, Segment
from engine.messages import SamplingParams
from engine.models.decoder import Decoder
from engine.models.layers import Build
from engine.models.spec import ModelSpec
from engine.sampler import Sampler, SamplerLimits
from engine.sequence import Sequence as Row

VOCAB, HIDDEN, EOS = 128256, 4096, 128001
#: Cycles of the kernel that the work queues behind: about a millisecond.
SLEEP = 2_000_000


def make_decoder(extra: int, device: torch.device) -> Decoder:
    """No layers are run: one is there."""
    spec = ModelSpec(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=1024,
        max_position=1024,
        rms_eps=1e-5,
        tied=False,
        dtype="bfloat16",
        extra_vocab=extra,
    )
    decoder = Decoder(spec, Build(device, torch.bfloat16, False))
    for table in (decoder.embedding, decoder.head):
        table.data.normal_(0, HIDDEN**-0.5)
    return decoder


def own_rows(own: int, tokens: int, device: torch.device) -> tuple[LoraMeta, LoraMeta]:
    """Of the first rows, each of an adapter with `tokens` ids behind the base's, at both ends: for
    all of them at once, and a segment a row."""
    arena = torch.randn(own * tokens, HIDDEN, device=device).to(torch.bfloat16)
    segments, slots, table = [], {}, OwnTable(arena.view(-1), own)
    for n in range(own):
        piece = arena[n * tokens : (n + 1) * tokens]
        ids = torch.arange(VOCAB, VOCAB + tokens, device=device)
        places = piece.storage_offset() + torch.arange(tokens, device=device) * HIDDEN
        rows = LoraRows(1.0, tokens, (piece,), (), ids=ids, places=places)
        slots[n] = {(1, "embed_tokens.rows"): rows, (1, "lm_head.rows"): rows}
        segments.append(Segment(n, n + 1, n))
        table.note(n, 1, slots[n])
    runs = [(n, 1, entry) for n in range(own) if (entry := table.find(n, "lm_head"))]
    return LoraMeta(own=table.send(runs, own)), LoraMeta(tuple(segments), slots)


def sequences(rows: int, own: int, tokens: int, **wish: Any) -> list[Row]:
    return [
        Row(
            request_id=str(n),
            tokens=[3, 4, 5],
            num_prompt=2,
            sampling=SamplingParams(seed=n, **wish),
            rev=None,
            identity="base",
            salt="",
            priority=50,
            order=n,
            num_tokens=VOCAB + tokens if n < own else 0,
        )
        for n in range(rows)
    ]


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median microseconds on the device."""
    found = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return round(statistics.median(found[3:]), 1)


@torch.inference_mode()
def measure(decoder: Decoder, rows: int, own: int, tokens: int, repeats: int) -> dict[str, float]:
    device, num_ids = decoder.embedding.device, decoder.spec.num_ids
    sampler = Sampler(SamplerLimits(VOCAB, (EOS,), num_ids), device=device, max_rows=rows)
    hidden = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16)
    buffer = decoder.new_logits(rows)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    found = {"head_us": timed(lambda: decoder.logits(hidden, out=buffer), repeats)}
    for name, wish in (("draw", {"temperature": 0.0}), ("draw_top_p", {"top_p": 0.9})):
        seqs = sequences(rows, own, tokens, **wish)
        drawn: list[Any] = []
        found[f"{name}_us"] = timed(
            lambda seqs=seqs, to=drawn: to.append(sampler.launch(buffer, seqs, tokens=ids)), repeats
        )
        sampler.finish(drawn[-1])
    seqs, launches = sequences(rows, own, tokens, temperature=0.0), []
    for _ in range(repeats):
        begun = time.perf_counter()
        flight = sampler.launch(buffer, seqs, tokens=ids)
        launches.append(time.perf_counter() - begun)
        sampler.finish(flight)
    found["launch_us"] = round(1e6 * statistics.median(launches), 1)
    if own:
        told = torch.randint(0, VOCAB + tokens, (rows,), device=device)
        for meta, how in zip(own_rows(own, tokens, device), ("", "_apart"), strict=True):
            for name, work in (
                ("ends", lambda meta=meta: decoder.adapt_logits(buffer, hidden, meta)),
                ("embed", lambda meta=meta: decoder.embed(told, meta)),
            ):
                found[f"{name}{how}_us"] = timed(work, repeats)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="64,1")
    parser.add_argument("--extra", default="0,256,1024")
    parser.add_argument("--own", default="0,8,64")
    parser.add_argument("--tokens", default="2,256")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no card: this measures one", file=sys.stderr)
        return 1
    numbers = {
        name: [int(n) for n in getattr(options, name).split(",")]
        for name in ("rows", "extra", "own", "tokens")
    }
    for extra in numbers["extra"]:
        decoder = make_decoder(extra, torch.device("cuda"))
        for rows in numbers["rows"]:
            for own in (n for n in numbers["own"] if n <= rows):
                for tokens in numbers["tokens"] if own else [0]:
                    if tokens <= extra:
                        case = {"extra": extra, "rows": rows, "own": own, "tokens": tokens}
                        case |= measure(decoder, rows, own, tokens, options.repeats)
                        print(json.dumps(case), flush=True)
        del decoder
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
