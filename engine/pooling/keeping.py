"""Which engine a model that only pools has: one that keeps keys and values, or one that does not.

Goes in: a PoolingConfig.  Comes out: the EngineConfig of an engine whose inputs begin with what is
cached of others, or None where inputs are computed whole (`pooling/core.py`).  Loads nothing.
"""

from engine.config import EngineConfig, PoolsToo
from engine.errors import ConfigError
from engine.layout import BlockLayout
from engine.models.encoder_spec import EncoderSpec
from engine.pooling.config import PoolingConfig
from engine.pooling.fit import read_model
from engine.pooling.machine import resolve

#: Tokens of a block, as a model that generates has them.
BLOCK_SIZE = 16
#: Keys and values take no more than this, whatever the model: one that takes 32,768 tokens has
#: gigabytes of them in an input of that length.
KV_BYTES = 1 << 30
#: Rows of a step.  More at once were no faster on a CPU, and who shares a beginning with others
#: waits for as many of them.
CPU_ROWS, CUDA_ROWS = 512, 2048


def keeping(config: PoolingConfig) -> EngineConfig | None:
    """Raises as `read_model` and `resolve` do; and ConfigError where reuse was asked for, and the
    keys and values of an input have no room."""
    folder, spec, pooling = read_model(config)
    wishes = config.prefix_cache, config.chunked_prefill
    if isinstance(spec, EncoderSpec) or pooling.kinds != ("last",) or "off" in wishes:
        return None
    now = resolve(config, spec, pooling)
    cuda = now.device == "cuda"
    if cuda and "on" not in wishes:
        return None  # what it takes of a card beside others, and how fast it is, is not measured
    layout = spec.block_layout(block_size=BLOCK_SIZE, dtype=now.dtype)
    longest = -(-now.max_length // BLOCK_SIZE) + 1
    most = KV_BYTES // layout.block_bytes
    if longest > most:
        if "on" in wishes:
            raise _no_room(config, now.max_length, longest * layout.block_bytes)
        return None
    rows = config.max_batch_tokens or min(CUDA_ROWS if cuda else CPU_ROWS, now.max_batch_tokens)
    seqs = min(config.max_num_seqs, rows)
    blocks = min(most, seqs * longest) + _adapter_blocks(config, layout)
    return EngineConfig(
        model=str(folder),
        device=now.device,
        dtype=now.dtype,
        block_size=BLOCK_SIZE,
        max_model_len=max(now.max_length, 2),
        max_num_seqs=seqs,
        max_batch_tokens=rows,
        graph_tokens=config.graph_tokens,
        num_blocks=blocks,
        slots=config.slots,
        max_rank=config.max_rank,
        ram_cache=config.ram_cache,
        kv_floor=longest * layout.block_bytes,
        eviction=config.eviction,
        starve_after=config.starve_after,
        thrash_window=config.thrash_window,
        load_bytes_in_flight=config.load_bytes_in_flight,
        verify_on_load=config.verify_on_load,
        deterministic=config.deterministic,
        threads=config.threads,
        pools=PoolsToo(
            root=config.model,
            alone=True,
            pooling=config.pooling,
            truncate=config.truncate,
            score_tokens=config.score_tokens,
            prefix_cache=config.prefix_cache,
            chunked_prefill=config.chunked_prefill,
        ),
    )


def _adapter_blocks(config: PoolingConfig, layout: BlockLayout) -> int:
    """No more than every slot at the highest rank could use, and two at the least."""
    rows = sum(a + b for a, b in layout.shapes.dims) * layout.shapes.num_layers
    adapter = -(-rows * config.max_rank * layout.itemsize // layout.block_bytes)
    return max(min(config.adapter_pool // layout.block_bytes, config.slots * (adapter + 1)), 2)


def _no_room(config: PoolingConfig, length: int, kv_bytes: int) -> ConfigError:
    name = "prefix_cache" if config.prefix_cache == "on" else "chunked_prefill"
    return ConfigError(
        f"{name} = 'on': keys and values of an input of {length} tokens take {kv_bytes} bytes,"
        f" and there are {KV_BYTES}",
        hint=f'a smaller max_length, or leave {name} at "auto"',
    )
