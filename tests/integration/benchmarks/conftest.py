"""The benchmarks' folder on the path, and the tiny model that they can write."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from random_model import SHAPES, write

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write(folder, SHAPES["tiny"])
    return folder
