"""How many rows a step may have on a card, beside weights, adapters and graphs.

Goes in: a spec, a configuration, the card's free bytes.  Comes out: rows, or ConfigError where
somebody asked for more; and which steps are padded.  An estimate from shapes: nothing is run for
it.
"""

from bisect import bisect_right

import torch

from engine.errors import ConfigError
from engine.kernels.lora_meta import group_shapes, h_elements
from engine.kernels.ragged_attention import takes_ragged
from engine.kernels.tiles import ALL, DETERMINISTIC
from engine.ladder import LATE_GRAPHS, InputLadder
from engine.layout import ITEMSIZE
from engine.memory.arena import DTYPES
from engine.models.bases import BaseSpec
from engine.models.encoder_spec import EncoderSpec
from engine.models.spec import ModelSpec
from engine.pooling.config import PoolingConfig

#: Of what is free so much is counted on; the rest is for libraries and for holes between tensors.
SHARE = 0.9
#: A card that has room for no more is told of now, and not by the first request.
LEAST_ROWS = 64
#: What the driver keeps of a graph, and what the libraries want on the stream that captures.
GRAPH_BYTES, CAPTURE_BYTES = 2 << 20, 64 << 20


def most_rows(config: PoolingConfig, spec: BaseSpec, dtype: str, free: int) -> int:
    """Rows of the largest step that `free` bytes hold.  Raises ConfigError for a length or a budget
    beyond that, and for a card that holds next to none."""
    weights, graphs = weight_bytes(spec, dtype), graph_bytes(config, spec, dtype)
    left = int(max(SHARE * free - weights - config.adapter_pool - graphs, 0))
    row = row_bytes(spec, dtype)

    def step_bytes(rows: int) -> int:
        return rows * row + lora_bytes(config, spec, dtype, rows)

    most = bisect_right(range(left // row + 1), left, key=step_bytes) - 1
    beside, others = f"weights of {weights} bytes", "adapter_pool"
    if graphs:
        beside, others = f"{beside} and graphs of {graphs}", "adapter_pool or graph_tokens"
    for name in ("max_length", "max_batch_tokens"):
        if getattr(config, name) > most:
            raise ConfigError(
                f"{name} = {getattr(config, name)} needs more than the card has free: {beside}"
                f" and adapter_pool leave room for steps of {most} rows",
                hint=f"lower it, or {others}",
            )
    if most < LEAST_ROWS:
        raise ConfigError(
            f"adapter_pool = {config.adapter_pool}: with {beside} it leaves no room for a step in"
            f" the card's {free} free bytes",
            hint=f"lower {others}, or free the card",
        )
    return most


def ladder_of(config: PoolingConfig, spec: BaseSpec, dtype: str) -> InputLadder | None:
    """What an encoder's small steps are padded to on a card, to replay graphs; None: they are not.

    Not where a row's bits must not hang on the padding, and not where attention has no kernel that
    reads on the card where inputs begin.
    """
    if not isinstance(spec, EncoderSpec) or config.deterministic:
        return None
    rows = min(config.graph_tokens, config.max_batch_tokens or config.graph_tokens)
    if rows < 2 or not takes_ragged(torch.device("cuda"), DTYPES[dtype], spec.head_dim):
        return None
    return InputLadder(rows=rows, seqs=config.max_num_seqs)


def graph_bytes(config: PoolingConfig, spec: BaseSpec, dtype: str) -> int:
    """Of all graphs that there may be: they share the memory of the largest one's rows."""
    ladder = ladder_of(config, spec, dtype)
    if ladder is None:
        return 0
    graphs = len(ladder.all) + LATE_GRAPHS
    return CAPTURE_BYTES + graphs * GRAPH_BYTES + ladder.all[-1].rows * row_bytes(spec, dtype)


def lora_bytes(config: PoolingConfig, spec: BaseSpec, dtype: str, rows: int) -> int:
    """What is kept for LoRA's own hidden states, in fp32, in steps of up to `rows` rows: for the
    highest rank that there may be, whatever the adapters."""
    groups = group_shapes(spec.block_layout(block_size=0, dtype=dtype)).values()
    rank = -(-config.max_rank // 16) * 16
    return 4 * max(
        h_elements(groups, tiles, min(rows, tiles.most_rows), rank)
        for tiles in ((DETERMINISTIC,) if config.deterministic else ALL)
    )


def weight_bytes(spec: BaseSpec, dtype: str) -> int:
    """Of the layers and the embedding, which is nearly all."""
    layers = sum(d_in * d_out for d_in, d_out in spec.shapes.dims) * spec.num_layers
    return (layers + spec.vocab_size * spec.hidden_size) * ITEMSIZE[dtype]


def row_bytes(spec: BaseSpec, dtype: str) -> int:
    """What a row has in a layer, as if nothing of it were given back before the layer's end: the
    stream and its norms, heads before and after they turn, the MLP's inside; a decoder's keys and
    values; and the row once in fp32, as it is pooled."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    kv = (spec.num_kv_heads if isinstance(spec, ModelSpec) else spec.num_heads) * spec.head_dim
    kept = 2 * kv if isinstance(spec, ModelSpec) else 0
    numbers = 5 * hidden + 3 * heads + 4 * kv + 3 * spec.ffn_size + kept
    return numbers * ITEMSIZE[dtype] + 4 * hidden
