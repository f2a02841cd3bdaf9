"""From a PoolingConfig to a machine that can run steps: device, weights, adapters' memory.

Goes in: a configuration with its `auto` values.  Comes out: a PoolingMachine whose config has none
left.  No KV is kept: the arena holds adapters alone.  Knows nothing of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.host import HostCache
from engine.assembly import is_card
from engine.errors import ConfigError, NoDevice
from engine.layout import BlockLayout
from engine.memory.arena import DTYPES, Arena
from engine.memory.pool import BlockPool
from engine.models.base_files import base_id
from engine.models.bases import BaseSpec, namer
from engine.models.encoder_spec import EncoderSpec
from engine.pooling.backbone import Backbone, PackedDecoder, load_backbone
from engine.pooling.config import PoolingConfig, PoolingInfo
from engine.pooling.fit import read_model
from engine.pooling.head import Head
from engine.pooling.pooler import Pooler
from engine.pooling.room import graph_bytes, ladder_of, most_rows
from engine.pooling.spec import PoolingSpec
from engine.pooling.token_scores import TokenScores, head_rows

CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 4096, 16384
#: On a CPU a step is no longer than about a second of one core, whatever the model: nobody is taken
#: back while it runs.  4,096 rows of MiniLM are 87 GFLOP and took 1.1 s, as many of a model shaped
#: like BGE-large 2,474 and, by a sixth of it, 23 s.
CPU_STEP_FLOP, CPU_LEAST_TOKENS = 90e9, 256


@dataclass(frozen=True, slots=True)
class PoolingMachine:
    """What a start ends with.  `folder` is the one that holds the model's config.json."""

    config: PoolingConfig
    folder: Path
    spec: BaseSpec
    layout: BlockLayout
    device: torch.device
    backbone: Backbone
    pooler: Pooler
    head: Head
    words: TokenScores | None  # where scores are of words, and not of classes
    arena: Arena
    pool: BlockPool
    host: HostCache
    copier: CudaCopier | ThreadCopier
    info: PoolingInfo


def build(
    config: PoolingConfig,
    *,
    progress: Callable[[str, float], None] = lambda *_: None,
    wake: Callable[[], None] = lambda: None,
) -> PoolingMachine:
    """Load and allocate.  Raises ConfigError, NoDevice or ModelUnsupported before the weights.

    `wake` is called from other threads when a read or a copy has ended.
    """
    folder, spec, pooling = read_model(config)
    if "on" in (config.prefix_cache, config.chunked_prefill):
        raise ConfigError(
            "prefix_cache and chunked_prefill: this engine computes an input whole, in one step",
            hint="see engine/pooling/keeping.py for the one that keeps keys and values",
        )
    config = resolve(config, spec, pooling)
    device = torch.device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    progress("weights", 0.1)
    backbone = load_backbone(
        folder,
        spec,
        device=device,
        dtype=DTYPES[config.dtype],
        deterministic=config.deterministic,
        max_rows=largest_step(config),
        max_seqs=config.max_num_seqs,
        ladder=ladder_of(config, spec, config.dtype) if is_card(device) else None,
        progress=lambda fraction: progress("weights", 0.1 + 0.7 * fraction),
    )
    pooler = Pooler(
        pooling,
        Path(config.model),
        hidden_size=spec.hidden_size,
        device=device,
        deterministic=config.deterministic,
    )
    head, words = _heads(config, folder, backbone, pooling)
    progress("memory", 0.8)
    layout = spec.block_layout(block_size=0, dtype=config.dtype)
    blocks = _blocks(config, layout)
    arena = Arena(spec, layout, block_size=0, num_blocks=blocks, device=device)
    cuda = device.type == "cuda"
    host = HostCache(
        block_bytes=layout.block_bytes,
        budget_bytes=config.ram_cache,
        staging_bytes=min(config.load_bytes_in_flight, blocks * layout.block_bytes),
        pinned=cuda,
        wake=wake,
        verify=config.verify_on_load,
    )
    pool = BlockPool(blocks)
    copier = CudaCopier(arena, host, pool) if cuda else ThreadCopier(arena, host, wake=wake)
    backbone.capture(lambda fraction: progress("graphs", 0.85 + 0.1 * fraction))
    return PoolingMachine(
        config=config,
        folder=folder,
        spec=spec,
        layout=layout,
        device=device,
        backbone=backbone,
        pooler=pooler,
        head=head,
        words=words,
        arena=arena,
        pool=pool,
        host=host,
        copier=copier,
        info=_describe(config, folder, layout, backbone, pooler, words, arena),
    )


