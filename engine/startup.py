"""From a configuration to a machine that can run steps: device, weights, arena, host cache.

Goes in: an EngineConfig with its `auto` values.  Comes out: a `Machine` whose config has none left,
its memory plan, and after `warm_up` everything that is ever allocated, allocated.  Knows nothing of
requests.
"""

import dataclasses
import gc
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from engine.adapters.copier import CudaCopier, ThreadCopier
from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.adapters.host import HostCache
from engine.adapters.plan import StepPlanner
from engine.adapters.slots import SlotRow
from engine.batch import Batcher
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelUnsupported, NoDevice
from engine.graphs import LATE_GRAPHS
from engine.ladder import Ladder
from engine.layout import BlockLayout
from engine.memory.arena import DTYPES, Arena, plan_blocks
from engine.memory.budget import MemoryPlan, usual_adapter_blocks
from engine.memory.pool import BlockPool
from engine.messages import EngineInfo, PackedManifest
from engine.models.decoder import Decoder, load_model
from engine.models.spec import ModelSpec, read_spec
from engine.rehearsal import rehearse
from engine.runner import Runner
from engine.sampler import Sampler, SamplerLimits

Progress = Callable[[str, float], None]

CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS = 512, 2048
#: Rows of a step while somebody decodes.  A card reads its weights whatever the rows, so that up to
#: about FLOP/s over bytes/s of them cost little (an H200: 790 TFLOP/s over 4.27 TB/s is 185).  On a
#: CPU each row counts: with 8 streams a step of SmolLM2 takes 70 ms on 2 cores, with 48 rows of a
#: prompt beside them 144, with 448 748; small chunks lose little, for a row costs much the same.
CPU_MIXED_TOKENS, CUDA_MIXED_TOKENS = 64, 192
#: What the driver keeps for a graph, at the least.
LEAST_GRAPH_BYTES = 2 << 20


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
        max_len=config.max_model_len,
        progress=lambda fraction: progress("weights", 0.1 + 0.7 * fraction),
    )
    progress("memory", 0.8)
    layout = spec.block_layout(block_size=config.block_size, dtype=config.dtype)
    cuda = device.type == "cuda"
    vocab_size = min(spec.vocab_size, tokenizer_size(folder) or spec.vocab_size)
    use = _measure(config, spec, layout, model, vocab_size) if cuda else None
    num_blocks = plan_blocks(config, layout, spec, room=use.room if use else None)
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


def _is_card(device: torch.device) -> bool:
    """Whether steps go through the kernels, and are laid out for them."""
    return device.type == "cuda"


def make_planner(
    config: EngineConfig,
    arena: Arena,
    rows: Mapping[int, SlotRow],
    manifest_of: Callable[[str], PackedManifest],
) -> StepPlanner:
    """The step planner, with all that it will ever allocate.  `rows` is the slot table's own.

    fp16 adapters go through plain torch on a card too: on an H200 the kernels passed 40 of 40
    seeded runs of ten cases in bf16, and failed 14 of 20 in fp16; the cause is not found yet.
    """
    if not _is_card(arena.device) or config.dtype == "float16":
        return StepPlanner(arena, rows, manifest_of)
    slots = DeviceSlots(
        arena.layout, num_slots=config.slots, max_rank=config.max_rank, device=arena.device
    )
    device = DevicePlanner(
        arena,
        slots,
        max_rows=config.max_batch_tokens,
        max_seqs=config.max_num_seqs,
        max_rank=config.max_rank,
        deterministic=config.deterministic,
    )
    return StepPlanner(arena, rows, manifest_of, device)


