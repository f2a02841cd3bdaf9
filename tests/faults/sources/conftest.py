"""The fake servers, settings that lead to them, and a folder to fetch into."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from lorad.config import Settings
from lorad.config_sections import HuggingFace, Pull, Watch

ROOT = Path(__file__).parents[2]
#: Whatever the machine that runs the tests is told about hubs and stores.
_VARIABLES = (
    *("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)


def _load() -> ModuleType:
    if "source_server" not in sys.modules:
        path = ROOT / "fakes" / "source_server.py"
        spec = importlib.util.spec_from_file_location("source_server", path)
        assert spec is not None and spec.loader is not None
        sys.modules["source_server"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["source_server"])
    return sys.modules["source_server"]


_load()


@pytest.fixture(scope="session")
def servers() -> ModuleType:
    """source_server.py as a module."""
    return _load()


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, token or cache of whoever runs the tests."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "staging"
    made.mkdir()
    return made


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    """Settings with a cache of their own and little patience; `hf_...` for [hf], `pull_...` ..."""

    def make(max_bytes: int = 64 << 20, **options: Any) -> Settings:
        hf = {k[3:]: v for k, v in options.items() if k.startswith("hf_")}
        pull = {k[5:]: v for k, v in options.items() if k.startswith("pull_")}
        made = Settings(
            watch=Watch(max_adapter_bytes=max_bytes),
            hf=HuggingFace(**{"cache_dir": str(tmp_path / "cache"), **hf}),
            pull=Pull(**{"timeout": 2.0, **pull}),
        )
        s3 = {k[3:]: v for k, v in options.items() if k.startswith("s3_")}
        return msgspec.structs.replace(made, s3=msgspec.structs.replace(made.s3, **s3))

    return make


@pytest.fixture
def file_server(servers: ModuleType) -> Iterator[Any]:
    with servers.FileServer() as server:
        yield server
