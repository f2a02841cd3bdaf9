"""The LoRA correction of one fused projection: y += scaling * (x Aᵀ) B, segment by segment.

Goes in: the projection's input and output, and which rows belong to which slot.  Comes out: the
output, corrected in place.  h = x Aᵀ, the scaling and the sum are in fp32, whatever the dtypes.
Rows of no segment and columns of an absent module are not touched.  Knows no names and no requests.

A plan on the device goes through the Triton kernels (`lora_shrink.py`, `lora_expand.py`), which are
imported only then; anything else through plain torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import tiles
from engine.kernels.gemm import by_tiles, leads
from engine.kernels.lora_meta import LoraDevicePlan, LoraMeta, LoraRows
from engine.layout import GROUPS

#: (fused modules) -> their group's name.
GROUP_OF = {modules: group for group, modules in GROUPS.items()}


def lora_apply(
    y: Tensor,
    x: Tensor,
    *,
    layer: int,
    modules: Sequence[str],
    splits: Sequence[int],
    meta: LoraMeta,
    base_bias: Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """Correct y (T, sum of splits) in place for x (T, d_in): `lora_shrink`, then `lora_expand`."""
    lora_shrink(x, layer=layer, modules=modules, meta=meta)
    lora_expand(
        y,
        x,
        layer=layer,
        modules=modules,
        splits=splits,
        meta=meta,
        base_bias=base_bias,
        deterministic=deterministic,
    )


def lora_shrink(x: Tensor, *, layer: int, modules: Sequence[str], meta: LoraMeta) -> None:
    """The first half, which needs no y: put it ahead of the base's product.

    On a card it is one launch that leaves h in the plan's store, until the next one overwrites it,
    while the product behind it already asks for its weights.  Elsewhere all is done by the second.
    """
    if meta.device is not None:
        from engine.kernels.lora_shrink import shrink

        assert x.dtype == meta.device.store.arena.dtype, "dtypes differ"
        for plan in _parts(meta.device):
            shrink(x, layer, GROUP_OF[tuple(modules)], plan)


def lora_expand(
    y: Tensor,
    x: Tensor,
    *,
    layer: int,
    modules: Sequence[str],
    splits: Sequence[int],
    meta: LoraMeta,
    base_bias: Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """The second half: correct y (T, sum of splits) in place for the x (T, d_in) of the first.

    `modules` are fused side by side in y, `splits` are their widths, `base_bias` (sum of splits,)
    is what y holds of the base's own bias.  A segment whose slot is not in `meta.slots` is a
    KeyError: it must never be answered with the base model alone.
    """
    if meta.device is not None:
        from engine.kernels.lora_expand import expand

        assert y.dtype == meta.device.store.arena.dtype, "dtypes differ"
        for plan in _parts(meta.device):
            expand(y, layer, GROUP_OF[tuple(modules)], plan, base_bias)
        return
    for segment in meta.segments:
        pairs = meta.slots[segment.slot]
        x_rows, y_rows = x[segment.start : segment.end], y[segment.start : segment.end]
        column = 0
        for module, width in zip(modules, splits, strict=True):
            pair = pairs.get((layer, module))
            if pair is not None:
                columns = slice(column, column + width)
                own = None if base_bias is None else base_bias[columns]
                _add(y_rows[:, columns], x_rows, pair, own, deterministic)
            column += width


def lora_joins(x: Tensor, weight: Tensor, meta: LoraMeta, *, deterministic: bool) -> bool:
    """Whether `lora_joined` may stand behind the base's product of x, in place of both halves."""
    plan = meta.device
    if plan is None or plan.short is not None or not (tiles.JOINED and plan.store.pdl):
        return False
    return leads(x, weight, deterministic=deterministic)


def lora_gates(meta: LoraMeta) -> bool:
    """Whether `lora_gated` may stand for the second half of gate and up, and for their gate."""
    plan = meta.device
    return plan is not None and plan.kind.rest_items is not None and not plan.kind.extras


