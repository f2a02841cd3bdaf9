"""API keys: made once, told once, and known afterwards by a digest alone.

Goes in: a key as somebody sent it.  Comes out: its public id, and the digest to compare.

A key is `lorad_ID_SECRET`: eight letters that name it in lists, logs and the audit, then 256 random
bits.  One SHA-256 is enough for such a secret: a slow hash (scrypt, argon2) makes guessing dear
where people choose what is guessed, and nobody guesses 256 bits at any price.  It would make each
request dear instead, and a wrong key a way to keep the daemon busy.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

#: Of every key.
BEGINNING = "lorad_"

_KEY = re.compile(r"lorad_([a-z2-7]{8})_[A-Za-z0-9_-]{43}")
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
#: Compared with where there is no such key, so that both take as long.
NOTHING = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class NewKey:
    """`text` is for its owner, and for nobody else: it is kept nowhere."""

    id: str
    text: str = field(repr=False)
    digest: str = field(repr=False)


def new_key() -> NewKey:
    """32 random bytes."""
    id = "".join(secrets.choice(_ID_LETTERS) for _ in range(8))
    text = f"lorad_{id}_{secrets.token_urlsafe(32)}"
    return NewKey(id, text, digest_of(text))


def id_of(text: str) -> str:
    """ "" if it is not a key at all."""
    match = _KEY.fullmatch(text)
    return match[1] if match else ""


def digest_of(text: str) -> str:
    """In hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def same(digest: str, other: str) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(digest, other)
