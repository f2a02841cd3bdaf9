"""The kernels for tokens of adapters' own compiled for Hopper, on a machine without a card: an
interpreter takes addresses and loops that a compiler may not."""

import json
import os
import subprocess
import sys

import pytest

#: Compiling takes seconds, and only what touches a kernel can change it.
pytestmark = pytest.mark.late

SCRIPT = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoCard:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device=None):
        return 0

driver.set_active(NoCard())
from engine.kernels import backend, lora_own, sample_change
from engine.kernels.lora_meta import OWN_WORDS, OwnRows
from engine.kernels.sample_meta import SampleMeta

backend.dependent_launch = lambda device: True

def warm(kernel, grid, *args, **options):
    made = kernel.warmup(*args, grid=grid, **options)
    print(json.dumps({"name": made.metadata.name, "spills": made.asm["ptx"].count("st.local")}))

lora_own.launch = sample_change.launch = warm
for dtype in (torch.bfloat16, torch.float32):
    x, base = (torch.zeros(rows, 4096, dtype=dtype) for rows in (5, 9))
    own = OwnRows(torch.zeros(5, OWN_WORDS, dtype=torch.int64), 3, base.view(-1))
    tokens, y = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 128512)
    lora_own.look_up(tokens, base, own, 1.0)
    lora_own.replace_embeddings(x, tokens, own, 1.0)
    for cap in (0.0, 30.0):
        lora_own.replace_logits(y, x, own, cap)
words = torch.zeros(80, dtype=torch.int32)
sample_change.close(torch.zeros(5, 128512), SampleMeta(words, 5, least=128256), 128512)
"""


def test_they_compile_and_keep_all_in_registers() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["name"] for one in made] == ["_look_up", "_embed", "_head", "_head"] * 2 + [
        "_close"
    ]
    assert not any(one["spills"] for one in made)
