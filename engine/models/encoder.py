"""One encoder for the families of `encoder_families.py`, driven by its EncoderSpec.

Goes in: token ids, positions and types of whole sequences that lie one behind the other, and which
rows are whose.  Comes out: hidden states (T, hidden).  Nothing is kept between two forwards: there
is no KV.  Knows no requests and no pooling; of a head only that its weights lie in the same files.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels import backend
from engine.kernels.elementwise import activate, layer_norm, rotate
from engine.kernels.lora import lora_begin
from engine.kernels.lora_meta import LoraMeta
from engine.kernels.ragged_attention import Ragged, ragged_attention
from engine.models import weights
from engine.models.encoder_spec import EncoderSpec, read_encoder_spec
from engine.models.layers import Angles, Build, LoraLinear, Rotary

#: From so many numbers on a sum and its norm are one launch of ours.  It keeps the host busy for
#: longer than torch's two, and of fewer numbers the card is through before the host is.  In a step
#: that a graph replays the host does nothing, and they are one whatever the size: 512 rows of a
#: BGE-large take an H200 1.35 ms then, and 1.43 with torch's two.
FUSED_NUMBERS = 1 << 23


class LayerNorm(nn.Module):
    """Mean and deviation over the last axis, times a weight; in some families plus a bias."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.deterministic = build.deterministic
        self.weight = build.empty(spec.hidden_size)
        self.bias = build.empty(spec.hidden_size) if spec.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (T, hidden) -> the same shape and dtype."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, delta: Tensor, *, replayed: bool) -> Tensor:
        """The norm of x + delta, both (T, hidden).  `replayed`: the step is one for a graph."""
        if not self._fuses(x, replayed):
            return self(x + delta)  # type: ignore[no-any-return]
        from engine.kernels.layer_norm import sum_norm

        return sum_norm(x, delta, self.weight, self.bias, self.eps, keep=False)

    def with_sum(self, x: Tensor, delta: Tensor, *, replayed: bool) -> tuple[Tensor, Tensor]:
        """x + delta, in x's place where the kernels run, and the norm of it."""
        if not self._fuses(x, replayed):
            x = x + delta
            return x, self(x)
        from engine.kernels.layer_norm import sum_norm

        return x, sum_norm(x, delta, self.weight, self.bias, self.eps, keep=True)

    def _fuses(self, x: Tensor, replayed: bool) -> bool:
        """A row's bits must not hang on how many there are where that was promised."""
        worth = replayed or x.numel() >= FUSED_NUMBERS
        return worth and backend.use_kernels(x) and not self.deterministic


class EncoderLayer(nn.Module):
    """Attention to both sides and an MLP; norms behind the sums, or ahead of the two."""

    def __init__(self, spec: EncoderSpec, layer: int, build: Build) -> None:
        super().__init__()
        hidden, wide = spec.hidden_size, spec.num_heads * spec.head_dim
        self.spec = spec
        self.deterministic = build.deterministic
        self.scale = float(spec.head_dim**-0.5)
        self.window = spec.windows[layer]
        bias = spec.attention_bias
        self.qkv = LoraLinear("qkv", layer, hidden, (wide, wide, wide), build, bias=bias)
        self.o = LoraLinear("o", layer, wide, (hidden,), build, bias=bias)
        ffn = (spec.ffn_size if spec.gated else 0, spec.ffn_size)
        self.up = LoraLinear("gate_up", layer, hidden, ffn, build, bias=spec.mlp_bias)
        self.down = LoraLinear("down", layer, spec.ffn_size, (hidden,), build, bias=spec.mlp_bias)
        # The embeddings of a family with norms ahead are normed already.
        bare = not spec.post_norm and layer == 0
        self.attention_norm = None if bare else LayerNorm(spec, build)
        self.ffn_norm = LayerNorm(spec, build)

    def forward(
        self, x: Tensor, angles: Angles | None, ragged: Ragged, lora: LoraMeta | None
    ) -> Tensor:
        """x (T, hidden) -> (T, hidden)."""
        replayed = ragged.most > 0
        if self.spec.post_norm:
            assert self.attention_norm is not None
            attended = self._attend(x, angles, ragged, lora)
            x = self.attention_norm.of_sum(x, attended, replayed=replayed)
            return self.ffn_norm.of_sum(x, self._mlp(x, lora), replayed=replayed)
        ahead = x if self.attention_norm is None else self.attention_norm(x)
        attended = self._attend(ahead, angles, ragged, lora)
        x, normed = self.ffn_norm.with_sum(x, attended, replayed=replayed)
        return x + self._mlp(normed, lora)

    def _attend(
        self, x: Tensor, angles: Angles | None, ragged: Ragged, lora: LoraMeta | None
    ) -> Tensor:
        parts = torch.split(self.qkv(x, lora), self.qkv.splits, dim=-1)
        q, k, v = (part.reshape(len(x), -1, self.spec.head_dim) for part in parts)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        out = ragged_attention(
            q,
            k,
            v,
            ragged,
            scale=self.scale,
            window=self.window,
            deterministic=self.deterministic,
        )
        result: Tensor = self.o(out.flatten(1), lora)
        return result

    def _mlp(self, x: Tensor, lora: LoraMeta | None) -> Tensor:
        gate, up = torch.split(self.up(x, lora), self.up.splits, dim=-1)
        kind, fixed = self.spec.activation, self.deterministic
        inner = activate(gate, kind, deterministic=fixed) * up if self.spec.gated else None
        if inner is None:
            inner = activate(up, kind, deterministic=fixed)
        out: Tensor = self.down(inner, lora)
        return out

    def places(self, published: frozenset[str]) -> dict[str, Tensor]:
        """Name within the layer -> tensor to fill; as one where `published` has it so."""
        found: dict[str, Tensor] = {}
        for fused in (self.qkv, self.o, self.up, self.down):
            whole = fused.parts(as_one=True)
            parts = whole if whole.keys() <= published else fused.parts(as_one=False)
            found |= {name: part for name, part in parts.items() if len(part)}
        for name, norm in (("attention_norm", self.attention_norm), ("ffn_norm", self.ffn_norm)):
            found |= _places_of(name, norm)
        return found


