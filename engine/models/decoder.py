"""One decoder for the dense families, driven by its ModelSpec.

Goes in: token ids and positions of a step's rows, the arena's views, and the step's metadata.
Comes out: hidden states (T, hidden), and logits for the rows that are asked for.  The forward
takes everything as plain arguments and knows no requests.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels import backend
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.elementwise import cap_logits, gelu_mul, silu_mul
from engine.kernels.gemm import linear
from engine.kernels.lora import lora_begin
from engine.kernels.lora_ends import (
    add_embedding,
    add_head,
    look_up,
    replace_embedding,
    replace_embeddings,
    replace_head,
    replace_logits,
)
from engine.kernels.lora_meta import LoraMeta, OwnRows
from engine.messages import Purpose
from engine.models import weights
from engine.models.attention import Attention
from engine.models.layers import Angles, Build, Gate, LoraLinear, Owed, RMSNorm, Rotary
from engine.models.ranks import Ranks
from engine.models.shard import Shard, split, words_of
from engine.models.spec import ModelSpec, read_spec

#: Columns of 256 bytes.
STRIDE = 64


class Layer(nn.Module):
    """Attention and gated MLP, each after a norm and added to the residual stream, in some
    families through another norm."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        hidden, ffn = spec.hidden_size, spec.ffn_size
        self.deterministic = build.deterministic
        self.fused_names = spec.fused_names
        self.gate: Gate = gelu_mul if spec.activation == "gelu" else silu_mul
        self.attention_norm = RMSNorm(hidden, spec, build)
        self.attention = Attention(spec, layer, build)
        self.ffn_norm = RMSNorm(hidden, spec, build)
        self.attention_after = RMSNorm(hidden, spec, build) if spec.post_norms else None
        self.ffn_after = RMSNorm(hidden, spec, build) if spec.post_norms else None
        self.gate_up = LoraLinear("gate_up", layer, hidden, (ffn, ffn), build, bias=spec.mlp_bias)
        self.down = LoraLinear("down", layer, ffn, (hidden,), build, bias=spec.mlp_bias)

    def forward(
        self,
        x: Tensor,
        angles: Angles | None,
        kv: Tensor,
        attn: AttentionMeta,
        lora: LoraMeta | None,
    ) -> Tensor:
        """x (T, hidden) -> (T, hidden)."""
        attended = self.attention(self.attention_norm(x), angles, kv, attn, lora)
        x = x + (attended if self.attention_after is None else self.attention_after(attended))
        fed = self._mlp(self.ffn_norm(x), lora)
        return x + (fed if self.ffn_after is None else self.ffn_after(fed))

    def on_card(
        self,
        x: Tensor,
        owed: Owed | None,
        angles: Angles | None,
        kv: Tensor,
        attn: AttentionMeta,
        lora: LoraMeta | None,
    ) -> Owed:
        """The same with each sum left to the norm behind it.

        x (T, hidden) is summed up in place; `owed` is what the layer before owes to it, and what
        comes back is what this one owes.
        """
        place = self.attention.qkv.place_for(x, lora)
        normed = self.attention_norm.after_sum(x, owed, place)
        attended = self.attention(normed, angles, kv, attn, lora)
        place = self.gate_up.place_for(x, lora)
        normed = self.ffn_norm.after_sum(x, Owed(attended, self.attention_after), place)
        return Owed(self._mlp(normed, lora), self.ffn_after)

    def _mlp(self, x: Tensor, lora: LoraMeta | None) -> Tensor:
        gated = self.gate_up.gated(x, lora, self.gate, self.down.place_for(x, lora))
        out: Tensor = self.down(gated, lora)
        return out

    def places(self) -> dict[str, Tensor]:
        """Published name -> tensor to fill, for this layer."""
        norms = {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.ffn_norm}
        if self.attention_after is not None and self.ffn_after is not None:
            norms["post_attention_layernorm"] = self.attention_after
            norms["pre_feedforward_layernorm"] = self.ffn_norm
            norms["post_feedforward_layernorm"] = self.ffn_after
        if self.attention.q_norm is not None and self.attention.k_norm is not None:
            norms["self_attn.q_norm"] = self.attention.q_norm
            norms["self_attn.k_norm"] = self.attention.k_norm
        found = {f"{name}.weight": norm.weight.data for name, norm in norms.items()}
        for prefix, fused in (
            ("self_attn", self.attention.qkv),
            ("self_attn", self.attention.o),
            ("mlp", self.gate_up),
            ("mlp", self.down),
        ):
            parts = fused.parts(as_one=self.fused_names)
            found |= {f"{prefix}.{name}": part for name, part in parts.items()}
        return found


