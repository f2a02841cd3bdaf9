"""`lorad demo --rag`: an embedder, a reranker and a generator in one daemon answer out of a book.

Goes in: a `Cast`: three bases, an adapter that makes one of them a reranker, voices of the third,
and a book with questions.  Comes out what happens to a question, step by step, each claim checked
as it is printed.  How good the ranking is, is counted over the book's questions and shown, better
or not.  Talks to the daemon as anybody would.
"""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from openai import OpenAIError

from engine.errors import EngineError
from lorad import demo_minilm
from lorad.cli.output import one_line
from lorad.client import ApiError, Unreachable, openai
from lorad.demo import find_adapters, find_model, folders_of
from lorad.demo_book import Book, kinds_of
from lorad.demo_stage import Base, DemoFailed, Stage, demo_data, stage
from lorad.demo_words import claim, complain, next_steps, say, show

#: What the walk asks; the book's entry on it is one that the reranker was not trained on.
QUESTION = "What does Usenet mean?"
ANSWER_TOKENS = 48
#: So many of the nearest are read by the reranker, and so many of them shown.
CANDIDATES, SHOWN = 20, 3
#: Questions of the book that the ranking is counted over, of each of the two kinds.
COUNTED = 20
#: Texts of one request.
BATCH = 64

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays.  `reranks` is a PEFT folder for `ranker`, `voices` are for `generator`."""

    generator: Base
    embedder: Base
    ranker: Base
    reranks: Path
    voices: tuple[Path, ...]
    book: Book
    question: str = QUESTION


class Walk:
    """The story, act by act."""

    def __init__(self, here: Stage, cast: Cast) -> None:
        self.stage, self.cast = here, cast
        self.client = openai(here.inference_socket)
        transport = httpx.HTTPTransport(uds=here.inference_socket)
        self.http = httpx.Client(transport=transport, base_url="http://lorad", timeout=120)
        self.vectors: Floats = np.zeros((0, 0), np.float32)

    def run(self) -> None:
        """All acts; DemoFailed at the first claim that does not hold."""
        self.introduce()
        self.embed_book()
        best = self.find()
        self.answer(best)
        self.count()

    def close(self) -> None:
        self.client.close()
        self.http.close()

    def introduce(self) -> None:
        say("\n1. One daemon, three models, each with an engine process and adapters of its own\n")
        folders = (self.cast.reranks, *self.cast.voices)
        for folder in folders:
            self.stage.drop(folder.name, folder)
        self.stage.wait_resident({folder.name for folder in folders}, lambda text: None)
        with self.stage.client() as client:
            models = client.status().models
            adapters = client.adapters(limit=100).items
        for model in models:
            own = [a.name for a in adapters if a.model == model.name]
            does = ", ".join(model.tasks) or "generate"
            served = f", adapters {', '.join(own)}" if own else ""
            say(f"   {model.name:<10} {does}, pid {model.engine_pid}{served}")
        say("")
        claim(len({m.engine_pid for m in models}) == len(models), "three processes")
        bound = {a.name: a.model for a in adapters}
        claim(
            bound[self.cast.reranks.name] == self.cast.ranker.name
            and {bound[v.name] for v in self.cast.voices} == {self.cast.generator.name},
            "each adapter is of the base that it was made for",
        )

    def embed_book(self) -> None:
        passages = self.cast.book.passages
        say(f"\n2. {len(passages)} passages become vectors: POST /v1/embeddings\n")
        started = time.monotonic()
        parts, tokens = [], 0
        for at in range(0, len(passages), BATCH):
            vectors, count = self._embed(passages[at : at + BATCH])
            parts.append(vectors)
            tokens += count
        self.vectors, seconds = np.concatenate(parts), time.monotonic() - started
        width = self.vectors.shape[1]
        say(f"   {tokens} tokens, {width} numbers each, in {seconds:.1f} s", end=": ")
        say(f"{tokens / seconds:.0f} tokens/s")
        lengths = np.linalg.norm(self.vectors, axis=1)
        claim(bool(np.abs(lengths - 1).max() < 1e-3), "every vector has length 1")

    def find(self) -> int:
        """The passage that the reranker puts first."""
        question = self.cast.question
        say(f"\n3. Which passage answers {question!r}\n")
        near = self._nearest(question)
        ranked = self._rerank(question, near)
        say("   by vectors")
        for passage in near[:SHOWN]:
            self._show_passage("", passage)
        say(f"   POST /v1/rerank: {self.cast.reranks.name} reads it with each of {len(near)}")
        for passage in ranked[:SHOWN]:
            self._show_passage(f"was {near.index(passage) + 1}", passage)
        say("")
        claim(sorted(ranked) == sorted(near), "every one of them has its rank, once")
        return ranked[0]

    def answer(self, passage: int) -> None:
        names = [self.cast.generator.name, *(voice.name for voice in self.cast.voices)]
        say("\n4. With that passage in the prompt, they answer: POST /v1/chat/completions\n")
        with ThreadPoolExecutor(len(names)) as pool:
            told = dict(
                zip(names, pool.map(lambda n: self._answer(n, passage), names), strict=True)
            )
        for name, text in told.items():
            show(name, text)
        say("")
        claim(len(set(told.values())) == len(told), f"{len(told)} different answers")
        claim(self._embeds_while_writing(), "a vector was made while an answer was being written")

    def _embeds_while_writing(self) -> bool:
        """On a machine that is quicker the answer is over sooner: then it is a longer one."""
        for tokens in (64, 512, 1500):
            begun, enough = threading.Event(), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(self._write, tokens, begun, enough)
                try:
                    while not (begun.wait(0.2) or job.done()):
                        continue
                    self._embed(self.cast.book.passages[:1])
                finally:
                    enough.set()
                if job.result():
                    return True
        return False

    def count(self) -> None:
        kinds = kinds_of(self.cast.book, COUNTED)
        number = sum(map(len, kinds.values()))
        say(f"\n5. Is it better?  {number} questions about entries that it was not trained on\n")
        say("                                      first by vectors   first reranked")
        for kind, asked in kinds.items():
            vectors = reranked = 0
            for question, passage in asked:
                near = self._nearest(question)
                vectors += near[0] == passage
                reranked += self._rerank(question, near)[0] == passage
            say(f"   {kind:<36} {vectors:>6} of {len(asked):<8} {reranked:>6} of {len(asked)}")

    # ------------------------------------------------------------- requests
    def _embed(self, texts: Sequence[str]) -> tuple[Floats, int]:
        """Their vectors, and tokens."""
        answer = self.client.embeddings.create(model=self.cast.embedder.name, input=list(texts))
        vectors = np.array([item.embedding for item in answer.data], np.float32)
        return vectors, answer.usage.total_tokens

    def _nearest(self, question: str) -> list[int]:
        [vector], _ = self._embed([question])
        return [int(i) for i in np.argsort(-(self.vectors @ vector))[:CANDIDATES]]

    def _rerank(self, question: str, passages: Sequence[int]) -> list[int]:
        body = {
            "model": self.cast.reranks.name,
            "query": question,
            "documents": [self.cast.book.passages[i] for i in passages],
        }
        answer = self.http.post("/v1/rerank", json=body)
        if answer.is_error:
            raise DemoFailed(f"POST /v1/rerank answered {answer.status_code}: {answer.text}")
        return [passages[item["index"]] for item in answer.json()["results"]]

    def _answer(self, model: str, passage: int) -> str:
        text = f"{self.cast.book.passages[passage]}\n\n{self.cast.question}"
        answer = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=ANSWER_TOKENS,
            temperature=0,
        )
        return answer.choices[0].message.content or ""

    def _write(self, tokens: int, begun: threading.Event, enough: threading.Event) -> bool:
        """Stream so many, and stop before them if it is enough; False: they were all written."""
        chunks: Any = self.client.completions.create(
            model=self.cast.generator.name,
            prompt="Once upon a time",
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with chunks:
            for _ in chunks:
                begun.set()
                if enough.is_set():
                    return True
        return False

    # ------------------------------------------------------------- inside
    def _show_passage(self, note: str, passage: int) -> None:
        say(f"     {note:<7} {one_line(self.cast.book.passages[passage])[:78]}")


# ----------------------------------------------------------------- entry
def cast_of(model: str | None, adapters: Path | None, scratch: Path) -> Cast:
    """The demo's own, but for a generator and voices that were named."""
    data = demo_data()
    if data is None:
        raise DemoFailed("the reranker and its book are in demo/rag of a checkout: run it there")
    if not (demo_minilm.model_path() / "model.safetensors").is_file():
        say("fetching all-MiniLM-L6-v2 (84 MB), once")
    encoder = demo_minilm.ensure()
    folder, name = find_model(model)
    voices = find_adapters(folder, adapters, model is None, scratch)
    rag = data.parent / "rag"
    return Cast(
        generator=Base(folder, name),
        embedder=Base(encoder, "minilm", 'device = "cpu"\ntasks = ["embed"]'),
        ranker=Base(encoder, "ranker", 'device = "cpu"\ntasks = ["rerank"]'),
        reranks=rag / "entries",
        voices=tuple(v for v in voices if v.name in ("devil", "jargon")) or tuple(voices[:2]),
        book=Book.read(rag / "book.jsonl"),
    )


