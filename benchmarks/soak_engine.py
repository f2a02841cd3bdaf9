"""The engine process as it is, which tells what it holds: spawned by the daemon of `soak.py`."""

import soak_probe

from engine import process

if __name__ == "__main__":
    soak_probe.install("engine")
    process.run()
