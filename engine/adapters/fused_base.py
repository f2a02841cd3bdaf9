"""LoRA on a module that the base was published with as one, such as Phi-3's `qkv_proj`.

Such a pair has one A, and a B whose rows lie side by side as the module's parts do; so do the
numbers of a bias or a magnitude.  Each part gets the same A and its own rows of B, which is the
same product exactly: rows of B are whole in the file, so a part is a tensor of its own, only
shorter.  A is stored once for each part.

Goes in: one factor's tensor and the base's spec.  Comes out: a tensor for each part.  Torch-free.
"""

import msgspec

from engine.adapters.manifest import TensorRef
from engine.adapters.reasons import refuse, shown
from engine.layout import ENDS, FUSED_NAMES, GROUPS, MODULE_ID
from engine.models.spec import ModelSpec


def parts_of(module: str, side: str, ref: TensorRef, spec: ModelSpec) -> dict[str, TensorRef]:
    """Module -> its tensor, for a `side` of `module`: itself if it is not a fused one.  All but
    "A" have a row for each output.

    Raises AdapterInvalid if the rows are not those of the parts together.
    """
    if module not in FUSED_NAMES:
        return {module: ref}
    parts = GROUPS[FUSED_NAMES[module]]
    dims = 2 if side == "B" else 1
    if side == "A" or len(ref.shape) != dims or 0 in ref.shape:  # refused with the others
        return dict.fromkeys(parts, ref)
    widths = {part: spec.shapes.dims[MODULE_ID[part]][1] for part in parts}
    rows, *rank = ref.shape
    if rows != sum(widths.values()):
        wanted = f"[{sum(widths.values())}, r]" if rank else f"[{sum(widths.values())}]"
        raise refuse(
            "E_SHAPE",
            f"{shown(ref.name)} is {list(ref.shape)}, wanted {wanted}",
            "it was probably made for another model: serve it on that one",
        )
    row_bytes, found, first = (ref.end - ref.begin) // rows, {}, 0
    for part, width in widths.items():
        cut = msgspec.structs.replace(ref, shape=(width, *rank))
        if ref.transposed:  # its rows are columns in the file: no part is whole there
            found[part] = msgspec.structs.replace(cut, first=first)
        else:
            begin = ref.begin + first * row_bytes
            end = begin + width * row_bytes
            found[part] = msgspec.structs.replace(cut, begin=begin, end=end)
        first += width
    return found


def base_rows(layer: int, module: str, spec: ModelSpec) -> tuple[str, int]:
    """The base's tensor that holds `module`, by the name that `models/weights.py` gives it, and
    which of its rows is the module's first."""
    if module in ENDS:
        return "embed_tokens.weight" if spec.tied else "lm_head.weight", 0
    block = "mlp" if MODULE_ID[module] >= MODULE_ID["gate_proj"] else "self_attn"
    name, first = module, 0
    for whole, group in FUSED_NAMES.items() if spec.fused_names else ():
        parts = GROUPS[group]
        if module in parts:
            before = parts[: parts.index(module)]
            name, first = whole, sum(spec.shapes.dims[MODULE_ID[part]][1] for part in before)
    return f"layers.{layer}.{block}.{name}.weight", first


def module_names(spec: ModelSpec) -> tuple[str, ...]:
    """What the base's modules are called where it was published."""
    names = {group: name for name, group in FUSED_NAMES.items()} if spec.fused_names else {}
    return tuple(
        name
        for group, modules in GROUPS.items()
        for name in ((names[group],) if group in names else modules)
    )