def main(model: str | None, adapters: Path | None, keep: bool) -> int:
    """Run the walk; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C: the daemon ends with us
    try:
        if adapters is not None:
            folders_of(adapters)
        with tempfile.TemporaryDirectory() as scratch:
            play(cast_of(model, adapters, Path(scratch)), keep)
        return 0
    except (DemoFailed, EngineError) as failure:
        complain(failure)
    except (OSError, subprocess.CalledProcessError) as failure:
        complain(failure, "check the network and the disk, then run it again")
    except KeyboardInterrupt:
        print("interrupted; the demo's daemon is stopped", file=sys.stderr)
        return 130
    return 1


def play(cast: Cast, keep: bool = False) -> None:
    """The walk in a daemon of its own.  Raises DemoFailed."""
    started = time.monotonic()
    bases = (cast.generator, cast.embedder, cast.ranker)
    with stage(bases, keep) as here:
        say(f"starting lorad with {', '.join(base.name for base in bases)} in {here.root}")
        here.start(lambda reason: say(f"   {reason}"), stays=keep)
        try:
            with closing(Walk(here, cast)) as walk:
                walk.run()
        except (OpenAIError, ApiError, Unreachable, httpx.HTTPError) as failure:
            text = f"{failure}; the end of the daemon's log:\n{here.log_tail()}"
            raise DemoFailed(text) from failure
        say(f"\nAll of it held, in {time.monotonic() - started:.0f} s.")
        next_steps(here, cast.voices[0].name, "What is a hacker?", keep, "demo --rag")
