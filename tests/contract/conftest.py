"""openai-python against the real faces: one server for all tests of this folder."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.client import openai
from lorad.config_sections import Limits
from lorad.demo_model import cache_dir

_FAKES = Path(__file__).parent.parent / "fakes" / "api_server.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("api_server_of_contract", _FAKES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load()


@pytest.fixture(scope="session")
def running_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = fakes.ApiServer(tmp_path_factory.mktemp("api"), Limits(queue=64, max_tokens=200))
    yield server
    server.close()


@pytest.fixture
def api(running_api: Any) -> Iterator[Any]:
    yield running_api
    running_api.reset()


@pytest.fixture(scope="session")
def client(running_api: Any) -> Iterator[Any]:
    made = openai(running_api.inference)
    yield made
    made.close()


@pytest.fixture(scope="session")
def openai_site() -> Callable[[str], Path]:
    """openai_site("2.54"): a folder with that openai and what it needs, installed once into the
    cache."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"

    def installed(version: str) -> Path:
        major = version.partition(".")[0]
        site = cache_dir() / f"openai-{major}-py{python}"
        if not (site / "openai" / "__init__.py").is_file():
            site.parent.mkdir(parents=True, exist_ok=True)
            fresh = site.parent / f".openai-{major}-{os.getpid()}"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(fresh)]
            subprocess.run([*pip, f"openai=={version}.*"], check=True, stdout=sys.stderr)
            fresh.rename(site)
        return site

    return installed
