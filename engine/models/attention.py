"""The attention block of one layer.

Goes in: normed activations, the rotary angles, the layer's view of the arena and the step's
metadata.  Comes out: what is added to the residual stream.  Knows the spec, no sequences.
"""

import torch
from torch import Tensor, nn

from engine.kernels import backend
from engine.kernels.attention import paged_attention, write_kv
from engine.kernels.attention_meta import AttentionMeta
from engine.kernels.elementwise import rotate
from engine.kernels.lora_meta import LoraMeta
from engine.models.layers import Angles, Build, LoraLinear, RMSNorm
from engine.models.spec import ModelSpec


class Attention(nn.Module):
    """Fused qkv, optional norm per head, rotation, paged attention, output projection."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale
        self.softcap = spec.attention_softcap
        self.window = spec.sliding_windows[layer] if spec.sliding_windows else 0
        self.deterministic = build.deterministic
        hidden, q = spec.hidden_size, spec.num_heads * spec.head_dim
        kv = spec.num_kv_heads * spec.head_dim
        self.qkv = LoraLinear("qkv", layer, hidden, (q, kv, kv), build, bias=spec.qkv_bias)
        self.o = LoraLinear("o", layer, q, (hidden,), build, bias=spec.o_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec, build)
            self.k_norm = RMSNorm(spec.head_dim, spec, build)

    def forward(
        self,
        x: Tensor,
        angles: Angles | None,
        kv: Tensor,
        attn: AttentionMeta,
        lora: LoraMeta | None,
    ) -> Tensor:
        """x (T, hidden) -> (T, hidden)."""
        fused = self.qkv(x, lora)
        if backend.use_kernels(fused):
            q, k, v = self._rotate_on_card(fused, angles, kv, attn)
        else:
            q, k, v = self._rotate(fused, angles)
            write_kv(k, v, kv, attn)
        out = paged_attention(
            q,
            kv,
            attn,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            deterministic=self.deterministic,
            fresh=(k, v),
        )
        result: Tensor = self.o(out.flatten(1), lora)
        return result

    def _rotate(self, fused: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = torch.split(fused, self.qkv.splits, dim=-1)
        q, k, v = (part.view(fused.shape[0], -1, self.head_dim) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return q, k, v

    def _rotate_on_card(
        self, fused: Tensor, angles: Angles | None, kv: Tensor, attn: AttentionMeta
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same in one launch, which also writes K and V to the arena."""
        from engine.kernels.fused_heads import rotate_and_write

        heads, slots = self.qkv.splits[0] // self.head_dim, attn.slot_mapping
        if self.q_norm is None or self.k_norm is None:
            return rotate_and_write(fused, kv, slots, angles, heads=heads)
        return rotate_and_write(
            fused,
            kv,
            slots,
            angles,
            heads=heads,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            eps=self.q_norm.eps,
            add_one=self.q_norm.add_one,
        )
