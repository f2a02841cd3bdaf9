"""The daemon of `tests/integration/daemon`, for what happens to its inbox."""

import importlib.util
import sys
from pathlib import Path

_DAEMONS = Path(__file__).parents[2] / "integration" / "daemon" / "conftest.py"


def _load():
    spec = importlib.util.spec_from_file_location("daemons_of_watch", _DAEMONS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_daemons = _load()
base, make_daemon, poll = _daemons.base, _daemons.make_daemon, _daemons.poll
