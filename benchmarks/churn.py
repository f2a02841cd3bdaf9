"""What comes and goes costs those who stay: adapters under churn, on the engine in this process.

    python benchmarks/churn.py --model DIR [--case all] [--seconds 20]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  Cases, one engine for all that are asked for:

    zipf        --adapters of them on room for --room at 80% of capacity, under each policy
    cliff       16 adapters on room for 8 against 8 at the same rate: a slot miss must cost nothing
    idle        first token on a resident, a pinned, a page-cached adapter: idle, and at --streams
    bystanders  pauses of 16 and of --streams that decode, with an adapter loaded every 50 ms
    host-time   what one load takes of the step loop, and the longest step beside it
    resident    how many adapters of rank 16 the pool holds beside --streams running requests

--seconds is what a case may measure for, all its phases together (`resident` loads until the pool
is full).  One JSON line a result on stdout; times are milliseconds; `bars` holds figures against
their limits.  A case that fails prints its error, the others go on, and the exit status is 1.

Adapters are noise of rank 16 on all seven projections.  --files packed files are written, and the
adapters share them in turn: ids and bytes on the GPU are each adapter's own, what is read is not.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import checkout  # noqa: F401
import torch
from churn_fleet import Fleet
from churn_host import HostCases
from churn_loads import Newcomers
from churn_mix import Mixes, MixSizes
from offline import OfflineDriver
from random_model import ensure_model
from rig import start_quickly
from starting import SPARE_SEQUENCES, TOKENS_A_SECOND, adapter_bytes
from streams import Line
from workloads import Sizes

from engine.config import EngineConfig
from engine.models.spec import ModelSpec, read_spec

CASES = ("zipf", "cliff", "idle", "bystanders", "host-time", "resident")
#: Phases that share a case's seconds, the unmeasured ones at what they take of one.
PHASES = {"zipf": 8.0, "cliff": 6.5, "idle": 10.0, "bystanders": 10.0, "host-time": 2.0}
CLIFF = 16, 8
#: Seconds between newcomers where first tokens are looked at one by one.
APART = 0.1
#: Adapters that are loaded, once each, in `host-time`.
HOST_LOADS = 48


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--case", default="all", help=f"of {', '.join(CASES)}; commas [all]")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, a case [20]")
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--room", type=int, default=64)
    parser.add_argument("--ram", type=int, default=104, help="adapters in pinned memory [104]")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--few", type=int, default=16, help="the other count of bystanders [16]")
    parser.add_argument("--residents", default="64,1000", help="on the GPU in host-time [64,1000]")
    parser.add_argument("--parts", action="store_true", help="where host-time goes, too")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=float, default=0.05, help="seconds between newcomers [.05]")
    parser.add_argument("--files", type=int, default=16, help="distinct packed files [16]")
    parser.add_argument("--verify", choices=("off", "sample", "full"), default="sample")
    parser.add_argument("--blocks", type=int, default=0, help="of the pool [what the card holds]")
    parser.add_argument("--copies", default="usual", help="in host-time: usual,torch,each,batch")
    parser.add_argument("--graph-tokens", type=int, default=512, help="rows of graphs [512]")
    parser.add_argument("--quick", action="store_true", help="nothing is captured ahead")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--scratch", type=Path, help="where packed files lie [a tempdir]")
    options = parser.parse_args(argv)
    options.case = CASES if options.case == "all" else tuple(options.case.split(","))
    unknown = [case for case in options.case if case not in CASES]
    if unknown:
        parser.error(f"--case {unknown[0]}: all, or some of {', '.join(CASES)}")
    return options


def config_of(options: argparse.Namespace, spec: ModelSpec) -> EngineConfig:
    """One engine for every case."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    longest = max((_phase(options, case) for case in options.case), default=0.0)
    decoded = int(TOKENS_A_SECOND * (longest + 2)) if device == "cpu" else 8192
    return EngineConfig(
        model=str(options.model),
        device=device,
        max_model_len=min(options.prompt + decoded, spec.max_position),
        max_num_seqs=options.streams + SPARE_SEQUENCES,
        cpu_pool=512 << 20,
        num_blocks=options.blocks,
        slots=2048,
        max_rank=64,
        ram_cache=options.ram * adapter_bytes(spec, device),
        verify_on_load=options.verify,
        graph_tokens=options.graph_tokens,
    )


def lines(options: argparse.Namespace, fleet: Fleet, case: str) -> Iterator[Line]:
    seconds = _phase(options, case)
    mix = Mixes(fleet, MixSizes(options.streams, options.prompt, options.tokens, seconds))
    sizes = Sizes(
        prompt=options.prompt,
        tokens=options.tokens,
        room=fleet.core.config.max_model_len,
        slots=fleet.core.config.slots,
        seconds=seconds,
        every=options.every,
        streams=options.streams,
        rate=1.0,
    )
    newcomers = Newcomers(fleet, sizes, options.adapters)
    host = HostCases(fleet, options.streams, options.prompt, seconds)
    match case:
        case "zipf":
            yield from mix.zipf(options.adapters, options.room)
        case "cliff":
            yield from mix.cliff(*CLIFF)
        case "idle":
            for streams in (0, options.streams):
                yield from newcomers.idle(streams, max(APART, options.every))
        case "bystanders":
            for streams in (options.few, options.streams):
                yield from newcomers.bystanders(streams, options.every)
        case "host-time":
            counts = [int(n) for n in options.residents.split(",")]
            most = min(HOST_LOADS, options.ram)
            counts = [n for n in counts if n <= fleet.most]
            turns = [(way, False) for way in options.copies.split(",")]
            if options.parts:
                turns.append((turns[-1][0], True))
            yield from host.host_time(counts, most // len(turns), turns)
        case "resident":
            yield from host.resident()


def _phase(options: argparse.Namespace, case: str) -> float:
    return float(options.seconds / PHASES.get(case, 1.0))


def measure(options: argparse.Namespace, fleet: Fleet, emit: Callable[[Line], None]) -> bool:
    """Run every case; False if one failed."""
    whole = True
    for case in options.case:
        started = time.monotonic()
        try:
            for line in lines(options, fleet, case):
                emit(line)
        except Exception as error:  # a benchmark's border: the other cases go on
            traceback.print_exc()
            emit({"case": case, "error": f"{type(error).__name__}: {error}"})
            whole = False
        print(f"{case}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    ensure_model(options.model)
    config = config_of(options, read_spec(options.model))
    if options.quick:
        start_quickly()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        driver = OfflineDriver(config, Path(scratch), files=options.files)
        print(driver.table, file=sys.stderr, flush=True)
        fleet = Fleet(driver, options.ram)
        machine: Line = {"benchmark": "churn", "torch": torch.__version__}
        machine |= {"model": options.model.name, "device": driver.facts["device"]}
        machine |= {"dtype": driver.facts["dtype"], "files": options.files}

        def emit(line: Line) -> None:
            print(json.dumps(machine | line), flush=True)

        ready = round(time.monotonic() - started, 1)
        emit({"case": "start", "ready_s": ready, "most": fleet.most, "verify": options.verify})
        try:
            return 0 if measure(options, fleet, emit) else 1
        finally:
            driver.close()


if __name__ == "__main__":
    sys.exit(main())