def make_runner(
    config: EngineConfig,
    model: Decoder,
    arena: Arena,
    planner: StepPlanner,
    vocab_size: int,
    *,
    lookahead: bool,
) -> Runner:
    """A runner for steps within `config`, with all that it will ever allocate but its graphs."""
    batcher = Batcher(
        max_rows=config.max_batch_tokens,
        max_seqs=config.max_num_seqs,
        max_blocks=-(-(config.max_model_len or model.spec.default_length) // config.block_size),
        block_size=config.block_size,
        device=arena.device,
        ladder=_ladder(config) if _is_card(arena.device) and not config.deterministic else None,
        lookahead=lookahead,
        plan_words=planner.plan_words,
    )
    limits = SamplerLimits(vocab_size, model.spec.eos_token_ids)
    sampler = Sampler(limits, device=arena.device, max_rows=config.max_num_seqs)
    return Runner(model, arena, batcher, planner, sampler)


def _ladder(config: EngineConfig) -> Ladder:
    return Ladder(
        max_seqs=config.max_num_seqs,
        mixed_rows=min(config.graph_tokens, config.max_batch_tokens),
        often=config.mixed_tokens,
    )


def warm_up(runner: Runner, config: EngineConfig, layout: BlockLayout, progress: Progress) -> None:
    """Capture the graphs, then run the largest steps once: nothing is allocated after it.

    Only a card has any of this to do.
    """
    if config.device != "cuda":
        return
    runner.capture(lambda fraction: progress("graphs", 0.85 + 0.1 * fraction))
    progress("warming up", 0.95)
    blocks, longest = config.num_blocks, config.max_model_len
    rehearse(runner, config, layout, max_len=longest, num_blocks=blocks)


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
    cpu = device == "cpu"
    rows = config.max_batch_tokens
    full_house = config.max_num_seqs + config.block_size  # everybody decodes, and a prompt goes on
    rows = rows or max(CPU_BATCH_TOKENS if cpu else CUDA_BATCH_TOKENS, full_house)
    mixed = config.mixed_tokens or (CPU_MIXED_TOKENS if cpu else CUDA_MIXED_TOKENS)
    return replace(
        config,
        device=device,
        dtype=dtype,
        max_model_len=config.max_model_len and length,  # 0 until the arena is known
        max_batch_tokens=rows,
        mixed_tokens=min(mixed, rows),
    )


def _fit_length(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The length that the model and the arena both hold; one that was asked for must fit."""
    room = config.num_blocks * config.block_size
    if config.max_model_len > room:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} needs more than the arena's {room} tokens",
            hint="lower max_model_len, or raise cpu_pool or gpu_memory_utilization",
        )
    length = config.max_model_len or min(room, spec.default_length)
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


@dataclass(frozen=True, slots=True)
class _Use:
    """Bytes of a card, measured."""

    total: int
    room: int  # what the arena may take
    other: int
    steps: int
    graphs: int
    num_graphs: int


def _measure(
    config: EngineConfig, spec: ModelSpec, layout: BlockLayout, model: Decoder, vocab_size: int
) -> _Use:
    """Run the largest steps over a small arena, and capture a few graphs, for what all will take.

    What the steps needed goes back to the card, and is asked for again by `warm_up`.
    """
    device = torch.device(config.device)
    rows = config.max_batch_tokens
    before, total = _used(device), torch.cuda.mem_get_info(device)[1]
    blocks = -(-rows // config.block_size) + config.max_num_seqs
    arena = Arena(spec, layout, block_size=config.block_size, num_blocks=blocks, device=device)
    planner = make_planner(config, arena, {}, _no_manifest)
    runner = make_runner(config, model, arena, planner, vocab_size, lookahead=True)
    made = _used(device)
    graphs, num_graphs = _measure_graphs(runner, device)
    captured = _used(device)
    longest = config.max_model_len or spec.default_length
    if runner.graphs is not None:
        runner.graphs.use_graphs = False  # eager steps need the most
    rehearse(runner, config, layout, max_len=longest, num_blocks=blocks)
    free, _ = torch.cuda.mem_get_info(device)
    peak = total - free - (captured - made) - arena.bytes.numel()
    del planner, runner, arena
    _used(device)
    room = int(total * config.gpu_memory_utilization) - peak - graphs
    return _Use(
        total=total,
        room=room,
        other=max(before - _weight_bytes(model), 0),
        steps=max(peak - before, 0),
        graphs=graphs,
        num_graphs=num_graphs,
    )


@torch.inference_mode()
def _measure_graphs(runner: Runner, device: torch.device) -> tuple[int, int]:
    """Bytes of all graphs, and how many there may be.

    Three are captured, of the most rows: the first two tell what all of them share and what their
    kernels take when they are loaded, the third what each has of its own.  Where there are some
    with adapters, it is one of those: no others have more kernels.
    """
    usual = runner.usual()
    if not usual:
        return 0, 0
    largest = [n for n, (rung, _) in enumerate(usual) if rung == usual[0][0]]
    picked = list(dict.fromkeys((0, *largest[:0:-1], *range(1, len(usual)))))[:3]
    steps = [_used(device)]
    for rung, plan in (usual[n] for n in picked):
        runner.capture_one(rung, plan)
        steps.append(_used(device))
    each = max(steps[-1] - steps[-2], LEAST_GRAPH_BYTES)
    count = len(usual) + LATE_GRAPHS
    return steps[-1] - steps[0] + each * (count - len(picked)), count


def _used(device: torch.device) -> int:
    """Bytes of the card in use, torch's cache not counted."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _no_manifest(rev: str) -> PackedManifest:
    raise AssertionError(f"{rev}: no adapter is used in a rehearsal")


def _memory_plan(
    config: EngineConfig, layout: BlockLayout, info: EngineInfo, use: _Use | None
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


def _weight_bytes(model: Decoder) -> int:
    """Shared tensors count once."""
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    weights |= {b.data_ptr(): b.numel() * b.element_size() for b in model.buffers()}
    return sum(weights.values())


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
        block_bytes=layout.block_bytes,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=_weight_bytes(model),
        arena_bytes=config.num_blocks * layout.block_bytes,
        ram_cache_bytes=host.limit_bytes,
        pid=os.getpid(),
    )