class Decoder(nn.Module):
    """Embedding, layers, final norm and head.  Weights are empty until `load_model` fills them.

    Of one that only pools, the output head is never held whole: see `pooling/token_scores.py`.
    """

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.deterministic = build.deterministic
        self.room = build.room
        #: Those that share the model; each has a part of the vocabulary.  None = this one has all.
        self.ranks = build.ranks
        words = words_of(spec.vocab_size, self.ranks.size if self.ranks else 1)
        self.embedding = build.empty(words, spec.hidden_size)
        #: Rounded as the published code rounds it: 55.43 is 55.5 in bf16.
        self.embedding_scale = torch.tensor(spec.embedding_scale).to(build.dtype).item()
        ropes = spec.layer_ropes or (spec.rope,) * spec.num_layers
        distinct = [rope for rope in dict.fromkeys(ropes) if rope is not None]
        self.rotaries = nn.ModuleList(Rotary(rope, spec, build) for rope in distinct)
        #: Which rotary embedding each layer takes; None = its heads are not rotated.
        self.rotary_of = [None if rope is None else distinct.index(rope) for rope in ropes]
        self.layers = nn.ModuleList(Layer(spec, i, build) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec, build)
        self.head = self.embedding
        if self._has_own_head:
            self.head = build.empty(words, spec.hidden_size)
        #: Of a classifier, by the engine's names: `engine/pooling/head.py` reads it.
        self.classifier: dict[str, Tensor] = {}
        if spec.num_labels:
            self.classifier["score.weight"] = build.empty(spec.num_labels, spec.hidden_size).data

    @property
    def _has_own_head(self) -> bool:
        return not self.spec.tied and self.spec.generates

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: Sequence[Tensor],
        attn: AttentionMeta,
        lora: LoraMeta | None,
        out: Tensor | None = None,
        *,
        embedded: Tensor | None = None,
        own: OwnRows | None = None,
    ) -> Tensor:
        """tokens and positions (T,) int64 -> normed hidden states (T, hidden), in `out` if given.

        With `embedded` (T, hidden), which is overwritten, tokens are not looked up; else `own` has
        rows of adapters, if there may be any.  kv has one
        (num_blocks, 2, block_size, kv_heads, head_dim) view a layer; K and V of every row are
        written to it.  `lora` None: base rows only.
        """
        if embedded is not None:
            x = embedded
        elif own is not None:
            x = look_up(tokens, self.embedding, own, self.embedding_scale)
        else:
            x = self.embed(tokens)
        turns = [rotary(positions) for rotary in self.rotaries]
        angles = [None if which is None else turns[which] for which in self.rotary_of]
        if backend.use_kernels(x):
            return self._on_card(x, angles, kv, attn, lora, out)
        for layer, turn, frame in zip(self.layers, angles, kv, strict=True):
            x = layer(x, turn, frame, attn, lora)
        normed: Tensor = self.norm(x)
        return normed if out is None else out.copy_(normed)

    @torch.no_grad()
    def embed(self, tokens: Tensor, lora: LoraMeta | None = None) -> Tensor:
        """tokens (T,) -> what goes into the first layer, (T, hidden): with what adapters have on
        the embedding, for the segments of `lora`; other rows keep their bits."""
        own = lora.own if lora is not None else None
        if own is not None and self.ranks is None:
            x = look_up(tokens, self.embedding, own, self.embedding_scale)
        else:
            x = self._bases(tokens, clamped=lora is not None)
            if own is not None:
                replace_embeddings(x, tokens, own, self.embedding_scale)
        for segment in lora.segments if lora is not None else ():
            assert lora is not None
            pairs = lora.slots[segment.slot]
            rows = slice(segment.start, segment.end)
            if rows_of := pairs.get((self.spec.num_layers, "embed_tokens.rows")):
                replace_embedding(x[rows], tokens[rows], rows_of, self.embedding_scale)
            if pair := pairs.get((self.spec.num_layers, "embed_tokens")):
                size = self.spec.num_ids, self.embedding_scale
                add_embedding(x[rows], tokens[rows], pair, *size, deterministic=self.deterministic)
        return x

    def _on_card(
        self,
        x: Tensor,
        angles: Sequence[Angles | None],
        kv: Sequence[Tensor],
        attn: AttentionMeta,
        lora: LoraMeta | None,
        out: Tensor | None,
    ) -> Tensor:
        # A graph must hold the launches that derive things from the meta: none are taken over
        # from a forward that ran with the same meta before.
        attn.derived.clear()
        if lora is not None:
            lora_begin(lora)
        owed = None
        for layer, turn, frame in zip(self.layers, angles, kv, strict=True):
            assert isinstance(layer, Layer)
            owed = layer.on_card(x, owed, turn, frame, attn, lora)
        return self.norm.after_sum(x, owed, out)

    def _bases(self, tokens: Tensor, *, clamped: bool) -> Tensor:
        """The base's embeddings of tokens (T,); `clamped`: some may be adapters' own, which it has
        no rows for."""
        if self.ranks is not None:
            x = self._found(tokens)
        else:
            if clamped and self.spec.extra_vocab:
                tokens = tokens.clamp(max=self.spec.vocab_size - 1)
            x = F.embedding(tokens, self.embedding)
        return x if self.embedding_scale == 1.0 else x.mul_(self.embedding_scale)

    def _found(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens (T,), of which each is in one rank's part."""
        assert self.ranks is not None
        own = tokens - self.ranks.rank * len(self.embedding)
        others = (own < 0) | (own >= len(self.embedding))
        x = F.embedding(own.masked_fill(others, 0), self.embedding)
        x.masked_fill_(others[:, None], 0.0)
        self.ranks.add_up(x)
        return x

    @torch.no_grad()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Normed hidden states (N, hidden) -> (N, num_ids) in fp32, in `out` if given.

        Columns behind the base's are not written: those that a row may draw are its adapter's, and
        come by `adapt_logits`; the sampler closes the others.
        """
        out = self.new_logits(hidden.shape[0]) if out is None else out
        own, cap = out[:, : self.spec.vocab_size], self.spec.logit_softcap
        if self.ranks is not None:
            self._gathered(self.ranks, hidden, own)
        elif cap:
            logits = linear(hidden, self.head, None, deterministic=self.deterministic)
            cap_logits(logits, cap, own, deterministic=self.deterministic)
        else:
            linear(hidden, self.head, None, deterministic=self.deterministic, out=own)
        return out

    def new_logits(self, rows: int) -> Tensor:
        """Room for logits (rows, num_ids) in fp32.  Behind the base's columns a row has some more
        up to a border of 256 bytes, so that rows begin alike."""
        spec = self.spec
        width = -(-spec.num_ids // STRIDE) * STRIDE if spec.extra_vocab else spec.num_ids
        device = self.embedding.device
        return torch.empty(rows, width, dtype=torch.float32, device=device)[:, : spec.num_ids]

    def _gathered(self, ranks: Ranks, hidden: Tensor, out: Tensor) -> None:
        """The same from every rank's part, on all of them; out (N, vocab)."""
        cap, fixed, rows = self.spec.logit_softcap, self.deterministic, hidden.shape[0]
        dtype = hidden.dtype if cap else torch.float32
        part = torch.empty(rows, self.head.shape[0], dtype=dtype, device=hidden.device)
        linear(hidden, self.head, None, deterministic=fixed, out=part)
        whole = part.new_empty(rows, self.spec.vocab_size) if cap else out
        ranks.side_by_side(part, whole)
        if cap:
            cap_logits(whole, cap, out, deterministic=fixed)

    @torch.no_grad()
    def adapt_logits(self, logits: Tensor, hidden: Tensor, lora: LoraMeta) -> None:
        """Correct `logits` (N, num_ids), which are those of `hidden` (N, hidden), in place by what
        adapters have on the head; rows without keep their bits."""
        cap = self.spec.logit_softcap
        if lora.own is not None:
            replace_logits(logits, hidden, lora.own, cap)
        for segment in lora.segments:
            pairs = lora.slots[segment.slot]
            rows = slice(segment.start, segment.end)
            own, x = logits[rows], hidden[rows]
            if cap and self.ranks is None:  # the correction belongs under the cap
                own = self.new_logits(len(x))
                known = own[:, : self.spec.vocab_size]
                known.copy_(linear(x, self.head, None, deterministic=self.deterministic))
            elif cap:  # another product would be another message of the ranks
                own = torch.atanh(own / cap).mul_(cap)
            if rows_of := pairs.get((self.spec.num_layers, "lm_head.rows")):
                replace_head(own, x, rows_of, deterministic=self.deterministic)
            if pair := pairs.get((self.spec.num_layers, "lm_head")):
                add_head(own, x, pair, deterministic=self.deterministic)
            if cap:
                cap_logits(own, cap, logits[rows], deterministic=self.deterministic)

    def places(self) -> dict[str, Tensor]:
        """Published name, without what leads to the text model -> tensor to fill."""
        found = {"embed_tokens.weight": self.embedding.data, "norm.weight": self.norm.weight.data}
        if self._has_own_head:
            found["lm_head.weight"] = self.head.data
        found |= self.classifier
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            found |= {f"layers.{i}.{name}": place for name, place in layer.places().items()}
        return found

    def ignores(self, name: str) -> bool:
        """Buffers of older checkpoints, a head that was saved though it is tied or generates
        nothing, and towers beside the text model."""
        if name.startswith(self.spec.other_towers):
            return True
        buffer = name.endswith(("rotary_emb.inv_freq", ".position_ids"))
        return buffer or (name == "lm_head.weight" and not self._has_own_head)


def load_model(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    deterministic: bool,
    max_len: int = 0,
    purpose: Purpose = "generate",
    ranks: Ranks | None = None,
    room: int = 0,
    extra_vocab: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Decoder:
    """The model in a Hugging Face folder, in `dtype` on `device`; `progress` gets 0..1.

    `max_len` is of the longest sequence that it will see, 0 = its `default_length`.  `ranks`: those
    that share it; comes out what this one has.  `room` as in `Build`,
    `extra_vocab` as in `read_spec`.

    Raises ConfigError for files that are missing or broken, ModelUnsupported for what the engine
    would not compute exactly.
    """
    build = Build(torch.device(device), dtype, deterministic, max_len, ranks, room)
    pools, generates = purpose != "generate", purpose != "pool"
    whole = read_spec(folder, pools=pools, generates=generates, extra_vocab=extra_vocab)
    rank, size = (ranks.rank, ranks.size) if ranks is not None else (0, 1)
    decoder = Decoder(split(whole, size), build)
    weights.load(
        decoder.places(),
        folder,
        ignored=decoder.ignores,
        cut=Shard(whole, rank, size).cut,
        progress=progress,
    )
    return decoder.eval()
