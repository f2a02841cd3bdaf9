"""From a configuration to a machine that can run steps: device, weights, arena, host cache.

Goes in: an EngineConfig with its `auto` values.  Comes out: a `Machine` whose config has none left,
and its memory plan.  Knows nothing of steps (`engine/assembly.py`) and of requests.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.host import HostCache
from engine.adapters.tiers import CopyEngine
from engine.assembly import Progress
from engine.config import EngineConfig
from engine.draft_fit import check_reach, draft_block_bytes, read_draft
from engine.errors import NoDevice
from engine.fit import check_floors, check_length, fit_length, plan_blocks
from engine.guests import room_for
from engine.layout import BlockLayout
from engine.measuring import Use, measure, weight_bytes
from engine.memory.arena import DTYPES, Arena
from engine.memory.budget import MemoryPlan, usual_adapter_blocks
from engine.memory.pool import BlockPool
from engine.messages import EngineInfo, Purpose
from engine.models.base_files import base_id
from engine.models.decoder import Decoder, load_model
from engine.models.ranks import Ranks
from engine.models.shard import split
from engine.models.spec import ModelSpec, read_spec, tokenizer_size
from engine.vocabulary import Vocabulary

CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 512, 2048
#: Rows of a step while somebody decodes.  A card reads its weights whatever the rows, so that up to
#: about FLOP/s over bytes/s of them cost little (an H200: 790 TFLOP/s over 4.27 TB/s is 185).  On a
#: CPU each row counts: with 8 streams a step of SmolLM2 takes 70 ms on 2 cores, with 48 rows of a
#: prompt beside them 144, with 448 748; small chunks lose little, for a row costs much the same.
CPU_MIXED_TOKENS, CUDA_MIXED_TOKENS = 64, 192
#: Of these, rows of inputs to be pooled, for which nobody waits token by token.  Half as many as
#: decode (0) keep the pauses on a CPU within 1.2 of what they are without.
CPU_POOLED_TOKENS, CUDA_POOLED_TOKENS = 0, 128


class Copier(CopyEngine, Protocol):
    """Of one rank, or of all of them."""

    @property
    def in_flight(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What a start ends with.  `config` has no `auto` left; `vocab_size` is the tokenizer's."""

    config: EngineConfig
    spec: ModelSpec
    layout: BlockLayout
    device: torch.device
    model: Decoder
    draft: Decoder | None  # of the same vocabulary; None: no model drafts
    arena: Arena
    pool: BlockPool
    host: HostCache
    copier: Copier
    vocab_size: int
    info: EngineInfo
    memory: MemoryPlan

    @property
    def vocabulary(self) -> Vocabulary:
        """Which token ids there are."""
        return Vocabulary(self.spec.vocab_size, self.vocab_size, self.spec.num_ids)


def build(
    config: EngineConfig,
    *,
    progress: Progress,
    wake: Callable[[], None],
    ranks: Ranks | None = None,
    memory: Callable[[int], Tensor] | None = None,
    share: Callable[[CudaCopier | ThreadCopier, HostCache], Copier] | None = None,
) -> Machine:
    """Load and allocate.  Raises ConfigError, NoDevice or ModelUnsupported before the weights.

    `wake` is called from other threads when a read or a copy has ended.  `ranks`: those that share
    the model, of which this is the first; `memory` as in HostCache, `share` makes a copier of all
    of them from this one's.
    """
    ground = prepare(config, progress=progress, ranks=ranks)
    config, layout, arena, spec = ground.config, ground.layout, ground.arena, ground.spec
    cuda = arena.device.type == "cuda"
    host = HostCache(
        block_bytes=layout.block_bytes,
        budget_bytes=config.ram_cache,
        staging_bytes=min(config.load_bytes_in_flight, arena.num_blocks * layout.block_bytes),
        pinned=cuda,
        wake=wake,
        verify=config.verify_on_load,
        slow_seconds=config.fail_reads_slowly,
        memory=memory,
    )
    pool = BlockPool(arena.num_blocks)
    own = CudaCopier(arena, host, pool) if cuda else ThreadCopier(arena, host, wake=wake)
    copier: Copier = own if share is None else share(own, host)
    progress("memory", 0.85)
    info = _describe(config, spec, layout, ground.model, ground.draft, arena.device, host)
    return Machine(
        config=config,
        spec=spec,
        layout=layout,
        device=arena.device,
        model=ground.model,
        draft=ground.draft,
        arena=arena,
        pool=pool,
        host=host,
        copier=copier,
        vocab_size=ground.vocab_size,
        info=info,
        memory=ground.memory_plan(),
    )


@dataclass(frozen=True, slots=True)
class Ground:
    """What each rank of a model has: its part of the weights, and an arena."""

    config: EngineConfig
    spec: ModelSpec
    layout: BlockLayout
    model: Decoder
    draft: Decoder | None
    arena: Arena
    vocab_size: int
    use: Use | None  # of a card

    def memory_plan(self) -> MemoryPlan:
        """What the device's bytes are for."""
        return _memory_plan(self)


