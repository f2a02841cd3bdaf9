"""The lorad daemon as it is, which tells what it holds: spawned by `soak.py`."""

import sys
from pathlib import Path

import soak_probe

import lorad.engines
from engine.client import EngineClient
from lorad.cli.serve import app


class ProbedClient(EngineClient):
    program = (str(Path(__file__).with_name("soak_engine.py")),)


if __name__ == "__main__":
    soak_probe.install("daemon")
    lorad.engines.EngineClient = ProbedClient  # type: ignore[misc]
    sys.exit(app())
