"""Kernels that are compiled before their first launch, on a machine without a card."""

import json

from tests.fakes import no_card

SCRIPT = """
import json, time
from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.adapters.plan import StepPlanner
from engine.compile_ahead import compile_ahead
from engine.kernels import (
    backend, gemm_tiles, lora_augment, lora_expand, lora_joint, lora_shrink, tiles
)
from engine.ladder import Ladder
from engine.layout import BlockLayout, Shapes
from engine.memory.arena import Arena
from engine.models.layers import Build, LoraLinear

backend.dependent_launch = lambda device: True
gemm_tiles.LEAST_WEIGHTS = 0
wide, ffn = (256, 256), (256, 512)
layout = BlockLayout(Shapes(2, (wide, wide, wide, wide, ffn, ffn, ffn[::-1])), "bfloat16", 1 << 16)
device = torch.device("cpu")
arena = Arena(None, layout, block_size=16, num_blocks=2, device=device)
slots = DeviceSlots(layout, num_slots=2, max_rank=16, device=device)
choices = (tiles.SOLO, tiles.SOLO_WIDE, tiles.PREFILL)

def planner_of(choices, room=0):
    device = DevicePlanner(
        arena, slots, max_rows=64, max_seqs=8, max_rank=16, choices=choices, room=room
    )
    planner = StepPlanner(arena, {}, None, device)
    planner.bind(torch.zeros(planner.plan_words, dtype=torch.int64))
    return planner

planner = planner_of(choices)
build = Build(device=device, dtype=torch.bfloat16, deterministic=False)
linear = LoraLinear("o", 0, 256, [256], build, bias=False)
kernels = {
    "shrink": lora_shrink._shrink_tiles, "expand": lora_expand._expand, "joint": lora_joint._joint
}

def found():
    return {n: [type(k).__name__ for k in each.device_caches[0][0].values()]
            for n, each in kernels.items()}

told = []
for _ in range(2):
    before = time.process_time()
    compile_ahead(torch.nn.ModuleList([linear]), planner, Ladder(max_seqs=8, mixed_rows=0))
    told.append([time.process_time() - before, found()])

roomy = Build(device=device, dtype=torch.bfloat16, deterministic=False, room=16)
down = LoraLinear("down", 0, 512, [256], roomy, bias=False)
kernels["augment"] = lora_augment._augment
compile_ahead(
    torch.nn.ModuleList([down]), planner_of((tiles.PREFILL,), 16), Ladder(max_seqs=1, mixed_rows=0)
)
told.append(found())
print(json.dumps(told))
"""


def test_every_form_is_there_before_it_is_launched_and_is_compiled_once() -> None:
    (_, first), (again, second), guests = json.loads(no_card.run(SCRIPT))
    # Ranks up to 16: no wide tiles.  With extras and without, which shrink does not tell apart.
    # A prompt's product has nothing beside it.
    assert first == {
        "shrink": ["CompiledKernel"] * 2,
        "expand": ["CompiledKernel"] * 4,
        "joint": ["CompiledKernel"] * 2,
    }
    assert second == first and again < 1.0
    # Of a prompt's rows with room behind them too, though no other step has more than one row;
    # expand's forms are the same as before.
    assert guests == first | {
        "shrink": ["CompiledKernel"] * (2 + 2),
        "augment": ["CompiledKernel"],
    }
