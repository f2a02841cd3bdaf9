"""The NVIDIA cards of this machine, as nvidia-smi tells of them: no torch, no driver library.

Goes in: nothing.  Comes out: a `Card` each, or none with the reason.
"""

import shutil
import subprocess
from dataclasses import dataclass

MIB = 1 << 20
PATIENCE = 10.0  # seconds
_ASKED = "name,driver_version,memory.total,memory.reserved,memory.used"


@dataclass(frozen=True, slots=True)
class Card:
    """`total_bytes` is what programs may have: the driver's own share is not in it."""

    name: str
    driver: str
    total_bytes: int
    used_bytes: int


def cards() -> tuple[tuple[Card, ...], str]:
    """(cards, "") or ((), why there is none)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), "nvidia-smi is not installed"
    command = [program, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return (), f"nvidia-smi fails: {said[0] if said else f'exit {done.returncode}'}"
    found = tuple(card for line in done.stdout.splitlines() if (card := _card(line)))
    return found, "" if found else "nvidia-smi lists no card"


def _card(line: str) -> Card | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 5:
        return None
    name, driver, total, reserved, used = fields
    return Card(name, driver, (_mib(total) - _mib(reserved)) * MIB, _mib(used) * MIB)


def _mib(text: str) -> int:
    """Old drivers do not know what is reserved, and say so."""
    return int(text) if text.isdecimal() else 0
