"""`lorad demo --rag` with tiny stand-ins: it is played to its end, and cleans up behind it."""

import os
import tempfile
from pathlib import Path

import pytest

from lorad import demo_rag
from lorad.demo_book import Book
from lorad.demo_rag import Cast
from lorad.demo_stage import Base
from tests.fakes.tiny_bert import write_bert, write_bert_adapter
from tests.integration.daemon.conftest import write_adapter

pytestmark = pytest.mark.late

CPU = 'device = "cpu"\nthreads = 1\n'
WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")


@pytest.fixture
def runtime(monkeypatch):
    """A short path: sockets lie below it."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def cast(base, tmp_path):
    encoder = write_bert(tmp_path / "bert", pooling="mean")
    reranks = write_bert_adapter(tmp_path / "ranks", 1, labels=1)
    (reranks / "lorad.toml").write_text('pin = true\nmodel = "ranker"\n')
    voices = tuple(write_adapter(tmp_path / f"voice-{n}", n, pin=True) for n in (1, 2))
    return Cast(
        generator=Base(base, "tiny", CPU + 'cpu_pool = "16MiB"\nmax_model_len = 2048'),
        embedder=Base(encoder, "vectors", CPU + 'tasks = ["embed"]'),
        ranker=Base(encoder, "ranker", CPU + 'tasks = ["rerank"]'),
        reranks=reranks,
        voices=voices,
        book=Book(
            passages=tuple(f"{word}: so called, an animal" for word in WORDS),
            questions=(("What is ant?", 0), ("What is bee?", 1), ("It has antlers.", 4)),
        ),
        question="What is a hen?",
    )


def test_it_is_played_to_its_end(cast, runtime, capsys):
    demo_rag.play(cast)
    told = capsys.readouterr().out
    for said in (
        "ok  three processes",
        "ok  each adapter is of the base that it was made for",
        "ok  every vector has length 1",
        "ok  every one of them has its rank, once",
        "ok  3 different answers",
        "ok  a vector was made while an answer was being written",
        "All of it held",
    ):
        assert said in told
    rows = [line.split() for line in told.splitlines() if line.endswith((" of 2", " of 1"))]
    assert [row[-1] for row in rows] == ["2", "1"], told
    assert list(runtime.iterdir()) == []
