"""The attention block of one layer.

Goes in: normed activations, the rotary angles, the layer's view of the arena and the step's
metadata.  Comes out: what is added to the residual stream.  Knows the spec, no sequences.
"""

import torch
from torch import Tensor, nn

from engine.kernels.attention import AttentionMeta, paged_attention, write_kv
from engine.kernels.elementwise import rotate
from engine.kernels.lora import LoraMeta
from engine.models.layers import Build, LoraLinear, RMSNorm
from engine.models.spec import ModelSpec


class Attention(nn.Module):
    """Fused qkv, optional norm per head, rotation, paged attention, output projection."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.window = spec.sliding_windows[layer] if spec.sliding_windows else 0
        self.deterministic = build.deterministic
        hidden, q = spec.hidden_size, spec.num_heads * spec.head_dim
        kv = spec.num_kv_heads * spec.head_dim
        self.qkv = LoraLinear("qkv", layer, hidden, (q, kv, kv), build, bias=spec.qkv_bias)
        self.o = LoraLinear("o", layer, q, (hidden,), build, bias=spec.o_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_eps, build)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_eps, build)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        kv: Tensor,
        attn: AttentionMeta,
        lora: LoraMeta | None,
    ) -> Tensor:
        """x (T, hidden) -> (T, hidden)."""
        fused = torch.split(self.qkv(x, lora), self.qkv.splits, dim=-1)
        q, k, v = (part.view(x.shape[0], -1, self.head_dim) for part in fused)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *angles), rotate(k, *angles)
        write_kv(k, v, kv, attn)
        out = paged_attention(
            q,
            kv,
            attn,
            scale=self.scale,
            window=self.window,
            deterministic=self.deterministic,
        )
        result: Tensor = self.o(out.flatten(1), lora)
        return result
