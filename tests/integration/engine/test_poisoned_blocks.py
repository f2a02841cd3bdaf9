"""The lifecycle on a real core with real reads and copies, whose freed blocks are poisoned."""

import importlib.util
from pathlib import Path

import pytest

_LIVES = Path(__file__).parents[2] / "fakes" / "poisoned_core.py"
SIZES = {"max_num_seqs": 4, "max_batch_tokens": 64, "mixed_tokens": 20, "starve_after": 0.05}
HAPPENINGS = (
    *("length", "abort", "draining", "load_failed", "blocks", "ram: cancel", "registered: remove"),
    *("draining: manual", "ram: cost", "registered: error", "ram: manual"),
)


def _load():
    spec = importlib.util.spec_from_file_location("poisoned_core", _LIVES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lives = _load()


@pytest.fixture(scope="module")
def known():
    """What requests answer alone, which is the same in all lives."""
    return {}


def tight(adapters) -> int:
    """Blocks for the largest adapter, one long sequence and a little more."""
    return 16 + max(adapter.manifest.num_blocks for adapter in adapters)


def run(start_core, adapters, prompt, known, *, lookahead, seeds, acts):
    control = lives.control_on(start_core(), adapters, known)
    driver = start_core(lookahead=lookahead, num_blocks=tight(adapters), **SIZES)
    return lives.live(driver, control, adapters, prompt, seeds, acts)


@pytest.mark.parametrize("lookahead", [False, True])
def test_nobody_reads_a_block_that_is_not_theirs(start_core, adapters, prompt, known, lookahead):
    census = run(start_core, adapters, prompt, known, lookahead=lookahead, seeds=range(3), acts=60)
    assert census["length"] > 20 and census["blocks"] > 100, census


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [False, True])
def test_nobody_ever_reads_a_block_that_is_not_theirs(
    start_core, adapters, prompt, known, lookahead
):
    census = run(
        start_core, adapters, prompt, known, lookahead=lookahead, seeds=range(100), acts=100
    )
    assert not [what for what in HAPPENINGS if census[what] < 3], census
