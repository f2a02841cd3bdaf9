"""How many rows a step may have on a card, beside the weights and the adapters.  Torch-free.

Goes in: a spec, a configuration, the card's free bytes.  Comes out: rows, or ConfigError where
somebody asked for more.  An estimate from shapes: nothing is run for it.
"""

from engine.errors import ConfigError
from engine.layout import ITEMSIZE
from engine.models.bases import BaseSpec
from engine.models.spec import ModelSpec
from engine.pooling.config import PoolingConfig

#: Of what is free so much is counted on; the rest is for libraries and for holes between tensors.
SHARE = 0.9
#: A card that has room for no more is told of now, and not by the first request.
LEAST_ROWS = 64


def most_rows(config: PoolingConfig, spec: BaseSpec, dtype: str, free: int) -> int:
    """Rows of the largest step that `free` bytes hold.  Raises ConfigError for a length or a budget
    beyond that, and for a card that holds next to none."""
    taken = weight_bytes(spec, dtype) + config.adapter_pool
    most = int(max(SHARE * free - taken, 0)) // row_bytes(spec, dtype)
    for name in ("max_length", "max_batch_tokens"):
        if getattr(config, name) > most:
            raise ConfigError(
                f"{name} = {getattr(config, name)} needs more than the card has free: weights and"
                f" adapter_pool leave room for steps of {most} rows",
                hint="lower it, or adapter_pool",
            )
    if most < LEAST_ROWS:
        raise ConfigError(
            f"adapter_pool = {config.adapter_pool}: with weights of {weight_bytes(spec, dtype)}"
            f" bytes it leaves no room for a step in the card's {free} free bytes",
            hint="lower it, or free the card",
        )
    return most


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
