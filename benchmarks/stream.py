"""What streaming costs: a real daemon between an engine without a model and a load of raw sockets.

    python benchmarks/stream.py [--streams 64] [--rate 155] [--seconds 10] [--tokens 2048]
    python benchmarks/stream.py --rate 0              as fast as the daemon reads

--rate is steps a second of the made-up engine; each gives every stream a token.  --tokens is what a
request asks for, then it is asked again: few tokens measure requests, many measure tokens.
--extra adds JSON to each body, for example '{"logprobs": true, "top_logprobs": 2}'.
--profile FILE samples the daemon's functions, which costs some of what is measured.

One JSON line on stdout, over the time in which all streams run:
  tokens_per_s, told_per_s   that arrived at the clients; that the engine told (their ratio: kept)
  cpu_us_per_token           CPU of the daemon process, all threads, user and kernel
  kernel_us_per_token        the part of it in the kernel: reads, writes, waking the readers
  cpu_share                  the daemon's CPU seconds a second: at 1.0 the loop is full
  latency_ms                 from the end of the engine's step to a client's recv: p50, p99
  lag_ms                     how late the event loop did what was due every 5 ms: p50, p99, max
  gc_ms                      longest run of the garbage collector, in CPU time
  tokens_per_read            how many tokens a client's recv found, on average
  first_ms                   from a question to its first token, on average; null if none ended

CPU times are of the kernel's clock (10 ms ticks), so other work on the machine disturbs them less
than it disturbs the rest.  Standard library only; needs no GPU and no model.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_engine import FIRST_WORD, MAX_TOKENS
from stream_load import BUCKET_MS, ENDED, FIELDS, FIRST_SECONDS, READS, TOKENS, Shared
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
WORDS = 32_000
SETTLE_SECONDS = 1.0
PATIENCE = 60.0
TICK = os.sysconf("SC_CLK_TCK")


def write_model(folder: Path) -> None:
    """Config of an 8B model and a byte-level vocabulary of made-up words, each behind a space."""
    rng = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    foreign = ("ü", "é", "世", "界", "ш", "ж", "ñ")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    assert len(vocab) == FIRST_WORD
    spell = {b: c for c, b in zip(alphabet, range(256), strict=True)}
    del spell
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    while len(vocab) < FIRST_WORD + WORDS:
        word = "".join(rng.choice(letters) for _ in range(rng.randint(1, 7)))
        if rng.random() < 0.05:
            word += rng.choice(foreign)
        [(spelled, _)] = level.pre_tokenize_str(" " + word)
        vocab.setdefault(spelled, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1 << 17,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 1 << 17,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    # A start looks for weights, which the engine in place of ours never reads.
    header = json.dumps({"none": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    size = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + header + bytes(4))


class Rig:
    """The daemon and its files, in a folder of their own."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.root, self.options = root, options
        model = root / "model"
        model.mkdir()
        write_model(model)
        self.stamps = self._doubles("stamps", options.streams * MAX_TOKENS)
        self.counts = self._doubles("counts", options.streams * FIELDS)
        self.report = root / "report.json"
        self.socket = root / "run" / "inference.sock"
        config = root / "lorad.toml"
        config.write_text(
            f'[[models]]\nbase = "{model}"\nname = "made-up"\ndevice = "cpu"\n'
            f'[watch]\nmode = "off"\n[limits]\nconnections = {options.streams + 16}\n'
            f'queue = {options.streams + 16}\n[shutdown]\ndrain_timeout = "1s"\n'
        )
        self.daemon = subprocess.Popen(
            [sys.executable, str(HERE / "stream_daemon.py"), "--config", str(config)],
            env=self._environment(),
            stdout=sys.stderr,
        )
        self.loads: list[subprocess.Popen[bytes]] = []

    def _doubles(self, name: str, count: int) -> Path:
        path = self.root / name
        with path.open("wb") as file:
            file.truncate(count * 8)
        return path

    def _environment(self) -> dict[str, str]:
        places = {"STATE": "state", "RUNTIME": "run", "CACHE": "cache", "CONFIGURATION": "etc"}
        env = {k: v for k, v in os.environ.items() if not k.startswith("LORAD_")}
        env |= {f"{kind}_DIRECTORY": str(self.root / name) for kind, name in places.items()}
        path = os.pathsep.join(filter(None, (str(HERE.parent), env.get("PYTHONPATH"))))
        env |= {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "STREAM_RATE": str(self.options.rate),
            "STREAM_VOCAB": str(WORDS),
            "STREAM_STAMPS": str(self.stamps),
            "STREAM_REPORT": str(self.report),
        }
        if self.options.profile:
            env["STREAM_PROFILE"] = str(self.options.profile.absolute())
        return env

    def wait_ready(self) -> None:
        from lorad.client import LoradClient, Unreachable

        def ready() -> bool:
            if self.daemon.poll() is not None:
                raise SystemExit("the daemon did not start")
            try:
                with LoradClient(f"unix://{self.root / 'run' / 'admin.sock'}") as client:
                    return client.ready() == ""
            except Unreachable:
                return False

        until(ready, "the daemon to be ready")

    def start_loads(self) -> None:
        streams, processes = self.options.streams, self.options.processes
        each = -(-streams // processes)
        for first in range(0, streams, each):
            count = min(each, streams - first)
            tokens = min(self.options.tokens, MAX_TOKENS)
            self.loads.append(
                subprocess.Popen(
                    [
                        *(sys.executable, str(HERE / "stream_load.py"), str(self.socket)),
                        *("made-up", str(first), str(count), str(tokens)),
                        *(str(self.counts), str(self.stamps), self.options.extra),
                    ],
                    stdout=subprocess.PIPE,
                )
            )

    def close(self) -> None:
        for process in self.loads:
            process.kill()
            process.wait()
        self.daemon.terminate()
        self.daemon.wait(PATIENCE)


class Reading:
    """Everything that is counted, at one moment."""

    def __init__(self, rig: Rig, counts: Shared) -> None:
        self.time = time.monotonic()
        user, kernel = _cpu_seconds(rig.daemon.pid)
        self.process, self.kernel = user + kernel, kernel
        rows = [counts.cells[n::FIELDS].tolist() for n in range(FIELDS)]
        self.sums = [sum(row) for row in rows]
        self.streams = rows[TOKENS]


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """(user, kernel) of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICK, int(fields[12]) / TICK


def measure(rig: Rig) -> dict[str, Any]:
    options, counts = rig.options, Shared(str(rig.counts))
    rig.start_loads()
    until(lambda: _alive(rig) and all(Reading(rig, counts).streams), "all streams to run")
    time.sleep(SETTLE_SECONDS)
    for load in rig.loads:
        load.send_signal(signal.SIGUSR1)
    rig.daemon.send_signal(signal.SIGUSR2)
    before = Reading(rig, counts)
    time.sleep(options.seconds)
    _alive(rig)
    after = Reading(rig, counts)
    rig.daemon.send_signal(signal.SIGUSR2)
    latencies: Counter[int] = Counter()
    for load in rig.loads:
        load.terminate()
        told, _ = load.communicate(timeout=PATIENCE)
        latencies.update({int(k): n for k, n in json.loads(told).items()})
    until(rig.report.exists, "the daemon's report")
    inside = json.loads(rig.report.read_text())
    seconds = after.time - before.time
    sums = [b - a for a, b in zip(before.sums, after.sums, strict=True)]
    tokens, ended = sums[TOKENS], sums[ENDED]
    process, kernel = after.process - before.process, after.kernel - before.kernel
    return {
        "streams": options.streams,
        "rate": options.rate,
        "tokens": options.tokens,
        "tokens_per_s": round(tokens / seconds),
        "cpu_us_per_token": round(process / tokens * 1e6, 1),
        "kernel_us_per_token": round(kernel / tokens * 1e6, 1),
        "cpu_share": round(process / seconds, 3),
        "latency_ms": _quantiles(latencies.elements(), BUCKET_MS),
        "lag_ms": _quantiles(inside["lags"], 1e3) | {"max": round(max(inside["lags"]) * 1e3, 2)},
        "gc_ms": round(max(inside["gc"], default=0.0) * 1e3, 2),
        "tokens_per_read": round(tokens / sums[READS], 2),
        "first_ms": round(sums[FIRST_SECONDS] / ended * 1e3, 1) if ended else None,
    }


def _alive(rig: Rig) -> bool:
    for process in (*rig.loads, rig.daemon):
        if process.poll() is not None:
            raise SystemExit(f"{process.args[1]} ended with status {process.returncode}")
    return True


def _quantiles(values: Any, scale: float) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p99": 0.99}
    return {k: round(ordered[int(q * (len(ordered) - 1))] * scale, 2) for k, q in at.items()}


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"timed out waiting for {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def rig(options: argparse.Namespace) -> Iterator[Rig]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="lorad-", dir=shm if shm.is_dir() else None) as root:
        made = Rig(Path(root), options)
        try:
            made.wait_ready()
            yield made
        finally:
            made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=155.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=1, help="of the load generator")
    parser.add_argument("--extra", default="{}")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    with rig(options) as made:
        print(json.dumps(measure(made)), flush=True)


if __name__ == "__main__":
    main()
