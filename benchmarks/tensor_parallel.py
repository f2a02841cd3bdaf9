"""One model on 1, 2, .. GPUs: decode and prefill, what adapters add, and whether it is right.

    python benchmarks/tensor_parallel.py --model DIR [--sizes 1,2] [--cases 1:0,1:1,64:0,..]
                                         [--prompts 2048,8192] [--adapters-for-prefill 0,1]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  A case is batch:adapters, as in `decode.py`: adapters are of rank 16 on all
projections, random, and all rows use one in turn.  Every size has a process of its own, whose ranks
end with it; one that fails, or a case, prints its error, and the others go on.

JSON lines on stdout, each with `tensor_parallel`:
  ready_s                what a start took; `graphs` is how many were captured
  step_ms                of a decode step, median over those in which all streams make a token
  collectives            a step: what ranks told each other, graphs' own included
  added_ms               step_ms less the base's at the same batch
  tokens_per_s           of one prompt of `prefill` tokens that nobody has cached, up to its first
                         token; median of --repeats
  against                the first size, which the others are held against: greedy tokens of the
                         base and of one PEFT adapter that are the same up to the first that differs
                         (`same_tokens` of `of`), the largest and the mean difference of a prompt's
                         log-probabilities, and what `step_ms` and `tokens_per_s` became (`speedup`)
  messages               microseconds of what ranks tell each other, alone, in rows of the model's
                         width: `sum` of a layer's output, and `gather` of rows of RANK numbers,
                         which an adapter whose A is cut by its rank would need twice a layer at
                         the least: `fully_sharded_adds_ms` a step, where A is on every rank now
Mixed steps replay no graph here (--graph-tokens 0), which shortens the start.  With --keep, answers
and packed files stay in DIR: a size that is run later can be held --against one of before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch
from decode import Bench, step_seconds
from random_model import ensure_model
from rig import RANK, DeviceClock, Rig, random_prompt
from safetensors.torch import save_file

from engine.adapters.pack import pack_into
from engine.config import EngineConfig
from engine.layout import MODULES
from engine.messages import AddRevision, SamplingParams, Submit
from engine.models.ranks import Ranks
from engine.models.spec import read_spec

CASES = "1:0,1:1,64:0,64:1,64:8,64:64"
#: Tokens of a first run, for kernels and rare plans; then those that are measured.
WARM, MEASURED = 12, 64
#: Of the prompts whose answers are compared, and of the answers.
CHECKED, ANSWER = 96, 24
#: A size that has said nothing for so long has hung: it is ended, and says where it was.
SILENT_SECONDS = 420


# ----------------------------------------------------------------- one size
class Size:
    """An engine of one size, and what is measured of it."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options = options
        cases = parsed(options.cases)
        lengths = [int(n) for n in options.prompts.split(",") if n]
        decoding, answering = options.context + WARM + MEASURED, CHECKED + ANSWER
        longest = 8 + max(decoding, answering, *lengths)
        config = EngineConfig(
            model=str(options.model),
            device=options.device,
            max_num_seqs=max(batch for batch, _ in cases),
            max_model_len=longest,
            graph_tokens=options.graph_tokens,
            slots=1 + max(1, *(adapters for _, adapters in cases)),
            max_rank=RANK,
            ram_cache=2 << 30,
            tensor_parallel=options.size,
        )
        started = time.perf_counter()
        self.rig = Rig(config, scratch)
        self.core, self.bench = self.rig.core, Bench(self.rig)
        self._rng = np.random.default_rng(0)
        self._scratch = scratch
        print(self.core.machine.memory.table(), file=sys.stderr, flush=True)
        graphs = self.bench.graphs
        self.say(
            ready_s=round(time.perf_counter() - started, 1),
            device=self.core.info.device_name,
            dtype=self.core.info.dtype,
            torch=torch.__version__,
            model=options.model.name,
            graphs=graphs.num_graphs if graphs else 0,
            num_blocks=self.core.info.num_blocks,
            block_bytes=self.core.info.block_bytes,
            weight_bytes=self.core.info.weight_bytes,
        )

    def say(self, **told: Any) -> None:
        line = {"benchmark": "tensor_parallel", "tensor_parallel": self._options.size, **told}
        print(json.dumps(line), flush=True)

    def attempt(self, what: dict[str, Any], measure: Any) -> None:
        """A case's border: the others go on."""
        try:
            self.say(**what, **measure())
        except Exception as error:
            traceback.print_exc()
            self.say(**what, error=f"{type(error).__name__}: {error}")

    @property
    def collectives(self) -> int:
        crew = self.core.crew
        return crew.ranks.count if crew is not None else 0

    def decode(self, batch: int, adapters: int) -> dict[str, Any]:
        self.rig.load(range(adapters))
        prompts = self.bench.prompts(batch, adapters, self._options.context)
        self.bench.run(prompts, WARM)
        before, passes = self.collectives, self.core.runner.forward_passes
        replays = self.bench.graphs.num_replays if self.bench.graphs else 0
        gaps = step_seconds(self.bench.run(prompts, MEASURED), batch)
        passes = self.core.runner.forward_passes - passes
        ordered = sorted(gaps)
        return {
            "step_ms": round(1e3 * statistics.median(gaps), 3),
            "step_p99_ms": round(1e3 * ordered[int(0.99 * (len(gaps) - 1))], 3),
            "collectives": round((self.collectives - before) / passes, 2),
            "graph_steps": (self.bench.graphs.num_replays if self.bench.graphs else 0) - replays,
            "steps": passes,
        }

    def prefill(self, length: int, adapters: int) -> dict[str, Any]:
        self.rig.load(range(adapters))
        seconds, counts = [], []
        for _ in range(1 + self._options.repeats):  # the first one warms up
            ids = random_prompt(self._rng, length, self.core.machine.vocab_size)
            before, passes = self.collectives, self.core.runner.forward_passes
            began = time.perf_counter()
            steps = self.bench.run([(ids, 0 if adapters else None)], 1)
            seconds.append(steps[0][0] - began)
            counts.append((self.collectives - before) / (self.core.runner.forward_passes - passes))
        return {
            "tokens_per_s": round(length / statistics.median(seconds[1:])),
            "collectives": round(counts[-1], 2),
        }

    def answers(self) -> dict[str, Any]:
        """Of the base and of one real adapter: greedy tokens, and a prompt's log-probabilities."""
        rng = np.random.default_rng(7)
        vocab = self.core.machine.vocab_size
        prompts = [random_prompt(rng, CHECKED, vocab) for _ in range(4)]
        manifest = pack_into(
            self._adapter(),
            self._options.model,
            self._scratch / "packed",
            block_size=self.core.info.block_size,
            dtype=self.core.info.dtype,
            max_rank=RANK,
            ranks=self._options.size,
        )
        self.rig.call(partial(AddRevision, manifest=manifest))
        return {
            name: self._ask([(ids, rev) for ids in prompts])
            for name, rev in (("base", None), ("adapter", manifest.rev))
        }

    def _ask(self, work: Sequence[tuple[list[int], str | None]]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=ANSWER, ignore_eos=True, prompt_logprobs=0
        )
        tokens: dict[str, list[int]] = {str(n): [] for n in range(len(work))}
        told: dict[str, list[float]] = {}
        for n, (ids, rev) in enumerate(work):
            self.core.take(Submit(request_id=str(n), prompt=ids, sampling=sampling, rev=rev))
        left = len(work)
        while left:
            frame = self.core.step()
            for delta in frame.deltas:
                if delta.finish_reason == "error":
                    raise RuntimeError(delta.message or delta.code)
                tokens[delta.request_id] += delta.tokens
                if delta.prompt_logprobs:
                    known = [one.logprob for one in delta.prompt_logprobs if one is not None]
                    told[delta.request_id] = known
                left -= delta.finish_reason is not None
            if left and self.core.idle:
                self.core.wait()
        return {"tokens": list(tokens.values()), "logprobs": [told[name] for name in tokens]}

    def _adapter(self) -> Path:
        """A PEFT folder, the same for every size."""
        folder = self._scratch.parent / "adapter"
        if folder.exists():
            return folder
        spec = read_spec(self._options.model)
        generator = torch.Generator().manual_seed(3)
        tensors = {}
        for layer in range(spec.num_layers):
            for module in MODULES:
                d_in, d_out = spec.shapes.of(module)
                part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                stem = f"base_model.model.model.layers.{layer}.{part}.{module}"
                a = torch.randn(RANK, d_in, generator=generator) * d_in**-0.5
                b = torch.randn(d_out, RANK, generator=generator) * 0.1 * RANK**-0.5
                tensors[f"{stem}.lora_A.weight"] = a.to(torch.bfloat16)
                tensors[f"{stem}.lora_B.weight"] = b.to(torch.bfloat16)
        staged = folder.with_name("staged")
        staged.mkdir()
        save_file(tensors, staged / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": list(MODULES),
        }
        (staged / "adapter_config.json").write_text(json.dumps(config))
        staged.rename(folder)
        return folder


