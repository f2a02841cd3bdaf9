"""How much room a model's weights have behind them for the adapters of prompts.

Goes in: the configuration, the model's shapes, how much the card holds.  Comes out: columns for
each module, and bytes.  `kernels/lora_augment.py` is what fills them.  Torch-free: whoever plans
for a card asks it too.
"""

from engine.config import EngineConfig
from engine.kernels import tiles
from engine.layout import GROUPS, MODULE_ID, ROOMY_GROUPS, room_of
from engine.models.spec import ModelSpec

#: Columns of a module: the most that fit.
SIZES = (64, 32, 16)
#: Of what the weights leave of the card: of 24 GB an 8B in bf16 takes no more than 16 columns.
MOST = 0.02


def room_for(config: EngineConfig, spec: ModelSpec, card_bytes: int) -> int:
    """Columns for each module: the sum of the ranks, each rounded up to 16, of the adapters that
    may be guests in one step.  0 where no step has guests.

    In fp16 none has: what is a sum in fp32 may be too large there.
    """
    prompts = config.max_batch_tokens > tiles.PREFILL_ROWS
    if config.device != "cuda" or config.dtype != "bfloat16" or config.deterministic or not prompts:
        return 0
    return usual_room(spec, card_bytes)


def usual_room(spec: ModelSpec, card_bytes: int) -> int:
    """Columns on such a card, where steps have guests."""
    left = card_bytes - weight_bytes(spec)
    return next((size for size in SIZES if bytes_of(spec, size) <= MOST * left), 0)


def bytes_of(spec: ModelSpec, columns: int) -> int:
    """What the room takes in all layers, at 2 bytes an element."""
    dims, elements = spec.shapes.dims, 0
    for group in ROOMY_GROUPS:
        widths = [dims[MODULE_ID[module]][1] for module in GROUPS[group]]
        elements += room_of(columns, len(widths)) * sum(widths)
    return 2 * elements * spec.num_layers


def weight_bytes(spec: ModelSpec) -> int:
    """Of the layers, the embedding and the head, which are nearly all."""
    layers = sum(d_in * d_out for d_in, d_out in spec.shapes.dims) * spec.num_layers
    words = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    return 2 * (layers + words)