def largest_step(config: PoolingConfig) -> int:
    """Rows: an input that is longer than the budget has a step for itself."""
    return max(config.max_batch_tokens, config.max_length)


def _heads(
    config: PoolingConfig, folder: Path, backbone: Backbone, pooling: PoolingSpec
) -> tuple[Head, TokenScores | None]:
    """What classifies, and what scores in its absence."""
    spec, fixed = backbone.spec, config.deterministic
    assert spec.head is not None
    eps = spec.norm_eps if isinstance(spec, EncoderSpec) else 0.0  # a decoder's has no norm
    head = Head(spec.head, backbone.head, eps=eps, deterministic=fixed)
    if not pooling.score_tokens or not isinstance(backbone, PackedDecoder):
        return head, None
    rows = head_rows(folder, backbone.spec, backbone.embedding, pooling.score_tokens)
    return head, TokenScores(backbone.spec, pooling.score_tokens, rows, deterministic=fixed)


def resolve(config: PoolingConfig, spec: BaseSpec, pooling: PoolingSpec) -> PoolingConfig:
    """Every `auto` becomes a value.  Raises NoDevice, and ConfigError for what a card has no room
    for."""
    device, dtype = config.device, config.dtype
    if device == "cuda" and not torch.cuda.is_available():
        raise NoDevice(
            'device = "cuda": no CUDA device is usable', hint='set device = "cpu" or "auto"'
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else spec.dtype  # type: ignore[assignment]
    told = min(pooling.max_length or spec.default_length, spec.default_length)
    if device == "cpu":
        rows = _cpu_rows(spec)
    else:
        most = most_rows(config, spec, dtype, torch.cuda.mem_get_info()[0])
        rows, told = min(CUDA_BATCH_TOKENS, most), min(told, most)
    return replace(
        config,
        device=device,
        dtype=dtype,
        max_length=config.max_length or told,
        max_batch_tokens=config.max_batch_tokens or rows,
    )


def _cpu_rows(spec: BaseSpec) -> int:
    weights = sum(d_in * d_out for d_in, d_out in spec.shapes.dims) * spec.num_layers
    return min(CPU_BATCH_TOKENS, max(CPU_LEAST_TOKENS, int(CPU_STEP_FLOP / (2 * weights))))


def _blocks(config: PoolingConfig, layout: BlockLayout) -> int:
    """No more than every slot at the highest rank could use.  ConfigError if there is none."""
    rows = sum(a + b for a, b in layout.shapes.dims) * layout.shapes.num_layers
    adapter = -(-rows * config.max_rank * layout.itemsize // layout.block_bytes)
    blocks = min(config.adapter_pool // layout.block_bytes, config.slots * (adapter + 1))
    if blocks < 1:
        raise ConfigError(
            f"adapter_pool = {config.adapter_pool} is less than a block of {layout.block_bytes}",
            hint="raise it",
        )
    return blocks


def _describe(
    config: PoolingConfig,
    folder: Path,
    layout: BlockLayout,
    backbone: Backbone,
    pooler: Pooler,
    words: TokenScores | None,
    arena: Arena,
) -> PoolingInfo:
    spec, pooling = backbone.spec, pooler.spec
    return PoolingInfo(
        device=config.device,
        dtype=config.dtype,
        layout=layout.id,
        base=base_id(folder, namer(spec)),
        block_bytes=layout.block_bytes,
        max_length=config.max_length,
        max_batch_tokens=config.max_batch_tokens,
        width=pooler.width,
        kinds=pooling.kinds,
        pooling_origin=pooling.origin,
        normalizes=pooling.normalizes,
        num_labels=spec.num_labels if words is None else 1,
        labels=spec.labels if words is None else ("LABEL_0",),
        score_tokens=() if words is None else words.tokens,
        weight_bytes=backbone.weight_bytes,
        adapter_bytes=arena.bytes.numel(),
        kv_bytes=backbone.kv_bytes,
        graph_bytes=graph_bytes(config, spec, config.dtype) if config.device == "cuda" else 0,
    )
