"""A new registry in a moment: its migrations take longer than most tests that need one.

Goes in: a state directory without a registry.  Comes out: an open registry, over a copy of one that
was migrated once.  Knows nothing of what a test keeps in it.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

from lorad.registry.registry import FILE, Registry


@functools.cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Registry.open(Path(folder)).close()
        return (Path(folder) / FILE).read_bytes()


def open_fresh(state_dir: Path, **options: Any) -> Registry:
    """As `Registry.open`, for a directory that has none of a registry's files yet."""
    state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
    (state_dir / FILE).write_bytes(_empty())
    return Registry.open(state_dir, **options)
