"""Names and references as people spell them: which is which, and where a revision begins.

Goes in: one word.  Comes out: its parts.  A reference (`hf:ORG/REPO@commit`, `s3://…`) is told by
its scheme, which no adapter's own name can have; the `@` in it is the source's business, while on
a name it begins a revision's digest.  Asks nobody whether either exists.  And a number of things
as people say it.
"""

import difflib
import re
from collections.abc import Iterable
from heapq import nsmallest

MAX_LABELS = 64
_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")

#: Names that are compared letter by letter, of those that share most pairs of letters.
_LOOKED_AT = 32
_LONGEST = 127  # of a name, with its tenant

SCHEMES = ("hf:", "s3://", "https://", "http://")


def is_reference(word: str) -> bool:
    return word.startswith(SCHEMES)


def split_digest(word: str) -> tuple[str, str]:
    """(name, digest) of `name@digest`; a reference is all name."""
    if is_reference(word):
        return word, ""
    name, _, digest = word.partition("@")
    return name, digest


def adapter_name(reference: str) -> str:
    """What an adapter from there is called by default: the last part of the way to it, as a legal
    name; "" if nothing of it is left."""
    path = reference.partition("#")[0].rstrip("/").rpartition("/")[2]
    word = path.partition("@")[0] if reference.startswith("hf:") else path
    for ending in (".tar.gz", ".tgz", ".tar", ".zip", ".tar.zst", ".tar.xz"):
        word = word.removesuffix(ending)
    legal = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in word.lower())
    return legal.lstrip("._-")[:63]


def is_label(key: str, value: object) -> bool:
    """May it stand on an adapter?  It is printed wherever adapters are."""
    return (
        _LABEL_KEY.fullmatch(key) is not None
        and isinstance(value, str)
        and len(value) <= 256
        and value.isprintable()
    )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Which of `known` was probably meant; among thousands in milliseconds, as the loop waits."""
    if len(name) > _LONGEST:
        return None
    pairs = {name[i : i + 2] for i in range(len(name) - 1)}

    def unlike(other: str) -> tuple[int, int]:
        return -sum(pair in other for pair in pairs), abs(len(other) - len(name))

    likely = nsmallest(_LOOKED_AT, known, key=unlike)
    found = [other for other in likely if other.endswith(f"/{name}")]  # only the tenant is missing
    found = found or difflib.get_close_matches(name, likely, n=1)
    return found[0] if found else None


def several(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def still_running(count: int) -> str:
    """Of requests that a drain waits for."""
    return f"{several(count, 'request')} still {'runs' if count == 1 else 'run'}"