class Encoder(nn.Module):
    """Embeddings and layers.  Weights are empty until `load_encoder` fills them."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        hidden = spec.hidden_size
        self.word = build.empty(spec.vocab_size, hidden)
        self.position = build.empty(spec.position_rows, hidden) if spec.position_rows else None
        self.kind = build.empty(spec.num_types, hidden) if spec.num_types else None
        self.norm = LayerNorm(spec, build)
        distinct = [rope for rope in dict.fromkeys(spec.ropes) if rope is not None]
        self.rotaries = nn.ModuleList(Rotary(rope, spec, build) for rope in distinct)
        self.rotary_of = [None if rope is None else distinct.index(rope) for rope in spec.ropes]
        self.layers = nn.ModuleList(EncoderLayer(spec, i, build) for i in range(spec.num_layers))
        self.final_norm = None if spec.post_norm else LayerNorm(spec, build)
        #: What the files hold of a head, by the engine's names: `engine/pooling/head.py` reads it.
        self.head: dict[str, Tensor] = {}

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor | None,
        ragged: Ragged,
        lora: LoraMeta | None = None,
    ) -> Tensor:
        """tokens, positions and types (T,) int64 -> hidden states (T, hidden).

        `types` None: all of type 0, as without a second text.  `lora` None: base rows only.
        """
        if lora is not None:
            lora_begin(lora)
        x = self._embed(tokens, positions, types)
        turns = [rotary(positions) for rotary in self.rotaries]
        for layer, which in zip(self.layers, self.rotary_of, strict=True):
            x = layer(x, None if which is None else turns[which], ragged, lora)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x

    def _embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        x = F.embedding(tokens, self.word)
        if self.kind is not None:
            x = x + (self.kind[0] if types is None else F.embedding(types, self.kind))
        if self.position is not None:
            x = x + F.embedding(positions, self.position)
        normed: Tensor = self.norm(x)
        return normed

    def places(self, published: frozenset[str]) -> dict[str, Tensor]:
        """The engine's name -> tensor to fill, for files that hold the names `published`."""
        found = {"embeddings.word.weight": self.word.data}
        for name, table in (("position", self.position), ("type", self.kind)):
            if table is not None:
                found[f"embeddings.{name}.weight"] = table.data
        found |= _places_of("embeddings.norm", self.norm)
        found |= _places_of("final_norm", self.final_norm)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            start = f"layers.{i}."
            own = frozenset(n.removeprefix(start) for n in published if n.startswith(start))
            found |= {start + name: place for name, place in layer.places(own).items()}
        return found | self.head


def _places_of(name: str, norm: LayerNorm | None) -> dict[str, Tensor]:
    if norm is None:
        return {}
    bias = {} if norm.bias is None else {f"{name}.bias": norm.bias.data}
    return {f"{name}.weight": norm.weight.data} | bias


def load_encoder(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    deterministic: bool = False,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Encoder:
    """The encoder in a Hugging Face folder, in `dtype` on `device`; `progress` gets 0..1.

    Raises ConfigError for files that are missing or broken, ModelUnsupported for what the engine
    would not compute exactly.
    """
    spec = read_encoder_spec(folder)
    build = Build(torch.device(device), dtype, deterministic)
    encoder = Encoder(spec, build)
    published = frozenset(map(spec.engine_name, weights.tensor_names(folder)))
    encoder.head = _head_places(spec, published, build)
    weights.load(
        encoder.places(published),
        folder,
        ignored=lambda name: spec.ignores(name) or name.startswith(("head.", "score.")),
        rename=spec.engine_name,
        progress=progress,
    )
    return encoder.eval()


def _head_places(spec: EncoderSpec, published: frozenset[str], build: Build) -> dict[str, Tensor]:
    """All of a classifier's head; of another model's what is there: an adapter may bring the rest.
    A score of a model that is no classifier is for other work."""
    hidden = spec.hidden_size
    found: dict[str, Tensor] = {}
    for part in spec.head.parts:
        of_score = part.startswith("score.")
        if spec.num_labels or (part in published and not of_score):
            rows = spec.num_labels if of_score else hidden
            square = part in ("head.dense.weight", "score.weight")
            found[part] = build.empty(rows, hidden).data if square else build.empty(rows).data
    return found
