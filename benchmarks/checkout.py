"""Lets a benchmark run from a checkout that nobody has installed: import it before `engine`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
