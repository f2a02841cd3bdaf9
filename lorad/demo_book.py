"""What `lorad demo --rag` looks things up in: passages, and questions that one of them answers.

Goes in: `demo/rag/book.jsonl`.  Comes out: texts.  Knows no model.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Book:
    """`questions`: text, and which passage answers it."""

    passages: tuple[str, ...]
    questions: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, path: Path) -> "Book":
        """Of JSON lines `{"text", "questions"}`, a passage each."""
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        asked = [(text, place) for place, row in enumerate(rows) for text in row["questions"]]
        return cls(tuple(row["text"] for row in rows), tuple(asked))


def kinds_of(book: Book, most: int) -> dict[str, list[tuple[str, int]]]:
    """Questions that name their headword and those that do not, so many of each at the most, spread
    over the book."""
    kinds: dict[str, list[tuple[str, int]]] = {}
    for question, passage in book.questions:
        word = book.passages[passage].partition(":")[0].lower()
        named = word in question.lower()
        kind = "headwords: What is X?" if named else "sentences out of an entry"
        kinds.setdefault(kind, []).append((question, passage))
    return {kind: asked[:: -(-len(asked) // most)] for kind, asked in kinds.items()}
