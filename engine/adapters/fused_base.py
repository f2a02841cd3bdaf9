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
from engine.layout import ENDS, FUSED_NAMES, GROUPS, HEAD_DENSE, MODULE_ID
from engine.models.bases import BaseSpec
from engine.models.encoder_spec import EncoderSpec


def parts_of(module: str, side: str, ref: TensorRef, spec: BaseSpec) -> dict[str, TensorRef]:
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


def base_rows(layer: int, module: str, spec: BaseSpec) -> tuple[str, int]:
    """The base's tensor that holds `module`, by the engine's name, and which of its rows is the
    module's first.  Where a family's files are of both sorts, that of the module alone."""
    if module == HEAD_DENSE:
        return "head.dense.weight", 0
    if isinstance(spec, EncoderSpec):
        return f"layers.{layer}.{module}.weight", 0
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


def module_names(spec: BaseSpec) -> tuple[str, ...]:
    """What the base's modules are called where it was published."""
    names = {group: name for name, group in FUSED_NAMES.items()} if spec.fused_names else {}
    return tuple(
        name
        for group, modules in GROUPS.items()
        for name in ((names[group],) if group in names else modules)
        if name in FUSED_NAMES or spec.shapes.of(name)[1]
    )


def whole_rows(layer: int, module: str, spec: BaseSpec) -> tuple[str, int]:
    """Of an encoder's module, as `base_rows`, where it was published within a fused one."""
    for whole, group in FUSED_NAMES.items():
        parts = GROUPS[group]
        if module in parts:
            before = parts[: parts.index(module)]
            return f"layers.{layer}.{whole}.weight", sum(spec.shapes.of(p)[1] for p in before)
    return base_rows(layer, module, spec)
