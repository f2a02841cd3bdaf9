"""What kind of LoRA a revision is, and what its products are multiplied by, for people.

Goes in: a revision's record and its stored folder.  Comes out: words and numbers for the wire.
Decides nothing about serving: that is in the modules already.
"""

from pathlib import Path

from engine.adapters.manifest import CONFIG_FILE
from engine.adapters.mlx_config import is_mlx
from engine.adapters.peft_config import read_config
from engine.errors import AdapterInvalid
from engine.layout import HEAD_ENDS
from lorad.registry.records import RevisionRecord


def from_mlx(folder: Path) -> bool:
    """Whether mlx-lm wrote the stored config; False where it cannot be read."""
    try:
        return is_mlx(read_config((folder / CONFIG_FILE).read_bytes()))
    except (OSError, AdapterInvalid):
        return False


def kinds_of(record: RevisionRecord, *, mlx: bool) -> tuple[str, ...]:
    """What it has beyond a plain LoRA on a layer's projections; () if nothing."""
    modules = {m.module for m in record.modules}
    found = {
        "MLX": mlx,
        "aLoRA": bool(record.alora_tokens),
        "DoRA": any(m.gain for m in record.modules),
        "bias": any(m.bias for m in record.modules),
        "head": "lm_head" in modules,
        "embedding": "embed_tokens" in modules,
        "rows": any(m.replaces and m.module not in HEAD_ENDS for m in record.modules),
        "classifier": not modules.isdisjoint(HEAD_ENDS),
        "tokenizer": record.own_tokenizer,
    }
    return tuple(kind for kind, there in found.items() if there)


def by_bytes_alone(record: RevisionRecord) -> tuple[str, ...]:
    """Of these, what `loractl verify` holds against stored bytes, as it has no effect by itself."""
    whole = ("rows", "classifier", "tokenizer")
    return tuple(kind for kind in kinds_of(record, mlx=False) if kind in whole)


def scalings_of(record: RevisionRecord) -> tuple[float, ...]:
    """The different numbers that a module's product is multiplied by, ascending."""
    return tuple(sorted({m.scaling for m in record.modules if not m.replaces}))
