"""All measurements of a card in one go, the most wanted first, within a time.

    python benchmarks/campaign.py --model DIR [--minutes 25] [--only NAME,...] [--out DIR] [--list]

DIR is a model folder; if it holds no config.json, random weights of the shape of Llama-3-8B are
written there first.  One measurement after the other gets the card to itself, for its own time at
most; one that hangs tells where it hung and is ended, and the others go on.  What no longer fits in
--minutes is left out.

--out gets NAME.jsonl (what it printed) and NAME.log (what it complained of).  One JSON line for
each on stdout: seconds, exit status, `timed_out` or `left_out`, and how many results; at the end
`missed`, the bars that were not met.  Exit status 1: something failed, or was left out.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
#: After it has been asked to end, and before it is killed.
GRACE_SECONDS = 5.0
#: A measurement with less than this share of its time left to it would measure its own start.
WORTHWHILE = 0.5


class Measurement(NamedTuple):
    """One run of one benchmark; `seconds` is the most that it may take."""

    name: str
    words: tuple[str, ...]  # script and arguments; MODEL stands for the folder
    seconds: float


def _of(name: str, seconds: float, line: str) -> Measurement:
    return Measurement(name, tuple(line.split()), seconds)


#: The first one has the compile cache empty, and fills it for the others.
PLAN = (
    _of("decode", 260, "decode.py --model MODEL --cases 64:0,64:64,64:1,64:8,1:0,1:1 --tokens 64"),
    _of(
        *("serve", 240),
        "serve.py --model MODEL --mode offline --steady 64:0,64:1,64:8,64:64"
        " --prefill 512,2048,8192 --mixed 0,8,64 --loads 64 --long 1:32000"
        " --mix skew90:64,zipf:64,uniform:64,distinct:64 --rate 24 --seconds 1.6",
    ),
    _of(
        *("churn", 240),
        "churn.py --model MODEL --case idle,bystanders,host-time,cliff,zipf,resident --seconds 12",
    ),
    _of("beside", 150, "beside.py --model MODEL --rows 16384"),
    _of("pooling", 120, "pooling.py --inputs 1024 --rounds 2"),
    _of("soak", 360, "soak.py --model MODEL --minutes 5 --device cuda"),
    _of("chain", 150, "lora_chain.py --only prompt --seconds 120 --rivals gated"),
    _of("rivals", 110, "lora_rivals.py --seconds 90"),
    _of("mixed", 150, "mixed.py --model MODEL --budgets 0,128"),
    _of("drafts", 150, "draft_steps.py --model MODEL"),
    _of("guides", 100, "guides.py --model MODEL --cases 64:0,64:1,64:16,64:64,1:0,1:1"),
    _of("attention", 120, "kernels_attention.py --only decode,chain,prefill --seconds 110"),
    _of("lora", 110, "lora_kernels.py --seconds 100"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, type=Path, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--only", default="", metavar="NAME,...")
    parser.add_argument("--out", type=Path, default=Path("campaign"), metavar="DIR")
    parser.add_argument("--list", action="store_true", help="say what would run, in which order")
    wanted = parser.parse_args()
    chosen = [one for one in PLAN if not wanted.only or one.name in wanted.only.split(",")]
    if unknown := set(filter(None, wanted.only.split(","))) - {one.name for one in PLAN}:
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}; see --list")
    if wanted.list:
        for one in chosen:
            print(f"{one.name:10} {one.seconds:4.0f} s  {' '.join(one.words)}")
        return 0
    if not (wanted.model / "config.json").exists():
        subprocess.run([sys.executable, HERE / "random_model.py", wanted.model], check=True)
    wanted.out.mkdir(parents=True, exist_ok=True)
    told = list(run(chosen, wanted.model, wanted.out, time.monotonic() + 60 * wanted.minutes))
    print(json.dumps({"missed": [bar for one in chosen for bar in missed(one, wanted.out)]}))
    return int(any(one.get("left_out") or one["status"] for one in told))


def run(
    plan: Sequence[Measurement], model: Path, out: Path, ends: float
) -> Iterator[dict[str, object]]:
    """One after another until `ends` (of the monotonic clock); tells of each, and prints that."""
    for one in plan:
        left = ends - time.monotonic()
        if left < WORTHWHILE * one.seconds:
            told: dict[str, object] = {"name": one.name, "left_out": True}
        else:
            told = _measure(one, model, out, min(one.seconds, left))
        print(json.dumps(told), flush=True)
        yield told


def _measure(one: Measurement, model: Path, out: Path, seconds: float) -> dict[str, object]:
    script, *words = (str(model) if word == "MODEL" else word for word in one.words)
    command = [sys.executable, "-X", "faulthandler", str(HERE / script), *words]
    begun, timed_out = time.monotonic(), False
    with (
        (out / f"{one.name}.jsonl").open("w") as results,
        (out / f"{one.name}.log").open("w") as log,
    ):
        process = subprocess.Popen(
            command, stdout=results, stderr=log, start_new_session=True, env=_environment()
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            _end(process)
    return {
        "name": one.name,
        "seconds": round(time.monotonic() - begun, 1),
        "status": process.returncode,
        "results": len(_lines(one, out)),
        **({"timed_out": True} if timed_out else {}),
    }


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """With all that it has started; first it says where it is (faulthandler's SIGABRT)."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        try:
            # The first one alone: who is waited for is told by what waits.
            (os.kill if number == signal.SIGABRT else os.killpg)(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _lines(one: Measurement, out: Path) -> list[dict[str, object]]:
    """Results so far; the last line of one that was ended may be half."""
    found = []
    for line in (out / f"{one.name}.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


def missed(one: Measurement, out: Path) -> Iterator[str]:
    """Bars that were not met, as `name: bar figure > limit`."""
    if not (out / f"{one.name}.jsonl").exists():
        return
    for line in _lines(one, out):
        bars = line.get("bars")
        for bar, held in bars.items() if isinstance(bars, dict) else ():
            if not held["met"]:
                case = line.get("case", line.get("batch", ""))
                yield f"{one.name} {case}: {bar} {held['value']} of {held['limit']}"


if __name__ == "__main__":
    sys.exit(main())
