"""The kernels for tokens of adapters' own compiled for Hopper, on a machine without a card: an
interpreter takes addresses and loops that a compiler may not."""

import json

import pytest

from tests.fakes import no_card

#: Compiling takes seconds, and only what touches a kernel can change it.
pytestmark = pytest.mark.late

#: Of each kernel: its name, and the bytes of memory that its threads keep what has no register in.
SCRIPT = """
import json, re, subprocess, tempfile
from triton import knobs
from engine.kernels import backend, lora_own, sample_change
from engine.kernels.lora_meta import OWN_WORDS, OwnRows
from engine.kernels.sample_meta import SampleMeta

backend.dependent_launch = lambda device: True

def warm(kernel, grid, *args, **options):
    made = kernel.warmup(*args, grid=grid, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.check_output(command, text=True)
    print(json.dumps([made.metadata.name, int(re.search(r"STACK:(\\d+)", told)[1])]))

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
    made = [json.loads(line) for line in no_card.run(SCRIPT).splitlines()]
    names = ["_look_up", "_embed", "_head", "_head"] * 2 + ["_close"]
    assert made == [[name, 0] for name in names]
