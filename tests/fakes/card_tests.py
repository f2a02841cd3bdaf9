"""Tests of a card, on a machine that has none.

Goes in: a test that is about to run, and how pytest was asked for it.  Comes out: whether it is
left out.
"""

import pytest


def leave_out(item: pytest.Item) -> None:
    """Any `-m` replaces the one of pyproject.toml, which leaves tests of a card out: with
    `-m "not late"`, say, they came along and failed with NoDevice, as if a test ahead of them had
    broken something.  Whoever asks for them by name is told that there is no card."""
    if item.get_closest_marker("gpu") is None or "gpu" in item.config.option.markexpr:
        return
    import torch  # here: most tests do without

    if not torch.cuda.is_available():
        pytest.skip("there is no card: make gpu runs it on one")