def lora_gated(y: Tensor, *, layer: int, meta: LoraMeta, gelu: bool) -> Tensor:
    """silu(gate) * up, or with `gelu` gelu's tanh form, of what `lora_expand` would make of
    y (T, 2 * ffn) -> (T, ffn), to the bit; y stays.  Behind `lora_shrink`, where `lora_gates`."""
    from engine.kernels.lora_gate import gated

    assert meta.device is not None and y.dtype == meta.device.store.arena.dtype, "dtypes differ"
    return gated(y, layer, meta.device, gelu=gelu)


def lora_augments(meta: LoraMeta) -> bool:
    """Whether the step's adapters are guests of the products of weights that have room."""
    return meta.device is not None and meta.device.kind.guests > 0


def lora_augment(
    x: Tensor, weight: Tensor, *, layer: int, modules: Sequence[str], meta: LoraMeta
) -> int:
    """Behind `lora_shrink`, in place of the second half and ahead of the product, where
    `lora_augments`: fills the room behind the rows of x (T, d_in) and of `weight` (sum of splits,
    d_in + room), and tells how many more inputs the product has so.

    h is rounded to x's dtype once it is scaled, which other steps do not: as PEFT has it.
    """
    from engine.kernels.lora_augment import augment

    assert meta.device is not None and x.dtype == meta.device.store.arena.dtype, "dtypes differ"
    return augment(x, weight, layer, GROUP_OF[tuple(modules)], meta.device)


def lora_begin(meta: LoraMeta) -> None:
    """Ahead of a step's first layer: what `lora_joined` counts begins at zero."""
    if meta.device is not None and tiles.JOINED and meta.device.store.pdl:
        from engine.kernels.lora_joint import begin

        begin(meta.device.store)


def lora_joined(
    y: Tensor,
    x: Tensor,
    *,
    layer: int,
    modules: Sequence[str],
    meta: LoraMeta,
    base_bias: Tensor | None = None,
) -> None:
    """Both halves in one launch, where `lora_joins` and right behind the product with `closely`.

    The same bits as of the two.  Takes each layer's group once between two calls of `lora_begin`.
    """
    from engine.kernels.lora_joint import joined

    assert meta.device is not None and x.dtype == y.dtype == meta.device.store.arena.dtype
    joined(y, x, layer, GROUP_OF[tuple(modules)], meta.device, base_bias)


def lora_apply_cuda(y: Tensor, x: Tensor, layer: int, group: str, plan: LoraDevicePlan) -> None:
    """Correct y (T, sum of the group's widths) in place for x (T, d_in): two launches, no sync.

    y, x and the arena have one dtype.  `plan` is the step's own; its store's h is overwritten.
    """
    modules, meta = GROUPS[group], LoraMeta(device=plan)
    widths = plan.store.groups[group].widths
    lora_apply(y, x, layer=layer, modules=modules, splits=widths, meta=meta)


def _parts(plan: LoraDevicePlan) -> tuple[LoraDevicePlan, ...]:
    """A step's launches.  The parts have different rows of x, y and h, so their order is free."""
    return (plan,) if plan.short is None else (plan, plan.short)


def _add(
    y: Tensor, x: Tensor, pair: LoraRows, base_bias: Tensor | None, deterministic: bool
) -> None:
    """y (rows, d_out) += scaling * (x Aᵀ) B, or with bias and gain as `PackedModule` says."""
    a, b = _whole(pair.a), _whole(pair.b)  # (rank, d_in), (rank and what is behind, d_out)
    more = b[pair.rank :]
    b = b[: pair.rank]
    x = x.float()
    if not deterministic and y.dtype == torch.float32 and not len(more):
        y.addmm_((x @ a.t()).mul_(pair.scaling), b)
        return
    if deterministic:
        delta = by_tiles(x, lambda tile: (tile @ a.t()).mul_(pair.scaling) @ b)
    else:
        delta = (x @ a.t()).mul_(pair.scaling) @ b
    if pair.bias:
        delta += pair.scaling * more[0]
    total = y.float() + delta
    if pair.gain:
        own = 0.0 if base_bias is None else base_bias.float()
        total = more[-2:].sum(0) * (total - own) + own
    y.copy_(total)


def _whole(pieces: tuple[Tensor, ...]) -> Tensor:
    """The pieces as one fp32 matrix; without a copy where there is one piece of fp32."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole.float()
