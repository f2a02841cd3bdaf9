"""What one of several ranks has of a model: its heads, its columns of the MLP, its rows of words.

Goes in: the spec of a whole decoder and a number of ranks.  Comes out: the spec of one rank, and
which part of a published tensor, or of an adapter's factor, is its own.  Torch-free; knows no
processes.

A module that widens (`q_proj` .. `up_proj`) is cut by its outputs: every rank has all of A and its
own columns of B.  One that narrows (`o_proj`, `down_proj`) is cut by its inputs: every rank has its
own columns of A and all of B, and what the ranks have made of their parts is added up, the
adapter's with the base's, in one sum.  So adapters add nothing to what ranks tell each other.  A
bias is no part of a sum: the first rank has it, the others have zeros.
"""

from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.layout import FUSED_NAMES, GROUPS, PAIRED_ENDS
from engine.models.spec import ModelSpec

#: Groups whose outputs are cut, and those whose inputs are.
BY_OUTPUTS, BY_INPUTS = ("qkv", "gate_up"), ("o", "down")

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a tensor: of axis 0 the `rows` (None = all), of axis 1 the `columns`, each range
    behind the other; `zero`: as large as the whole, and nothing but zeros.  `size` is what the
    whole has along the axis that is cut."""

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None
    zero: bool = False
    size: int = 0


WHOLE = Cut()


def split(spec: ModelSpec, ranks: int) -> ModelSpec:
    """What each of `ranks` ranks has of `spec`: attention and MLP are narrower, hidden states and
    the vocabulary are not.  Raises ConfigError for a model that cannot be cut so."""
    if ranks == 1:
        return spec
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    for name, size in (("num_attention_heads", heads), ("intermediate_size", spec.ffn_size)):
        if size % ranks:
            raise _refused(ranks, f"{name} = {size} is no multiple of it")
    if kv_heads % ranks and ranks % kv_heads:
        raise _refused(ranks, f"num_key_value_heads = {kv_heads} is neither a multiple nor a part")
    return replace(
        spec,
        num_heads=heads // ranks,
        num_kv_heads=max(kv_heads // ranks, 1),
        ffn_size=spec.ffn_size // ranks,
        ranks=ranks,
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`, of a whole `spec`."""

    spec: ModelSpec
    rank: int
    size: int

    @property
    def words(self) -> Range:
        """Its rows of the vocabulary; the last ones may be behind the last word."""
        count = words_of(self.spec.vocab_size, self.size)
        return self.rank * count, (self.rank + 1) * count

    def outputs(self, module: str) -> Range | None:
        """Its outputs of a module; None = all."""
        spec = self.spec
        if module == "q_proj":
            return self._even(spec.num_heads * spec.head_dim)
        if module in ("k_proj", "v_proj"):
            # Beyond one head a rank, neighbours share one: those whose queries look at it.
            count = max(spec.num_kv_heads // self.size, 1)
            first = self.rank * spec.num_kv_heads // self.size
            return first * spec.head_dim, (first + count) * spec.head_dim
        if module in GROUPS["gate_up"]:
            return self._even(spec.ffn_size)
        return None

    def inputs(self, module: str) -> Range | None:
        """Its inputs of a module; None = all."""
        if module in GROUPS["o"]:
            return self._even(self.spec.num_heads * self.spec.head_dim)
        return self._even(self.spec.ffn_size) if module in GROUPS["down"] else None

    def cut(self, name: str) -> Cut:
        """Its part of a published tensor, such as `layers.0.self_attn.q_proj.weight`."""
        if self.size == 1:
            return WHOLE
        *_, module, kind = ("", *name.split("."))
        if module in PAIRED_ENDS:
            return Cut(rows=(self.words,), size=self.spec.vocab_size)
        group = FUSED_NAMES.get(module)
        modules = GROUPS[group] if group in BY_OUTPUTS else (module,)
        ranges, size = [], 0
        for one in modules:
            own = self.outputs(one)
            if own is None:
                break
            ranges.append((size + own[0], size + own[1]))
            size += self.spec.shapes.of(one)[1]
        if ranges:
            return Cut(rows=tuple(ranges), size=size)
        inputs = self.inputs(module)
        if inputs is None:
            return WHOLE
        if kind == "bias":
            return Cut(zero=self.rank > 0)
        return Cut(columns=inputs, size=self.spec.shapes.of(module)[0])

    def _even(self, whole: int) -> Range:
        part = whole // self.size
        return self.rank * part, (self.rank + 1) * part


def words_of(vocab: int, ranks: int) -> int:
    """Rows of the embedding that each of `ranks` ranks has."""
    return -(-vocab // ranks)


def _refused(ranks: int, why: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel = {ranks}: the model does not divide by it: {why}",
        hint="take a number of ranks that does, most often 2 or 4",
    )
