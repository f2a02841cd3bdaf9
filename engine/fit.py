"""Fit: does what was asked for fit the model and the arena, and what do the `auto` sizes become?

Goes in: an EngineConfig and a ModelSpec.  Comes out: numbers of blocks and tokens, or ConfigError.
Torch-free: a start asks it, and whoever wants to know beforehand what a start would say.
"""

from msgspec.structs import replace

from engine.config import EngineConfig
from engine.draft_fit import check_reach, draft_block_bytes, read_draft
from engine.errors import ConfigError
from engine.layout import BlockLayout
from engine.models.shard import split
from engine.models.spec import ModelSpec


def check_fit(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise what a start on this model would, as far as that needs no look at a device: how much a
    card holds, and where `device` is auto whether there is one, the start alone knows."""
    check_length(config, spec)
    draft = read_draft(config, spec)
    check_reach(config, draft)
    spec = split(spec, config.tensor_parallel)
    if config.device != "cpu" and not config.num_blocks:
        return
    dtype = "float32" if config.dtype == "auto" else config.dtype
    resolved = replace(config, dtype=dtype)
    share = {"draft_bytes": draft_block_bytes(resolved, draft)} if draft is not None else {}
    layout = spec.block_layout(block_size=config.block_size, dtype=dtype, **share)
    config = replace(config, num_blocks=plan_blocks(config, layout, spec))
    check_reach(fit_length(config, spec), draft)
    if config.device == "cpu" or config.dtype != "auto":  # else a block's size is not known yet
        check_floors(config, layout)


def check_length(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for more tokens than the model has positions."""
    if config.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} is above the model's "
            f"{spec.max_position} positions",
            hint=f"set it to {spec.max_position} or less",
        )


def fit_length(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The length that the model and the arena both hold; one that was asked for must fit."""
    room = config.num_blocks * config.block_size
    if config.max_model_len > room:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} needs more than the arena's {room} tokens",
            hint="lower max_model_len, or raise cpu_pool or gpu_memory_utilization",
        )
    length = config.max_model_len or min(room, spec.default_length)
    return replace(config, max_model_len=length)


def check_floors(config: EngineConfig, layout: BlockLayout) -> None:
    """Raises ConfigError for floors that nobody could serve above; `num_blocks` is known."""
    kv = -(-config.kv_floor // layout.block_bytes)
    adapters = config.adapter_floor // layout.block_bytes
    if kv + adapters <= config.num_blocks and adapters <= config.num_blocks - 2:
        return
    key = "adapter_floor" if adapters else "kv_floor"
    arena = config.num_blocks * layout.block_bytes
    raise ConfigError(
        f"{key} = {getattr(config, key)}: kv_floor and adapter_floor are {kv} and {adapters} "
        f"blocks, and the arena has {config.num_blocks} ({arena} bytes)",
        hint="lower them, or raise cpu_pool or gpu_memory_utilization",
    )


def plan_blocks(
    config: EngineConfig, layout: BlockLayout, spec: ModelSpec, *, room: int | None = None
) -> int:
    """How many blocks the arena gets.

    `config.num_blocks` if set; otherwise what fits in the card's `room` bytes, where more is a
    larger prefix cache.  With `room` None, what fits in `cpu_pool`, but never more than all
    sequences at full length plus every slot at the highest rank could use.
    Raises ConfigError if that does not hold one sequence of two blocks beside a spare.
    """
    length = config.max_model_len or spec.default_length
    if config.num_blocks:
        blocks = config.num_blocks
    elif room is not None:
        blocks = room // layout.block_bytes
    else:
        adapter = sum(a + b for a, b in layout.shapes.dims) * layout.shapes.num_layers
        adapter_blocks = -(-adapter * config.max_rank * layout.itemsize // layout.block_bytes)
        useful = (
            config.max_num_seqs * -(-length // config.block_size) + config.slots * adapter_blocks
        )
        blocks = min(config.cpu_pool // (layout.block_bytes * layout.shards), useful)
    if blocks < 1 and room is not None and not config.num_blocks:
        lacking = 3 * layout.block_bytes - room
        raise ConfigError(
            "what is left of the card's memory for KV and adapters is "
            f"{lacking / 2**20:,.1f} MiB short of three blocks",
            hint="see with nvidia-smi who else holds its memory, or raise gpu_memory_utilization",
        )
    if blocks < 3:
        raise ConfigError(
            f"the arena would hold {blocks} blocks of {layout.block_bytes} bytes",
            hint="raise cpu_pool or gpu_memory_utilization, or lower block_size",
        )
    return blocks
