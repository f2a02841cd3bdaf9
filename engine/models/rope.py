"""RopeSpec: what a rotary embedding is, as read from both dialects of config.json.  Torch-free.

Goes in: the config's fields.  Comes out: a frozen RopeSpec, or ModelUnsupported naming what the
engine would have to guess at.  The frequencies that follow from it are made in `frequencies.py`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import ModelUnsupported
from engine.models.families import Family
from engine.models.hf_config import LARGEST, Fields, short

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

ROPE_KINDS = "supported: default, linear, llama3, yarn, longrope"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: `theta`, kind, and the kind's own numbers (see `frequencies.py`)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    rotated: float = 1.0  # share of each head that turns, from its first element on
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
    short_factors: tuple[float, ...] = ()  # of longrope: for sequences up to the original length
    long_factors: tuple[float, ...] = ()  # and beyond it

    def reach(self, max_position: int) -> int:
        """YaRN is switched on in configs that still state the length before it (Qwen2.5)."""
        if self.kind == "yarn":
            return max(max_position, int(self.factor * self.original_max_position))
        return max_position

    def one_way_length(self, max_position: int) -> int:
        """The longest sequence that is rotated like all shorter ones."""
        if self.short_factors != self.long_factors:
            return min(max_position, self.original_max_position)
        return max_position


@dataclass(frozen=True, slots=True)
class RopeReader:
    """Reads the rotary embeddings of one config, whose model has these sizes."""

    config: Fields
    family: Family
    head_dim: int
    max_position: int

    def one(self) -> RopeSpec:
        """The rotary embedding of all layers.

        The old `rope_scaling` wins over `rope_parameters`, theta inside wins over the top one.
        """
        config = self.config
        scaling = config.take("rope_scaling", None)
        parameters = config.take("rope_parameters", None)
        chosen = scaling or parameters or {}
        where = "rope_scaling" if scaling else "rope_parameters"
        for name, given in (("rope_scaling", scaling), ("rope_parameters", parameters)):
            if not isinstance(given or {}, dict):
                raise config.refusal(name, "expected an object")
        if any(isinstance(value, dict) for value in chosen.values()):
            raise config.refusal(where, "a rotary embedding per layer kind is not supported")
        spec = self._read({"rope_theta": config.number("rope_theta", 10000.0), **chosen}, where)
        if scaling and parameters and parameters.get("rope_theta", spec.theta) != spec.theta:
            raise config.refusal(
                "rope_parameters", f"contradicts rope_scaling, where theta is {spec.theta}"
            )
        return spec

    def by_kind(self) -> tuple[RopeSpec, RopeSpec]:
        """Those of the layers with full attention, and of the layers with a window (Gemma 3).

        The old dialect has a theta for each, and its `rope_scaling` concerns full attention alone;
        in the new one `rope_parameters` has an entry for each.
        """
        config, full, local = self.config, "full_attention", "sliding_attention"
        kinds = config.take("rope_parameters", None) or {}
        scaling = config.take("rope_scaling", None) or {}
        if not isinstance(kinds, dict) or not set(kinds) <= {full, local}:
            raise config.refusal("rope_parameters", f"expected an entry for {full} and {local}")
        far, near = kinds.get(full) or {}, kinds.get(local) or {}
        if not all(isinstance(entry, dict) for entry in (far, near, scaling)):
            name = "rope_parameters" if isinstance(scaling, dict) else "rope_scaling"
            raise config.refusal(name, "expected an object")
        far = {"rope_theta": config.number("rope_theta"), **far, **scaling}
        near = {"rope_theta": config.number("rope_local_base_freq"), **near}
        return (
            self._read(far, f"rope_parameters.{full}"),
            self._read(near, f"rope_parameters.{local}"),
        )

    def _read(self, values: dict[str, Any], where: str) -> RopeSpec:
        """One embedding; some of it may stand at the top of the config."""
        config = self.config
        top = {"partial_rotary_factor": config.take("partial_rotary_factor", None)}
        rope = Fields({**top, **values}, where)
        theta, rotated = rope.number("rope_theta"), self._rotated(rope)
        kind = rope.take("type", None)
        kind = rope.take("rope_type", None) or kind or "default"
        if kind in self.family.longrope_words:
            kind = "longrope"
        original = rope.integer("original_max_position_embeddings", self.max_position)
        original = config.integer("original_max_position_embeddings", original)
        rope.take("finetuned", None)  # a remark in older YaRN checkpoints
        if kind == "default":
            spec = RopeSpec(theta, rotated=rotated)
        elif kind == "linear":
            spec = RopeSpec(theta, "linear", rotated, factor=rope.number("factor"))
        elif kind == "llama3":
            spec = RopeSpec(
                theta,
                "llama3",
                rotated,
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=original,
            )
        elif kind == "yarn":
            spec = RopeSpec(
                theta,
                "yarn",
                rotated,
                factor=rope.number("factor", self.max_position / original),
                original_max_position=original,
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                attention_factor=rope.optional_number("attention_factor"),
                mscale=rope.optional_number("mscale"),
                mscale_all_dim=rope.optional_number("mscale_all_dim"),
                truncate=rope.flag("truncate", True),
            )
        elif kind == "longrope":
            pairs = len(range(0, int(self.head_dim * rotated), 2))
            spec = RopeSpec(
                theta,
                "longrope",
                rotated,
                factor=rope.number("factor", self.max_position / original),
                original_max_position=original,
                attention_factor=rope.optional_number("attention_factor"),
                short_factors=rope.numbers("short_factor", pairs),
                long_factors=rope.numbers("long_factor", pairs),
            )
        else:
            raise ModelUnsupported(f"{where} has rope type {short(str(kind))}", hint=ROPE_KINDS)
        _check_range(rope, spec)
        rope.refuse_rest()
        return spec

    def _rotated(self, rope: Fields) -> float:
        share = rope.number("partial_rotary_factor", 1.0)
        if share != 1.0 and not self.family.rotates_in_part:
            raise rope.refusal("partial_rotary_factor", "the family rotates its heads whole")
        if share > 1.0 or int(self.head_dim * share) < 1:
            raise rope.refusal("partial_rotary_factor", "expected a share of the head, up to 1")
        return share


def _check_range(rope: Fields, spec: RopeSpec) -> None:
    """Where a kind's formula divides by nothing, or reaches beyond any position."""
    if spec.theta <= 1.0 and spec.kind == "yarn":
        raise rope.refusal("rope_theta", "yarn needs one above 1")
    if spec.reach(1) > LARGEST:
        raise rope.refusal("factor", f"it stretches {spec.original_max_position} beyond {LARGEST}")
    if spec.kind == "longrope" and spec.original_max_position == 1:
        raise rope.refusal("original_max_position_embeddings", "expected more than 1")
    if spec.kind == "llama3" and spec.low_freq_factor >= spec.high_freq_factor:
        raise rope.refusal(
            "low_freq_factor", f"high_freq_factor {spec.high_freq_factor} is not more"
        )
