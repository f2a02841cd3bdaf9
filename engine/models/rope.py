"""RopeSpec: what a rotary embedding is, as read from both dialects of config.json.  Torch-free.

Goes in: the config's fields.  Comes out: a frozen RopeSpec, or ModelUnsupported naming what the
engine would have to guess at.  The frequencies that follow from it are made in `frequencies.py`.
"""

from dataclasses import dataclass
from typing import Literal

from engine.errors import ModelUnsupported
from engine.models.hf_config import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn"]

ROPE_KINDS = "supported: default, linear, llama3, yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `theta`, kind, and the kind's own numbers (see `frequencies.py`)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def reach(self, max_position: int) -> int:
        """YaRN is switched on in configs that still state the length before it (Qwen2.5)."""
        if self.kind == "yarn":
            return max(max_position, int(self.factor * self.original_max_position))
        return max_position


def read_rope(config: Fields, max_position: int) -> RopeSpec:
    """The rotary embedding of all layers.

    The old `rope_scaling` wins over `rope_parameters`, theta inside wins over the top one.
    """
    scaling, parameters = config.take("rope_scaling", None), config.take("rope_parameters", None)
    chosen = scaling or parameters or {}
    where = "rope_scaling" if scaling else "rope_parameters"
    if not isinstance(chosen, dict):
        raise config.refusal(where, "expected an object")
    if any(isinstance(value, dict) for value in chosen.values()):
        raise config.refusal(where, "a rotary embedding per layer kind is not supported")
    top = {
        "rope_theta": config.number("rope_theta", 10000.0),
        "partial_rotary_factor": config.take("partial_rotary_factor", None),
    }
    spec = _read(config, Fields({**top, **chosen}, where), max_position)
    if scaling and parameters and parameters.get("rope_theta", spec.theta) != spec.theta:
        raise config.refusal(
            "rope_parameters", f"contradicts rope_scaling, where theta is {spec.theta}"
        )
    return spec


def read_ropes_by_kind(config: Fields, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """Those of the layers with full attention, and of the layers with a window (Gemma 3).

    The old dialect has a theta for each, and its `rope_scaling` concerns full attention alone; in
    the new one `rope_parameters` has an entry for each.
    """
    kinds = config.take("rope_parameters", None) or {}
    scaling = config.take("rope_scaling", None) or {}
    full, local = "full_attention", "sliding_attention"
    if not isinstance(kinds, dict) or not set(kinds) <= {full, local}:
        raise config.refusal("rope_parameters", f"expected an entry for {full} and {local}")
    entries = [kinds.get(full) or {}, scaling, kinds.get(local) or {}]
    if not all(isinstance(entry, dict) for entry in entries):
        name = "rope_parameters" if isinstance(scaling, dict) else "rope_scaling"
        raise config.refusal(name, "expected an object")
    far = {"rope_theta": config.number("rope_theta"), **entries[0], **scaling}
    near = {"rope_theta": config.number("rope_local_base_freq"), **entries[2]}
    partial = config.take("partial_rotary_factor", None)
    full_rope, local_rope = (
        _read(
            config,
            Fields({"partial_rotary_factor": partial, **entry}, f"rope_parameters.{kind}"),
            max_position,
        )
        for kind, entry in ((full, far), (local, near))
    )
    return full_rope, local_rope


def _read(config: Fields, rope: Fields, max_position: int) -> RopeSpec:
    """One embedding; `config` is asked for what may stand at its top."""
    theta = rope.number("rope_theta")
    if rope.take("partial_rotary_factor", None) not in (None, 1, 1.0):
        raise rope.refusal("partial_rotary_factor", "partial rotary embeddings are not supported")
    kind = rope.take("type", None)
    kind = rope.take("rope_type", None) or kind or "default"
    original = rope.integer("original_max_position_embeddings", max_position)
    original = config.integer("original_max_position_embeddings", original)
    rope.take("finetuned", None)  # a remark in older YaRN checkpoints
    if kind == "default":
        spec = RopeSpec(theta=theta)
    elif kind == "linear":
        spec = RopeSpec(theta=theta, kind="linear", factor=rope.number("factor"))
    elif kind == "llama3":
        spec = RopeSpec(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=original,
        )
    elif kind == "yarn":
        spec = RopeSpec(
            theta=theta,
            kind="yarn",
            factor=rope.number("factor", max_position / original),
            original_max_position=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
    else:
        raise ModelUnsupported(f"{rope.where} has rope type {kind}", hint=ROPE_KINDS)
    rope.refuse_rest()
    return spec
