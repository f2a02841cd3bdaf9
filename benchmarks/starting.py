"""From the command line of `serve.py` to a driver: the cases, one engine for all, its start.

Goes in: parsed options and a model folder.  Comes out: cases, settings that hold every one of them,
and a driver that was started with these settings, in this process or behind a daemon's socket.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from adapter_loads import RAM_ADAPTERS
from streams import Driver

from engine.layout import MODULES, place, stream_order
from engine.messages import PackedModule
from engine.models.spec import ModelSpec, read_spec

RANK = 16
#: Tokens that a bystander may make in a second, with a wide margin.
TOKENS_A_SECOND = 1000
#: Sequences beside the largest batch: newcomers need a place.
SPARE_SEQUENCES = 16
DEFAULTS = {
    "throughput": "1:0,16:0,64:0,64:8,64:64",
    "steady": "64:0,64:64",
    "mixed": "0,8,64",
    "loads": "0,16,64",
    "prefill": "512,2048,8192",
    "long": "1:32000,8:32000",
    "mix": "skew90:64,zipf:64,uniform:64,distinct:64",
}
#: Cases of two numbers.
PAIRS = ("throughput", "steady", "long")
Case = tuple[str, tuple[Any, ...]]


def cases(options: argparse.Namespace) -> list[Case]:
    """(name, arguments) in the order of DEFAULTS; ValueError for what is not understood."""
    found: list[Case] = []
    for name in DEFAULTS:
        for item in (getattr(options, name) or "").split(","):
            if not item:
                continue
            parts = item.split(":")
            if name == "mix":
                kind, adapters = parts if len(parts) == 2 else (parts[0], "64")
                if kind not in ("skew90", "zipf", "uniform", "distinct"):
                    raise ValueError(f"--mix {kind}: skew90, zipf, uniform or distinct")
                found.append((name, (kind, int(adapters))))
            elif len(parts) != (2 if name in PAIRS else 1):
                raise ValueError(f"--{name} {item}: as in --{name} {DEFAULTS[name]}")
            else:
                found.append((name, tuple(map(int, parts))))
    return found


def settings(options: argparse.Namespace, spec: ModelSpec, wanted: list[Case]) -> dict[str, Any]:
    """What the engine is started with, in both modes: room for every case, and no more."""
    prompt, beside = options.prompt, int(TOKENS_A_SECOND * (options.seconds + 1))
    lengths, batches, adapters = [prompt + options.tokens], [1], [8]
    for name, given in wanted:
        match name:
            case "throughput":
                batches.append(given[0])
                adapters.append(given[1])
            case "steady":
                batches.append(given[0])
                adapters.append(given[1])
                lengths.append(prompt + beside)
            case "mixed":
                batches.append(options.streams)
                adapters.append(given[0])
                lengths.append(prompt + beside)
            case "loads":
                batches.append(given[0])
                lengths.append(prompt + beside)
            case "prefill":
                lengths.append(given[0] + 1)
            case "long":
                batches.append(given[0])
                lengths.append(given[1] + beside)
            case "mix":
                batches.append(64)
                adapters.append(given[1])
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "max_model_len": min(max(lengths), spec.max_position),
        "max_num_seqs": max(batches) + SPARE_SEQUENCES,
        "mixed_tokens": getattr(options, "mixed_tokens", 0),
        "cpu_pool": 512 << 20,
        "slots": max(adapters),
        "ram_cache": RAM_ADAPTERS * adapter_bytes(spec, device),
        **({"replicas": replicas} if (replicas := getattr(options, "replicas", 1)) > 1 else {}),
    }


def adapter_bytes(spec: ModelSpec, device: str) -> int:
    """Bytes of one adapter of rank 16 on all projections, in whole blocks."""
    layout = spec.block_layout(block_size=16, dtype="float32" if device == "cpu" else spec.dtype)
    modules = stream_order(
        PackedModule(layer, module, RANK, 1.0)
        for layer in range(spec.num_layers)
        for module in MODULES
    )
    return place(modules, layout).num_blocks * layout.block_bytes


def start(mode: str, model: Path, chosen: dict[str, Any], scratch: Path, workers: int) -> Driver:
    """A driver that is ready.  `scratch` holds what it writes."""
    if mode == "offline":
        return _offline(model, chosen, scratch)
    return _through_socket(model, chosen, scratch, workers)


def _offline(model: Path, chosen: dict[str, Any], scratch: Path) -> Driver:
    from offline import OfflineDriver

    from engine.config import EngineConfig

    driver = OfflineDriver(EngineConfig(model=str(model), **chosen), scratch)
    print(driver.table, file=sys.stderr, flush=True)
    return driver


def _through_socket(model: Path, chosen: dict[str, Any], scratch: Path, workers: int) -> Driver:
    from daemon_rig import MODEL_NAME, DaemonRig
    from through_socket import SocketDriver

    lora = {name: chosen[name] for name in ("slots", "ram_cache")}
    rows = [
        "[[models]]",
        f"base = {json.dumps(str(model.absolute()))}",
        f'name = "{MODEL_NAME}"',
        *(f"{k} = {json.dumps(v)}" for k, v in chosen.items() if k not in lora),
        "[lora]",
        *(f"{k} = {v}" for k, v in lora.items()),
    ]
    daemon = DaemonRig(model, "\n".join(rows), scratch)
    try:
        daemon.wait_ready()
        return SocketDriver(daemon, read_spec(model).vocab_size, workers)
    except BaseException:
        daemon.close()
        raise