def run_size(options: argparse.Namespace) -> None:
    ensure_model(options.model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of a model that was drawn there
    scratch = options.scratch / str(options.size)
    scratch.mkdir(parents=True, exist_ok=True)
    size = Size(options, scratch)
    size.attempt({"case": "answers"}, lambda: _keep(size.answers(), scratch / "answers.json"))
    for batch, adapters in parsed(options.cases):
        size.attempt({"batch": batch, "adapters": adapters}, partial(size.decode, batch, adapters))
    for length in (int(n) for n in options.prompts.split(",") if n):
        for adapters in (int(n) for n in options.adapters_for_prefill.split(",") if n):
            size.attempt(
                {"prefill": length, "adapters": adapters}, partial(size.prefill, length, adapters)
            )


# ----------------------------------------------------------------- messages alone
def run_rank(options: argparse.Namespace) -> None:
    """One rank of those that only talk; the first one tells what it took."""
    cards = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda" if cards else "cpu")
    ranks = Ranks(options.rank, options.size, store_fd=options.store, device=device)
    spec = read_spec(options.model)
    dtype = torch.bfloat16 if cards else torch.float32
    told: dict[str, float] = {}
    for rows in (1, 64):
        x = torch.zeros(rows, spec.hidden_size, dtype=dtype, device=device)
        h = torch.zeros(rows, RANK // options.size or 1, device=device)
        whole = torch.zeros(rows, h.shape[1] * options.size, device=device)
        told[f"sum_{rows}"] = timed(partial(ranks.add_up, x), device)
        told[f"gather_{rows}"] = timed(partial(ranks.side_by_side, h, whole), device)
    if not options.rank:
        adds = 2 * spec.num_layers * told["gather_64"] / 1e3
        line = {"benchmark": "tensor_parallel", "tensor_parallel": options.size, "messages": told}
        print(json.dumps(line | {"fully_sharded_adds_ms": round(adds, 3)}), flush=True)


def timed(call: Callable[[], None], device: torch.device) -> float:
    """Microseconds of one of many in a row; on a card in a graph, as a step has them."""
    for _ in range(3):
        call()
    run, count = call, 20
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(count):
                call()
        run = graph.replay
    best = float("inf")
    for _ in range(10):
        clock = DeviceClock(device)
        for _ in range(1 if run is not call else count):
            run()
        best = min(best, clock.seconds() / count)
    return round(1e6 * best, 2)


def talk(options: argparse.Namespace, size: int, argv: Sequence[str]) -> None:
    """Processes that do nothing but talk, one a rank."""
    store = os.memfd_create("ranks")
    asked = [*argv, "--size", str(size), "--store", str(store)]
    named = [n for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if n]
    cards = [*named, *map(str, range(len(named), size))]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *asked, "--rank", str(rank)],
            pass_fds=(store,),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(cards[rank:] + cards[:rank])},
        )
        for rank in range(size)
    ]
    try:
        failed = [rank.wait(120) for rank in ranks]
    except subprocess.TimeoutExpired:
        failed = [1]
    for rank in ranks:
        rank.kill()
        rank.wait()
    os.close(store)
    if any(failed):
        line = {"benchmark": "tensor_parallel", "tensor_parallel": size}
        print(json.dumps({**line, "messages": {}, "error": "a rank failed, or hung"}), flush=True)


