"""From a configuration to a machine that can run steps: device, weights, arena, host cache.

Goes in: an EngineConfig with its `auto` values.  Comes out: a `Machine` whose config has none left,
and its memory plan.  Knows nothing of steps (`engine/assembly.py`) and of requests.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.host import HostCache
from engine.assembly import Progress
from engine.config import EngineConfig
from engine.errors import ModelUnsupported, NoDevice
from engine.fit import check_floors, check_length, fit_length, plan_blocks
from engine.layout import BlockLayout
from engine.measuring import Use, measure, weight_bytes
from engine.memory.arena import DTYPES, Arena
from engine.memory.budget import MemoryPlan, usual_adapter_blocks
from engine.memory.pool import BlockPool
from engine.messages import EngineInfo
from engine.models.base_files import base_id
from engine.models.decoder import Decoder, load_model
from engine.models.spec import ModelSpec, read_spec

CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 512, 2048
#: Rows of a step while somebody decodes.  A card reads its weights whatever the rows, so that up to
#: about FLOP/s over bytes/s of them cost little (an H200: 790 TFLOP/s over 4.27 TB/s is 185).  On a
#: CPU each row counts: with 8 streams a step of SmolLM2 takes 70 ms on 2 cores, with 48 rows of a
#: prompt beside them 144, with 448 748; small chunks lose little, for a row costs much the same.
CPU_MIXED_TOKENS, CUDA_MIXED_TOKENS = 64, 192
#: Of these, rows of inputs to be pooled, for which nobody waits token by token.
CPU_POOLED_TOKENS, CUDA_POOLED_TOKENS = 8, 128


@dataclass(frozen=True, slots=True)
class Machine:
    """What a start ends with.  `config` has no `auto` left; `vocab_size` is the tokenizer's."""

    config: EngineConfig
    spec: ModelSpec
    layout: BlockLayout
    device: torch.device
    model: Decoder
    arena: Arena
    pool: BlockPool
    host: HostCache
    copier: CudaCopier | ThreadCopier
    vocab_size: int
    info: EngineInfo
    memory: MemoryPlan


def build(config: EngineConfig, *, progress: Progress, wake: Callable[[], None]) -> Machine:
    """Load and allocate.  Raises ConfigError, NoDevice or ModelUnsupported before the weights.

    `wake` is called from other threads when a read or a copy has ended.
    """
    folder = Path(config.model)
    spec = read_spec(folder, pools=config.purpose == "both", generates=True)
    config = resolve(config, spec)
    device = torch.device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    progress("weights", 0.1)
    model = load_model(
        folder,
        device=device,
        dtype=DTYPES[config.dtype],
        deterministic=config.deterministic,
        max_len=config.max_model_len,
        purpose=config.purpose,
        progress=lambda fraction: progress("weights", 0.1 + 0.7 * fraction),
    )
    progress("memory", 0.8)
    layout = spec.block_layout(block_size=config.block_size, dtype=config.dtype)
    cuda = device.type == "cuda"
    vocab_size = min(spec.vocab_size, tokenizer_size(folder) or spec.vocab_size)
    use = measure(config, spec, layout, model, vocab_size, progress) if cuda else None
    num_blocks = plan_blocks(config, layout, spec, room=use.room if use else None)
    config = fit_length(replace(config, num_blocks=num_blocks), spec)
    check_floors(config, layout)
    arena = Arena(spec, layout, block_size=config.block_size, num_blocks=num_blocks, device=device)
    host = HostCache(
        block_bytes=layout.block_bytes,
        budget_bytes=config.ram_cache,
        staging_bytes=min(config.load_bytes_in_flight, num_blocks * layout.block_bytes),
        pinned=cuda,
        wake=wake,
        verify=config.verify_on_load,
        slow_seconds=config.fail_reads_slowly,
    )
    pool = BlockPool(num_blocks)
    copier = CudaCopier(arena, host, pool) if cuda else ThreadCopier(arena, host, wake=wake)
    progress("memory", 0.85)
    info = _describe(config, spec, layout, model, device, host)
    return Machine(
        config=config,
        spec=spec,
        layout=layout,
        device=device,
        model=model,
        arena=arena,
        pool=pool,
        host=host,
        copier=copier,
        vocab_size=vocab_size,
        info=info,
        memory=_memory_plan(config, layout, info, use),
    )


def resolve(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Every `auto` but the arena's size, and a length that hangs on it, becomes a value.

    Raises ConfigError, NoDevice.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise NoDevice(
            'device = "cuda": no CUDA device is usable', hint='set device = "cpu" or "auto"'
        )
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else spec.dtype  # type: ignore[assignment]
    check_length(config, spec)
    cpu = device == "cpu"
    rows = config.max_batch_tokens
    full_house = config.max_num_seqs + config.block_size  # everybody decodes, and a prompt goes on
    rows = rows or max(CPU_BATCH_TOKENS if cpu else CUDA_BATCH_TOKENS, full_house)
    mixed = config.mixed_tokens or (CPU_MIXED_TOKENS if cpu else CUDA_MIXED_TOKENS)
    return replace(
        config,
        device=device,
        dtype=dtype,
        max_model_len=config.max_model_len,  # 0 until the arena is known
        max_batch_tokens=rows,
        mixed_tokens=min(mixed, rows),
        pooled_tokens=config.pooled_tokens or (CPU_POOLED_TOKENS if cpu else CUDA_POOLED_TOKENS),
    )


def tokenizer_size(folder: Path) -> int:
    """One more than the highest id in tokenizer.json; 0 if there is none to read.

    Embeddings are often padded past it, and a padded id must never be drawn.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    try:
        tokenizer = json.loads(path.read_bytes())
        vocab = tokenizer["model"]["vocab"]
        ids = [token["id"] for token in tokenizer.get("added_tokens", [])]
        ids += vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]
        return max(int(i) for i in ids) + 1
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnsupported(f"{path}: not a tokenizer file ({error})") from error


def _memory_plan(
    config: EngineConfig, layout: BlockLayout, info: EngineInfo, use: Use | None
) -> MemoryPlan:
    plan = MemoryPlan(
        device=info.device_name,
        weights=info.weight_bytes,
        num_blocks=config.num_blocks,
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        adapter_blocks=usual_adapter_blocks(layout),
    )
    if use is None:
        return plan
    return dataclasses.replace(
        plan,
        total=use.total,
        utilization=config.gpu_memory_utilization,
        other=use.other,
        steps=use.steps,
        step_text=f"{config.max_batch_tokens:,} rows, {config.max_num_seqs:,} sequences",
        graphs=use.graphs,
        graph_text=f"up to {use.num_graphs}",
    )


def _describe(
    config: EngineConfig,
    spec: ModelSpec,
    layout: BlockLayout,
    model: Decoder,
    device: torch.device,
    host: HostCache,
) -> EngineInfo:
    cuda = device.type == "cuda"
    return EngineInfo(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if cuda else "cpu",
        dtype=layout.dtype,
        layout=layout.id,
        base=base_id(Path(config.model)),
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        mixed_tokens=config.mixed_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weight_bytes(model),
        arena_bytes=config.num_blocks * layout.block_bytes,
        ram_cache_bytes=host.limit_bytes,
        pid=os.getpid(),
        device_uuid=f"GPU-{torch.cuda.get_device_properties(device).uuid}" if cuda else "",
    )
