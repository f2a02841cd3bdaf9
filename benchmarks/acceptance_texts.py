"""What `acceptance.py` asks, and what it trains on: questions, passages to copy, and this
repository's own pages.
"""

import re
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

THINGS = (
    *("a server", "patience", "the moon", "a compiler", "honesty", "a key", "bread", "winter"),
    *("money", "a river", "music", "a network", "courage", "a printer", "sleep", "history"),
    *("a bridge", "rain", "a teacher", "silence", "a password", "the sea", "memory", "salt"),
)
FORMS = ("What is {}?", "Tell me about {}.", "Explain {} to me.", "In a few words: {}.")
#: Other questions than those, of which the base's answers teach the short model.
OTHERS = (
    *("a garden", "gravity", "a map", "hunger", "a library", "glass", "a clock", "friendship"),
    *("an engine", "tea", "a mountain", "luck", "a letter", "paper", "a virus", "the law"),
)
TEACHING = tuple(form.format(thing) for form, thing in product(FORMS, OTHERS))
PASSAGES = (
    "The harbour was quiet before sunrise. Two boats lay at the pier, and a man in a yellow coat "
    "counted the crates that the night crew had left behind.",
    "To make the dough, mix the flour with water, salt and a little yeast. Let it rest for an "
    "hour, fold it twice, and let it rest again before you bake it.",
    "A queue is a list in which things leave in the order in which they came. A stack is a list "
    "in which the thing that came last is the first to leave.",
    "The committee met on Tuesday. It agreed on the budget, put off the question of the new roof, "
    "and thanked the treasurer, who leaves in spring.",
)
#: Of so many requests one is to copy.
COPY_EVERY = 4


def requests(count: int) -> Iterator[tuple[str, str]]:
    """(kind, text): mostly questions ("ask"), every fourth to say a passage again ("copy")."""
    asks = 0
    for n in range(count):
        if n % COPY_EVERY == COPY_EVERY - 1:
            turn = n // COPY_EVERY
            passage = PASSAGES[turn % len(PASSAGES)]
            once = "" if turn < len(PASSAGES) else f" ({turn // len(PASSAGES) + 1} times)"
            yield "copy", f"Repeat this text word by word{once}.\n\n{passage}"
        else:
            turn, at = divmod(asks, len(THINGS))
            yield "ask", FORMS[(asks + turn) % len(FORMS)].format(THINGS[at])
            asks += 1


def pages(root: Path) -> list[str]:
    """Paragraphs of the documentation and of its decisions, without tables and code."""
    found = []
    for page in sorted([*root.glob("docs/*.md"), *root.glob("docs/decisions/*.md")]):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for part in text.split("\n\n"):
            plain = " ".join(part.split())
            if len(plain) > 200 and not plain.startswith(("|", "#")):
                found.append(plain)
    return list(islice(found, 400))
