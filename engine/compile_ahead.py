"""Compile LoRA's kernels before the first steps need them one by one.

Goes in: the model, or its layers, and the step planner.  Comes out: Triton's cache, filled for
every choice of tiles, with and without what an adapter has besides its factors.  One after the
other, as they were met, these took minutes of a start with an empty cache; most of that is the
compiler's, which many threads can be in at a time.
"""

import logging

import torch
from torch import Tensor, nn

from engine.adapters.plan import StepPlanner
from engine.kernels.elementwise import gelu_mul
from engine.kernels.gemm import leads
from engine.kernels.gemm_tiles import RULES
from engine.kernels.launch import compiling
from engine.kernels.lora import (
    lora_augment,
    lora_expand,
    lora_gated,
    lora_gates,
    lora_joined,
    lora_shrink,
)
from engine.kernels.lora_meta import LoraMeta
from engine.kernels.tiles import for_prompts
from engine.ladder import Ladder
from engine.models.decoder import Layer
from engine.models.layers import LoraLinear

log = logging.getLogger(__name__)


def compile_ahead(model: nn.Module, planner: StepPlanner, ladder: Ladder | None) -> None:
    """Wait until all is compiled that steps of `model` may launch for adapters.  Runs nothing.

    `planner` is bound; `ladder` None: steps have any number of rows."""
    groups = {m.group: m for m in model.modules() if isinstance(m, LoraLinear)}
    gate = next((m.gate for m in model.modules() if isinstance(m, Layer)), None)
    rows = sorted({rung.rows for rung in ladder.all} if ladder else {rule.rows for rule in RULES})
    try:
        with compiling():
            for meta in planner.every_choice():
                for linear in groups.values():
                    _compile(linear, meta, rows)
                if gate is not None and "gate_up" in groups:
                    _compile_gate(groups["gate_up"], meta, gelu=gate is gelu_mul)
    except Exception as error:  # kernels are compiled when they are met, then: later, and as well
        log.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)


def compile_before_plans(model: nn.Module, planner: StepPlanner, device: torch.device) -> None:
    """The same where each step's plan has an upload of its own, the first of which binds `planner`:
    until then it is bound to nothing that is kept."""
    planner.bind(torch.zeros(planner.plan_words, dtype=torch.int64, device=device))
    compile_ahead(model, planner, None)


def _compile(linear: LoraLinear, meta: LoraMeta, rows: list[int]) -> None:
    weight, fixed = linear.weight, linear.deterministic
    x, y = (weight.new_empty(rows[-1], width) for width in reversed(weight.shape))
    # One row has no stride, and no step of guests has one.
    place = linear.place_for(weight.new_empty(2, weight.shape[1]), meta)
    if place is not None:
        _compile_guests(linear, meta, place)
        return
    lora_shrink(x, layer=linear.layer, modules=linear.modules_fused, meta=meta)
    lora_expand(
        y,
        x,
        layer=linear.layer,
        modules=linear.modules_fused,
        splits=linear.splits,
        meta=meta,
        base_bias=linear.bias,
        deterministic=fixed,
    )
    # None beside a prompt's product is ever launched, and they are among the dearest to compile.
    prompts = meta.device is not None and for_prompts(meta.device.kind.tiles)
    if not prompts and any(leads(x[:count], weight, deterministic=fixed) for count in rows):
        lora_joined(
            y,
            x,
            layer=linear.layer,
            modules=linear.modules_fused,
            meta=meta,
            base_bias=linear.bias,
        )


def _compile_guests(linear: LoraLinear, meta: LoraMeta, x: Tensor) -> None:
    lora_shrink(x, layer=linear.layer, modules=linear.modules_fused, meta=meta)
    lora_augment(x, linear.roomy, layer=linear.layer, modules=linear.modules_fused, meta=meta)


def _compile_gate(linear: LoraLinear, meta: LoraMeta, *, gelu: bool) -> None:
    if lora_gates(meta):
        y = linear.weight.new_empty(1, linear.weight.shape[0])
        lora_gated(y, layer=linear.layer, meta=meta, gelu=gelu)
