"""What sets the layers of one model apart: sliding windows, rotation.  Torch-free.

Goes in: the config's fields and the family's rule.  Comes out: one value a layer.
"""

from collections.abc import Sequence
from typing import Any

from engine.models.families import Family
from engine.models.hf_config import Fields


def read_rotated(config: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates q and k: all do, but some of SmolLM3's."""
    if not family.skips_rotation:
        return (True,) * layers
    interval = config.integer("no_rope_layer_interval", 4)
    rotated = config.take("no_rope_layers", None)  # 1 where a layer *has* a rotation
    if rotated is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(rotated, list) or len(rotated) < layers or not _are_in(rotated, (0, 1)):
        raise config.refusal("no_rope_layers", f"expected {layers} times 0 or 1")
    return tuple(bool(flag) for flag in rotated[:layers])


def read_windows(
    config: Fields, family: Family, layers: int, rotated: Sequence[bool]
) -> tuple[int, ...]:
    """Window of every layer, 0 = full.  Positions include the row itself."""
    size = 0
    if family.window != "none" and config.take("sliding_window") is not None:
        size = config.integer("sliding_window")
    if family.window in ("late", "unrotated") and not config.flag("use_sliding_window"):
        size = 0
    windowed = _windowed(config, family, layers, rotated)
    plain = tuple(size * here for here in windowed)
    kinds = config.take("layer_types", None)
    windows = plain if kinds is None else _by_kind(config, kinds, size, layers)
    if family.window == "pattern" and kinds is None and any(windowed) and not size:
        raise config.refusal("sliding_window", "some of the family's layers have one")
    if family.window == "all" and windows != plain:
        # The published code windows all layers alike here, whatever layer_types says.
        raise config.refusal("layer_types", "contradicts sliding_window, which covers all layers")
    return windows


def _windowed(
    config: Fields, family: Family, layers: int, rotated: Sequence[bool]
) -> tuple[bool, ...]:
    """Which layers have the window where `layer_types` does not say it."""
    if family.window == "late":
        first = config.take("max_window_layers", 28) or 0
        if not isinstance(first, int):
            raise config.refusal("max_window_layers", "expected a whole number")
        return tuple(layer >= first for layer in range(layers))
    if family.window == "unrotated":
        config.take("max_window_layers", None)  # carried along, read by nobody
        return tuple(not turned for turned in rotated)
    if family.window == "pattern":
        pattern = config.integer("sliding_window_pattern")  # the last layer of each is full
        return tuple((layer + 1) % pattern != 0 for layer in range(layers))
    return (family.window == "all",) * layers


def _by_kind(config: Fields, kinds: Any, size: int, layers: int) -> tuple[int, ...]:
    known = {"full_attention": 0, "sliding_attention": size}
    if not isinstance(kinds, list) or len(kinds) != layers or not _are_in(kinds, tuple(known)):
        raise config.refusal(
            "layer_types", f"expected {layers} times full_attention or sliding_attention"
        )
    if "sliding_attention" in kinds and not size:
        raise config.refusal("layer_types", "sliding_attention without a sliding_window in use")
    return tuple(known[kind] for kind in kinds)


def _are_in(values: list[Any], known: tuple[Any, ...]) -> bool:
    """Whether each value, of whatever type, is one of `known`."""
    return all(value in known for value in values)
