"""The lorad daemon as it is, which tells what it holds: spawned by `soak.py`.

Its ring of events is small, and full in the warm-up: until a ring is full, what it holds grows.
"""

import sys
from pathlib import Path

import soak_probe

import lorad.engines
from engine.client import EngineClient
from lorad.cli.serve import app
from lorad.service.events import EventRing

RING = 256


class ProbedClient(EngineClient):
    program = (str(Path(__file__).with_name("soak_engine.py")),)


if __name__ == "__main__":
    soak_probe.install("daemon")
    EventRing.__init__.__defaults__ = (RING,)
    lorad.engines.EngineClient = ProbedClient  # type: ignore[misc]
    sys.exit(app())
