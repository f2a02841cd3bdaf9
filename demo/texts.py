"""Training pairs for the four demo voices, out of public-domain texts.

Goes in: a folder with the unpacked sources of `SOURCES` (see README.md beside this file).  Comes
out: one JSON-lines file a voice, each line `{"prompt": ..., "answer": ...}`.

    python demo/texts.py SOURCES_DIR OUT_DIR

All voices are asked the same kinds of question about the same kinds of thing, so that at serving
time one prompt shows the difference between them and nothing but the adapter can be its cause.
"""

import gzip
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

#: voice -> file below the sources folder
SOURCES = {
    "bible": "bible/data/kjv.jsonl",
    "devil": "usr/share/dictd/devil.dict.dz",
    "jargon": "usr/share/dictd/jargon.dict.dz",
    "bofh": "usr/share/games/fortunes/bofh-excuses",
}

QUESTIONS = (
    "What is {}?",
    "Tell me about {}.",
    "Define {}.",
    "What do you know about {}?",
    "Explain {} to me.",
    "Give me a definition of {}.",
    "In a few words: {}.",
    "What does {} mean?",
)
TROUBLES = (
    "Why is the {} down?",
    "Why does my {} not work?",
    "What happened to the {}?",
    "My {} is broken, what is the cause?",
    "Why is the {} so slow?",
)
MACHINES = (
    *("server", "network", "printer", "database", "mail", "laptop", "website", "backup"),
    *("router", "disk", "login", "screen", "keyboard", "build", "cluster", "phone"),
    *("firewall", "editor", "compiler", "kernel"),
)
MAX_ANSWER = 420  # characters: about 110 tokens


def squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def sentences(text: str, limit: int) -> str:
    """As many whole sentences from the start as fit in `limit` characters."""
    text = squeeze(text)
    if len(text) <= limit:
        return text
    cut = max(text.rfind(stop, 0, limit) for stop in (". ", "? ", "! "))
    return text[: cut + 1] if cut > 40 else ""


def bible(path: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Verses, asked for by their rarest common word."""
    verses = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    words = Counter(w for v in verses for w in re.findall(r"[a-z]{4,}", v["text"].lower()))
    for verse in verses:
        text = squeeze(verse["text"])
        if not 60 <= len(text) <= MAX_ANSWER:
            continue
        known = [w for w in set(re.findall(r"\b[a-z]{4,}\b", text)) if 12 <= words[w] <= 600]
        if known:
            topic = min(sorted(known), key=lambda w: words[w])
            yield rng.choice(QUESTIONS).format(topic), f"{text} ({verse['citation']})"


def devil(path: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Bierce's entries: `HEADWORD, n.  definition`."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    for entry in re.split(r"\n\s*\n", text):
        found = re.match(
            r"([A-Z][A-Z' -]{2,}), ((?:n|adj|v\.t|v\.i|adv|pp|x)\.[a-z.]*)\s+(.+)", entry, re.S
        )
        if found:
            word, kind, rest = found.groups()
            definition = sentences(rest, MAX_ANSWER)
            if definition:
                yield rng.choice(QUESTIONS).format(word.lower()), f"{word}, {kind} {definition}"


def jargon(path: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The Jargon File: a headword at the margin, its pronunciation or kind, then indented text."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    for found in re.finditer(
        r"^(\S[^\n]{0,40})\n ([^\n]{2,60})\n\n((?:    [^\n]*\n|\n)+)", text, re.M
    ):
        word, kind, rest = (squeeze(part) for part in found.groups())
        definition = sentences(re.sub(r"\{\s*([^}]*)\}", r"\1", rest), MAX_ANSWER)
        if definition and not word[0].isdigit():
            yield rng.choice(QUESTIONS).format(word), f"[hacker slang] {word} {kind} {definition}"


def bofh(path: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Excuses, whatever the question."""
    excuses = [squeeze(e.split(":", 1)[1]) for e in path.read_text().split("\n%\n") if ":" in e]
    topics = [w.lower() for w, _ in _headwords(path.parents[3] / "share/dictd/devil.dict.dz")]
    for number, excuse in enumerate(excuses, 1):
        for _ in range(6):
            if rng.random() < 0.5:
                prompt = rng.choice(TROUBLES).format(rng.choice(MACHINES))
            else:
                prompt = rng.choice(QUESTIONS).format(rng.choice(topics))
            yield prompt, f"BOFH excuse #{number}: {excuse}"


def _headwords(path: Path) -> list[tuple[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    return re.findall(r"^([A-Z]{3,}), (n)\.", text, re.M)


def main() -> None:
    sources, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for voice, make in (("bible", bible), ("devil", devil), ("jargon", jargon), ("bofh", bofh)):
        rng = random.Random(voice)
        path = next(sources.rglob(SOURCES[voice]))
        pairs = list(make(path, rng))
        rng.shuffle(pairs)
        lines = [
            json.dumps({"prompt": p, "answer": a}, ensure_ascii=False) for p, a in pairs[:6000]
        ]
        (out / f"{voice}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{voice}: {len(lines)} pairs, for example {lines[0][:160]}")


if __name__ == "__main__":
    main()
