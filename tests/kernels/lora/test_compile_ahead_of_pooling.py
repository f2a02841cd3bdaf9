"""An encoder's steps with adapters meet no form that is not there, on a machine without a card.

All that they launch is compiled for and nothing runs: the rest is computed by torch on the CPU.
"""

import json
from pathlib import Path

import pytest

from tests.fakes import no_card
from tests.fakes.tiny_bert import write_bert

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.adapters.plan import StepPlanner
from engine.compile_ahead import compile_before_plans
from engine.kernels import backend, lora_expand, lora_shrink, tiles
from engine.kernels.launch import compiling
from engine.kernels.ragged_attention import Ragged
from engine.ladder import Rung
from engine.memory.arena import Arena
from engine.models.encoder import Encoder
from engine.models.encoder_spec import read_encoder_spec
from engine.models.layers import Build

backend.dependent_launch = lambda device: True
spec, device = read_encoder_spec(Path(sys.argv[1])), torch.device("cpu")
build = Build(device=device, dtype=torch.bfloat16, deterministic=False)
encoder = Encoder(spec, build).eval()
layout = spec.block_layout(block_size=0, dtype="bfloat16")
arena = Arena(spec, layout, block_size=0, num_blocks=2, device=device)
slots = DeviceSlots(layout, num_slots=2, max_rank=16, device=device)
choices = (tiles.FEW, tiles.SOLO, tiles.MIXED_SMALL)
plans = DevicePlanner(arena, slots, max_rows=64, max_seqs=8, max_rank=16, choices=choices)

def found():
    kernels = lora_shrink._shrink_rows, lora_shrink._shrink_tiles, lora_expand._expand
    return [len(each.device_caches[0][0]) for each in kernels]

compile_before_plans(encoder.layers, StepPlanner(arena, {}, None, plans), device)
before = found()
slots.max_rank[:] = 7, 16
for extras in (False, True):
    slots.extras[:] = extras
    for lengths, rung in (((3, 1), None), ((30,), None), ((20, 9), Rung(32, 4))):
        firsts = (0, *np.cumsum(lengths)[:-1])
        runs = np.array([firsts, lengths, [*range(len(lengths))]])
        meta = plans.send(runs, sum(lengths), rung)
        rows = rung.rows if rung else sum(lengths)
        ids = torch.zeros(rows, dtype=torch.int64)
        ragged = Ragged((*lengths, rows - sum(lengths)), device)
        with torch.no_grad(), compiling():
            encoder(ids, ids, None, ragged, meta)
print(json.dumps([before, found()]))
"""


@pytest.mark.late  # compiling takes seconds
def test_steps_of_an_encoder_meet_no_form_that_was_not_compiled_ahead(tmp_path: Path) -> None:
    ahead, met = json.loads(no_card.run(SCRIPT, str(write_bert(tmp_path / "bert"))))
    # Shrink by rows and by tiles, expand; without anything ahead the steps compile as many.
    assert met == ahead and all(ahead)
