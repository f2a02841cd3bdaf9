"""Registries to fill, with a clock that only the test moves."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.messages import PackedModule
from lorad.registry.records import Registered, RevisionRecord
from lorad.registry.registry import Registry
from lorad.registry.store import Store
from tests.fakes.fresh_registry import open_fresh


class Clock:
    """Seconds since the epoch; a tick at every look."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_revision(rev: str, **changes: Any) -> RevisionRecord:
    facts: dict[str, Any] = {
        "rev": rev,
        "rank": 8,
        "ranks": {"q_proj": 8, "v_proj": 4},
        "alpha": 16.0,
        "rslora": True,
        "targets": ("q_proj", "v_proj"),
        "num_layers": 2,
        "dtype": "bfloat16",
        "file_bytes": 4096,
        "changes_kv": True,
        "alora_tokens": (128_000, 9),
        "num_tokens": 49_154,
        "own_tokenizer": True,
        "warnings": ("target 'o_proj' has no tensor",),
        "modules": (
            PackedModule(0, "q_proj", 8, 5.656854249492381),
            PackedModule(1, "v_proj", 4, 8.0),
        ),
    }
    return RevisionRecord(**(facts | changes))


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where there is such a place: these tests would wait for a thousand syncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def revision() -> Callable[..., RevisionRecord]:
    """revision(rev, rank=4): a record with any facts changed."""
    return make_revision


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Iterator[Registry]:
    registry = open_fresh(tmp_path, clock=clock)
    yield registry
    registry.close()


@pytest.fixture
def put() -> Callable[[Store, bytes], str]:
    """put(store, data): the revision of a folder with that one file, committed."""

    def put(store: Store, data: bytes) -> str:
        rev = hashlib.sha256(data).hexdigest()
        staging = store.stage()
        (staging.path / "adapter_model.safetensors").write_bytes(data)
        store.commit(staging, rev)
        return rev

    return put


@pytest.fixture
def add(registry: Registry, put: Callable[[Store, bytes], str]) -> Callable[..., Registered]:
    """add("acme/x", b"content", pin=True): stored and registered, waited for."""

    def add(name: str, data: bytes, **settings: Any) -> Registered:
        rev = put(registry.store, data)
        settings = {"model": "base", "source": "inbox"} | settings
        facts = settings.pop("facts", {})
        return registry.register(name, revision=make_revision(rev, **facts), **settings).result()

    return add
