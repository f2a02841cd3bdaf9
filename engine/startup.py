"""From a configuration to a machine that can run steps: device, weights, arena, host cache.

Goes in: an EngineConfig with its `auto` values.  Comes out: a `Machine` whose config has none left,
and everything that is ever allocated, allocated.  Knows nothing of requests.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.host import HostCache
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelUnsupported, NoDevice
from engine.kernels.attention import AttentionMeta
from engine.layout import BlockLayout
from engine.memory.arena import DTYPES, Arena, plan_blocks
from engine.memory.pool import BlockPool
from engine.messages import EngineInfo
from engine.models.decoder import Decoder, load_model
from engine.models.spec import ModelSpec, read_spec

Progress = Callable[[str, float], None]

CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 512, 2048
#: fp64 copies of a full batch of logits that the sampler may hold at once.
SAMPLER_COPIES = 6


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


def build(config: EngineConfig, *, progress: Progress, wake: Callable[[], None]) -> Machine:
    """Load and allocate.  Raises ConfigError, NoDevice or ModelUnsupported before the weights.

    `wake` is called from other threads when a read or a copy has ended.
    """
    folder = Path(config.model)
    spec = read_spec(folder)
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
        progress=lambda fraction: progress("weights", 0.1 + 0.7 * fraction),
    )
    progress("memory", 0.8)
    layout = spec.block_layout(block_size=config.block_size, dtype=config.dtype)
    cuda = device.type == "cuda"
    room = _measure_room(config, spec, layout, model, device) if cuda else None
    num_blocks = plan_blocks(config, layout, spec, room=room)
    config = _fit_length(replace(config, num_blocks=num_blocks), spec)
    arena = Arena(spec, layout, block_size=config.block_size, num_blocks=num_blocks, device=device)
    host = HostCache(
        block_bytes=layout.block_bytes,
        budget_bytes=config.ram_cache,
        staging_bytes=min(config.load_bytes_in_flight, num_blocks * layout.block_bytes),
        pinned=cuda,
        wake=wake,
        slow_seconds=config.fail_reads_slowly,
    )
    pool = BlockPool(num_blocks)
    copier = CudaCopier(arena, host, pool) if cuda else ThreadCopier(arena, host, wake=wake)
    progress("ready", 1.0)
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
        vocab_size=min(spec.vocab_size, tokenizer_size(folder) or spec.vocab_size),
        info=_describe(config, spec, layout, model, device, host),
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
    length = config.max_model_len or spec.max_position
    if length > spec.max_position:
        raise ConfigError(
            f"max_model_len = {length} is above the model's {spec.max_position} positions",
            hint=f"set it to {spec.max_position} or less",
        )
    rows = CPU_BATCH_TOKENS if device == "cpu" else CUDA_BATCH_TOKENS
    return replace(
        config,
        device=device,
        dtype=dtype,
        max_model_len=config.max_model_len and length,  # 0 until the arena is known
        max_batch_tokens=config.max_batch_tokens or max(rows, config.max_num_seqs),
    )


def _fit_length(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The length that the model and the arena both hold; one that was asked for must fit."""
    room = config.num_blocks * config.block_size
    if config.max_model_len > room:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} needs more than the arena's {room} tokens",
            hint="lower max_model_len, or raise cpu_pool or gpu_memory_utilization",
        )
    length = config.max_model_len or min(room, spec.max_position)
    return replace(config, max_model_len=length)


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


@torch.inference_mode()
def _measure_room(
    config: EngineConfig,
    spec: ModelSpec,
    layout: BlockLayout,
    model: Decoder,
    device: torch.device,
) -> int:
    """Bytes of the card that the arena may take, found by running the largest step once.

    What that step needed stays in torch's cache for the real steps, so it counts as used.
    """
    rows, size = config.max_batch_tokens, config.block_size
    blocks = -(-rows // size)
    arena = Arena(spec, layout, block_size=size, num_blocks=blocks, device=device)
    kv = [arena.kv(layer) for layer in range(spec.num_layers)]
    index = torch.arange(rows, device=device)
    tables = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    meta = AttentionMeta((0, rows), (rows,), index, tables, size)
    positions = index % spec.max_position
    hidden = model(torch.zeros_like(index), positions, kv, meta, None)
    model.logits(hidden[: config.max_num_seqs])
    scratch = config.max_num_seqs * spec.vocab_size * SAMPLER_COPIES
    torch.empty(scratch, dtype=torch.float64, device=device)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total * config.gpu_memory_utilization) - (total - free)


def _describe(
    config: EngineConfig,
    spec: ModelSpec,
    layout: BlockLayout,
    model: Decoder,
    device: torch.device,
    host: HostCache,
) -> EngineInfo:
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    weights |= {b.data_ptr(): b.numel() * b.element_size() for b in model.buffers()}
    cuda = device.type == "cuda"
    return EngineInfo(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if cuda else "cpu",
        dtype=layout.dtype,
        layout=layout.id,
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=sum(weights.values()),
        arena_bytes=config.num_blocks * layout.block_bytes,
        ram_cache_bytes=host.limit_bytes,
        pid=os.getpid(),
    )
