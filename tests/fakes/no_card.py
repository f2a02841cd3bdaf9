"""A process without a card, in which Triton compiles for Hopper and launches nothing.

Goes in: a script, which finds `torch`, and Triton aimed at a card that is not there.  It has a
process of its own, since the one of the tests may have Triton interpret its kernels.
Comes out: what the script printed.
"""

import os
import subprocess
import sys

AIM = """
import torch
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
"""


def run(script: str, *arguments: str) -> str:
    """What `script` prints; AssertionError with its traceback if it raises, or if its engine gave
    up compiling ahead."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", AIM + script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one by one" not in done.stderr, done.stderr
    return done.stdout
