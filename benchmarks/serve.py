"""Serving figures of lorad: the engine by itself, and the same through the daemon's Unix socket.

    python benchmarks/serve.py --model DIR [--mode offline|socket|both] [cases] [--seconds S]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first, with a tokenizer.  Cases, each with an optional list of its own:

    --throughput BATCH:ADAPTERS,..   waves of requests, prompt and answer of fixed length (default)
    --steady BATCH:ADAPTERS,..       streams decode on and on
    --mixed ADAPTERS,..              streams decode while prompts arrive
    --loads STREAMS,..               streams decode while others ask for adapters that are not there
    --prefill LENGTH,..              prompts alone, base and one adapter
    --long BATCH:CONTEXT,..          decode far into a context
    --mix KIND:ADAPTERS,..           Poisson arrivals; KIND is skew90, zipf, uniform or distinct

One engine, or one daemon, serves all cases of a mode; `both` runs `offline` in a process of its own
and then `socket`, and gives the second's lines of throughput and steady decode their ratio to the
first (`of_offline`).  One JSON line a case on stdout, a table on stderr at the end.  Times are
milliseconds; `itl` is the time between two tokens of a stream.  `bars` holds figures against their
limits.  A case that fails prints its error, the others go on, and the exit status is 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from adapter_loads import loads
from random_model import ensure_model
from report import table
from starting import DEFAULTS, Case, cases, settings, start
from streams import Driver, Failed, Line, at_least
from workloads import Sizes, Workloads

from engine.models.spec import read_spec

#: A figure of the socket over the engine's own.
RATIOS = {"of_offline": "tokens_per_s", "decode_of_offline": "decode_tokens_per_s"}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", choices=("offline", "socket", "both"), default="both")
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", nargs="?", const=default, help=f"[{default}]")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured, a phase [3]")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--every", type=float, default=0.05, help="seconds between newcomers [.05]")
    parser.add_argument("--streams", type=int, default=64, help="bystanders of --mixed [64]")
    parser.add_argument("--mixed-tokens", type=int, default=0, help="the engine's setting [auto]")
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second of --mix [16]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workers", type=int, default=4, help="load generators [4]")
    parser.add_argument("--replicas", type=int, default=1, help="engines of the daemon [1]")
    parser.add_argument("--scratch", type=Path, help="where adapters and the store lie [a tempdir]")
    parser.add_argument("--against", type=Path, help="JSON lines of an earlier offline run")
    options = parser.parse_args(argv)
    if not any(getattr(options, name) for name in DEFAULTS):
        options.throughput = DEFAULTS["throughput"]
    return options


# ----------------------------------------------------------------- running
def measure(
    driver: Driver, sizes: Sizes, wanted: list[Case], machine: Line, emit: Callable[[Line], None]
) -> bool:
    """Run every case; False if one failed."""
    workloads = Workloads(driver, sizes)
    whole = True
    for name, given in wanted:
        started = time.monotonic()
        try:
            for line in _lines(workloads, name, given):
                emit(machine | line)
        except Exception as error:  # a benchmark's border: the other cases go on
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}"
            emit(machine | {"case": name, "given": list(given), "error": told})
            whole = False
        took = time.monotonic() - started
        print(f"{driver.mode} {name} {given}: {took:.1f} s", file=sys.stderr, flush=True)
    return whole


def _lines(workloads: Workloads, name: str, given: tuple[Any, ...]) -> Iterator[Line]:
    if name == "loads":
        return loads(workloads, *given)
    lines: Iterator[Line] = getattr(workloads, name)(*given)
    return lines


def run_mode(options: argparse.Namespace, mode: str, emit: Callable[[Line], None]) -> bool:
    model, wanted = options.model, cases(options)
    spec = read_spec(model)
    chosen = settings(options, spec, wanted)
    sizes = Sizes(
        prompt=options.prompt,
        tokens=options.tokens,
        room=chosen["max_model_len"],
        slots=chosen["slots"],
        seconds=options.seconds,
        every=options.every,
        streams=options.streams,
        rate=options.rate,
    )
    started = time.monotonic()
    with ExitStack() as undo:
        parent = str(options.scratch) if options.scratch else None
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        driver = start(mode, model, chosen, scratch, options.workers)
        undo.callback(driver.close)
        machine: Line = {"benchmark": "serve", "mode": mode, "torch": torch.__version__}
        machine |= {"model": model.name, **driver.facts}
        ready = round(time.monotonic() - started, 1)
        emit(machine | {"case": "start", "ready_s": ready, "settings": chosen})
        return measure(driver, sizes, wanted, machine, emit)


def run_offline_apart(argv: Sequence[str], emit: Callable[[Line], None]) -> bool:
    """`--mode offline` in a process of its own, so that the daemon finds the card empty."""
    command = [sys.executable, str(Path(__file__)), *argv, "--mode", "offline"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                emit(json.loads(line))
        except BaseException:
            child.terminate()
            raise
    return child.returncode == 0


class Output:
    """Prints lines as they come, and keeps them; a line of the socket finds its offline twin."""

    def __init__(self, earlier: Sequence[Line]) -> None:
        self.lines: list[Line] = []
        self._offline = {_key(line): line for line in earlier if line.get("mode") == "offline"}

    def __call__(self, line: Line) -> None:
        if line.get("mode") == "offline":
            self._offline[_key(line)] = line
        elif line.get("case") in ("throughput", "steady") and _key(line) in self._offline:
            line = line | _ratios(line, self._offline[_key(line)])
        self.lines.append(line)
        print(json.dumps(line), flush=True)


def _key(line: Line) -> tuple[object, ...]:
    return tuple(line.get(k) for k in ("case", "batch", "adapters", "prompt", "tokens"))


def _ratios(line: Line, twin: Line) -> Line:
    """The bar is for a full batch."""
    told: Line = {}
    for name, ratio in (
        ("tokens_per_s", "of_offline"),
        ("decode_tokens_per_s", "decode_of_offline"),
    ):
        ours, theirs = line.get(name), twin.get(name)
        if isinstance(ours, float) and isinstance(theirs, float):
            told[ratio] = round(ours / theirs, 4)
    share = told["of_offline"]
    assert isinstance(share, float)
    return told | ({"bars": at_least(of_offline=(share, 0.95))} if line["batch"] == 64 else {})


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        cases(options)
        if options.replicas > 1 and options.mode != "socket":
            raise ValueError("--replicas are a daemon's: say --mode socket")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ensure_model(options.model)
    earlier = options.against.read_text().splitlines() if options.against else []
    output = Output([json.loads(line) for line in earlier])
    whole = True
    if options.mode == "both":
        given = list(sys.argv[1:] if argv is None else argv)
        whole = run_offline_apart(given, output)
    try:
        whole &= run_mode(options, "offline" if options.mode == "offline" else "socket", output)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        whole = False
    print(table(output.lines), file=sys.stderr, flush=True)
    return 0 if whole else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the daemon is ended on the way out
    sys.exit(main())