def prepare(config: EngineConfig, *, progress: Progress, ranks: Ranks | None = None) -> Ground:
    """Load the weights, measure, allocate the arena.  Raises as `build` does.

    With `ranks` all of them have to call it: comes out what this one has, in as many blocks as all
    of them have room for.
    """
    folder = Path(config.model)
    pools, generates = config.purpose != "generate", config.purpose != "pool"
    extra = config.extra_vocab
    spec = read_spec(folder, pools=pools, generates=generates, extra_vocab=extra)
    draft_spec = read_draft(config, spec)
    spec = split(spec, config.tensor_parallel)
    config = resolve(config, spec)
    check_reach(config, draft_spec)
    device = torch.device(config.device)
    _limit_threads(config)
    progress("weights", 0.1)

    def load(
        folder: Path, purpose: Purpose, begin: float, end: float, room: int = 0, extra: int = 0
    ) -> Decoder:
        return load_model(
            folder,
            device=device,
            dtype=DTYPES[config.dtype],
            deterministic=config.deterministic,
            max_len=config.max_model_len,
            purpose=purpose,
            ranks=ranks,
            room=room,
            extra_vocab=extra,
            progress=lambda fraction: progress("weights", begin + (end - begin) * fraction),
        )

    draft = load(Path(config.draft_model), "generate", 0.1, 0.2) if draft_spec is not None else None
    begin = 0.2 if draft is not None else 0.1
    room = room_for(config, spec, _card_bytes(device))
    if ranks is not None:  # the first one's plans are everybody's
        room = ranks.least(room)
    model = load(folder, config.purpose, begin, 0.8, room, spec.extra_vocab)
    progress("memory", 0.8)
    layout = spec.block_layout(
        block_size=config.block_size,
        dtype=config.dtype,
        draft_bytes=draft_block_bytes(config, draft_spec),
    )
    cuda = device.type == "cuda"
    vocab_size = min(spec.vocab_size, tokenizer_size(folder) or spec.vocab_size)
    use = measure(config, layout, model, draft, vocab_size, progress) if cuda else None
    num_blocks = plan_blocks(config, layout, spec, room=use.room if use else None)
    if ranks is not None:
        num_blocks = ranks.least(num_blocks)
    config = fit_length(replace(config, num_blocks=num_blocks), spec)
    check_reach(config, draft_spec)
    check_floors(config, layout)
    arena = Arena(
        spec,
        layout,
        block_size=config.block_size,
        num_blocks=num_blocks,
        device=device,
        draft=draft_spec,
    )
    return Ground(config, spec, layout, model, draft, arena, vocab_size, use)


def _limit_threads(config: EngineConfig) -> None:
    """Ranks on one CPU share its cores."""
    if config.threads:
        torch.set_num_threads(config.threads)
    elif config.tensor_parallel > 1 and config.device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel))


def resolve(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Every `auto` but the arena's size, and a length that hangs on it, becomes a value.

    Raises ConfigError, NoDevice.
    """
    device = device_of(config)
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


def device_of(config: EngineConfig) -> Literal["cpu", "cuda"]:
    """What `auto` is here.  Raises NoDevice."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise NoDevice(
            'device = "cuda": no CUDA device is usable', hint='set device = "cpu" or "auto"'
        )
    return "cpu" if config.device == "cpu" or not torch.cuda.is_available() else "cuda"


def _memory_plan(ground: Ground) -> MemoryPlan:
    config, layout, use = ground.config, ground.layout, ground.use
    ranks, spec = ground.model.ranks, ground.draft.spec if ground.draft is not None else None
    plan = MemoryPlan(
        device=_name_of(ground.arena.device),
        rank=f"rank {ranks.rank} of {ranks.size}, " if ranks is not None else "",
        weights=weight_bytes(ground.model),
        num_blocks=config.num_blocks,
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        draft_weights=weight_bytes(ground.draft),
        draft_block_bytes=draft_block_bytes(config, spec),
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


def _card_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _describe(
    config: EngineConfig,
    spec: ModelSpec,
    layout: BlockLayout,
    model: Decoder,
    draft: Decoder | None,
    device: torch.device,
    host: HostCache,
) -> EngineInfo:
    cuda = device.type == "cuda"
    return EngineInfo(
        device=device.type,
        device_name=f"{config.tensor_parallel} x " * (config.tensor_parallel > 1)
        + _name_of(device),
        dtype=layout.dtype,
        layout=layout.id,
        base=base_id(Path(config.model)),
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        draft_block_bytes=draft_block_bytes(config, draft.spec if draft is not None else None),
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        mixed_tokens=config.mixed_tokens,
        num_layers=layout.shapes.num_layers,
        module_dims=layout.shapes.dims,
        num_ids=layout.shapes.vocab,
        vocab_size=spec.vocab_size,
        extra_vocab=spec.extra_vocab,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weight_bytes(model),
        draft_weight_bytes=weight_bytes(draft),
        arena_bytes=config.num_blocks * layout.block_bytes,
        ram_cache_bytes=host.limit_bytes,
        pid=os.getpid(),
        tensor_parallel=config.tensor_parallel,
        device_uuid=f"GPU-{torch.cuda.get_device_properties(device).uuid}" if cuda else "",
    )