def _keep(answers: dict[str, Any], path: Path) -> dict[str, Any]:
    path.write_text(json.dumps(answers))
    return {"of": ANSWER, "prompts": CHECKED}


# ----------------------------------------------------------------- all of them
def parsed(cases: str) -> list[tuple[int, int]]:
    return [(int(b), int(a)) for b, _, a in (case.partition(":") for case in cases.split(","))]


def start(options: argparse.Namespace, size: int, scratch: Path, argv: Iterable[str]) -> list[Any]:
    """Run one size in a process of its own; its lines, which are passed on as they come."""
    lines: list[Any] = []
    child = subprocess.Popen(
        [sys.executable, __file__, *argv, "--size", str(size), "--scratch", str(scratch)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    silence = _Silence(child)
    with child.stdout as told:
        for text in told:
            silence.heard()
            if not text.startswith("{"):  # a library's word
                sys.stderr.write(text)
                continue
            sys.stdout.write(text)
            sys.stdout.flush()
            lines.append(json.loads(text))
    status = child.wait()
    silence.over()
    if status:
        line = {"benchmark": "tensor_parallel", "tensor_parallel": size}
        print(json.dumps({**line, "error": f"exit status {status}"}), flush=True)
    return lines


class _Silence:
    """Ends a child that says nothing for SILENT_SECONDS."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child
        self._timer: threading.Timer | None = None
        self.heard()

    def heard(self) -> None:
        self.over()
        self._timer = threading.Timer(SILENT_SECONDS, self._child.kill)
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def compare(first: int, other: int, scratch: Path, told: dict[int, list[Any]]) -> dict[str, Any]:
    """One size against the first."""
    found: dict[str, Any] = {"benchmark": "tensor_parallel", "tensor_parallel": other}
    found["against"] = first
    paths = [scratch / str(size) / "answers.json" for size in (first, other)]
    if all(path.exists() for path in paths):
        one, two = (json.loads(path.read_text()) for path in paths)
        for name in one:
            found[name] = _difference(one[name], two[name])
    speedup = {}
    for line in told[other]:
        key = {k: line[k] for k in ("batch", "prefill", "adapters") if k in line}
        twin = next((t for t in told.get(first, []) if key and key.items() <= t.items()), None)
        if twin is None or "error" in line or "error" in twin:
            continue
        name = ":".join(f"{v}" if k != "prefill" else f"prefill {v}" for k, v in key.items())
        if "step_ms" in line:
            speedup[name] = round(twin["step_ms"] / line["step_ms"], 3)
        elif "tokens_per_s" in line:
            speedup[name] = round(line["tokens_per_s"] / twin["tokens_per_s"], 3)
    return found | {"speedup": speedup}


def _difference(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    same = []
    for a, b in zip(one["tokens"], two["tokens"], strict=True):
        pairs = [x == y for x, y in zip(a, b, strict=True)]
        same.append(pairs.index(False) if False in pairs else len(pairs))
    gaps = np.abs(np.array(one["logprobs"]) - np.array(two["logprobs"]))
    return {
        "same_tokens": same,
        "of": ANSWER,
        "max_logprob_error": round(float(gaps.max()), 6),
        "mean_logprob_error": round(float(gaps.mean()), 6),
    }


def added(lines: list[Any]) -> dict[str, Any]:
    """What adapters add to a step at each batch, in ms, and to its collectives."""
    base = {t["batch"]: t for t in lines if not t.get("adapters") and "step_ms" in t}
    found: dict[str, Any] = {}
    for line in lines:
        if line.get("adapters") and "step_ms" in line and line["batch"] in base:
            before = base[line["batch"]]
            found[f"{line['batch']}:{line['adapters']}"] = {
                "added_ms": round(line["step_ms"] - before["step_ms"], 3),
                "added_collectives": round(line["collectives"] - before["collectives"], 2),
            }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sizes", default="1,2")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--prompts", default="2048,8192")
    parser.add_argument("--adapters-for-prefill", default="0,1")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--graph-tokens", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--against", type=int, default=0, metavar="SIZE")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.size:
        if options.rank is None:
            run_size(options)
        else:
            run_rank(options)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the other ranks end with this process
    sizes = [int(size) for size in options.sizes.split(",")]
    told: dict[int, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = (options.keep or Path(folder)).absolute()
        for size in sizes:
            told[size] = start(options, size, scratch, argv)
            line = {"benchmark": "tensor_parallel", "tensor_parallel": size}
            print(json.dumps({**line, "adapters_add": added(told[size])}), flush=True)
        for size in (size for size in sizes if size > 1):
            talk(options, size, argv)
        first = options.against or sizes[0]
        for other in (size for size in sizes if size != first):
            print(json.dumps(compare(first, other, scratch, told)), flush=True)
    failed = any("error" in line for lines in told.values() for line in lines)
    return int(failed or not all(told.values()))


if __name__ == "__main__":
    sys.exit(main())
