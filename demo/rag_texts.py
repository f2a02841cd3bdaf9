"""The reranker's passages and questions, out of two public-domain dictionaries.

Goes in: a folder with the unpacked sources of `jargon` and `devil` (see README.md beside this
file).  Comes out: `entries.jsonl`, a passage a line with the questions that it answers, and
`book.jsonl`, those of them that are held out: what `lorad demo --rag` looks things up in.

    python demo/rag_texts.py SOURCES_DIR OUT_DIR

A question is an entry's headword ("What is X?"), or a sentence taken out of the entry, which its
passage then lacks, and which does not hold the headword.  Nobody wrote these for the purpose: a
sentence may have little to do with the rest.  Every fifth entry is held out, by a hash of its name:
no question of it is trained on, and its passage is nobody's wrong answer.
"""

import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from texts import QUESTIONS, SOURCES, squeeze

#: Characters of a passage, at least and at most, and of a sentence that may be a question.
PASSAGE, SENTENCE = (60, 320), (40, 240)
#: Behind a sentence, and perhaps the quotation or bracket that it closes.
END = r"(?<=[.?!]) +(?=[A-Z“\"(])|(?<=[.?!][”\u2019\")]) +(?=[A-Z“\"])"


@dataclass(frozen=True)
class Entry:
    name: str
    text: str
    questions: list[str]
    held_out: bool


def devil(text: str) -> Iterator[tuple[str, str]]:
    """Bierce's entries: `HEADWORD, n.  definition`; the verses below are left out."""
    kind = r"(?:n|adj|v\.t|v\.i|adv|pp|x)\.[a-z.]*"
    for entry in re.split(r"\n\s*\n", text):
        if found := re.match(rf"([A-Z][A-Z' -]{{2,}}), {kind}\s+(.+)", entry, re.S):
            yield found[1].lower(), squeeze(found[2])


def jargon(text: str) -> Iterator[tuple[str, str]]:
    """A headword at the margin, its pronunciation or kind, then indented text."""
    entry = r"^(\S[^\n]{0,40})\n [^\n]{2,60}\n\n((?:    [^\n]*\n|\n)+)"
    for found in re.finditer(entry, text, re.M):
        word, body = map(squeeze, found.groups())
        if not word[0].isdigit():
            body = re.sub(r"\{\s*([^}]*)\}", r"\1", body)  # references to other entries
            yield word, re.sub(r"^\[[^]]*\] ", "", body)


def sentences(body: str) -> list[str]:
    """As many as a passage holds, and no lone number of a sense at the end."""
    kept: list[str] = []
    for sentence in re.split(END, body):
        if sum(map(len, kept)) + len(sentence) > PASSAGE[1]:
            break
        kept.append(sentence)
    while kept and re.fullmatch(r"\d+\.", kept[-1]):
        kept.pop()
    return kept


def draw(word: str, of: int) -> int:
    """The same number below `of` each time."""
    return int.from_bytes(hashlib.sha256(f"{of} {word}".encode()).digest()[:4], "big") % of


def entry(book: str, word: str, body: str) -> Entry | None:
    """None where there is too little of it."""
    parts = sentences(body)
    if sum(map(len, parts)) < PASSAGE[0]:
        return None
    asked, stem = [QUESTIONS[draw(word, len(QUESTIONS))].format(word)], word.lower()[:5]
    low, high = SENTENCE
    spare = [s for s in parts if low <= len(s) <= high and stem not in s.lower()]
    if spare:
        taken = spare[draw(word + "?", len(spare))]
        rest = [s for s in parts if s != taken]
        if sum(map(len, rest)) >= PASSAGE[0]:
            asked.append(taken)
            parts = rest
    name = f"{book}/{word}"
    return Entry(name, f"{word}: {' '.join(parts)}", asked, draw(name, 5) == 0)


def main() -> None:
    sources, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Entry] = {}
    for book, read in (("jargon", jargon), ("devil", devil)):
        raw = next(sources.rglob(SOURCES[book])).read_bytes()
        for word, body in read(gzip.decompress(raw).decode("utf-8", "replace")):
            if (made := entry(book, word, body)) is not None:
                entries.setdefault(made.name, made)
    held = [one for one in entries.values() if one.held_out]
    for name, some in (("entries", entries.values()), ("book", held)):
        lines = [json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in some]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(lines)} passages, {sum(len(e.questions) for e in some)} questions")


if __name__ == "__main__":
    main()
