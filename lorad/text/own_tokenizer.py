"""An adapter's own tokenizer, beside that of its base.

Goes in: the adapter's folder, the base's folder and tokenizer.  Comes out: a `Tokenizer`.  Most
bring a few added tokens and otherwise the base's vocabulary, which is then held once: such a one
takes next to no memory, and 10 ms.  One with a vocabulary of its own is read whole, for which the
library keeps Python's lock (75 ms for 49k tokens, 270 ms for 128k) and takes 10 or 35 MB.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tokenizers

from lorad.text.tokenizer import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    TextError,
    Tokenizer,
    add_missing,
    made,
    read_json,
    read_specials,
)
from lorad.text.tokenizer_file import (
    REMOVE,
    check_places,
    joined,
    parts_of,
    refuse_expressions,
    refuse_long,
    refuse_other_kind,
    refuse_tokens,
    refuse_work,
    rest_of,
    same_model,
)

#: Of those that no request uses now.  One that has the base's vocabulary remembers how tokens that
#: it wrote are spelled, up to 3 MB; another takes 3 to 5 bytes for each of its file besides.
BUDGET = 512 << 20
_REMEMBERED_BYTES, _BYTES_OF_FILE = 3 << 20, 5
#: Of every kind a bit: some that can be made cannot read what they have no token for.
TRIED = "\x00 a\u00e9\u4e2d\U0001f600\u2581\n"
#: A vocabulary of its own may have so many times the base's bytes: the lock is kept for each.
TIMES = 4


@dataclass(frozen=True, slots=True)
class _Files:
    """What of a folder decides its tokenizer."""

    path: Path  # of tokenizer.json; the base's where the folder has none
    data: bytes
    specials: dict[str, str]
    listed: Any  # tokenizer_config.json's added_tokens_decoder
    adds_end: bool | None  # None: as the base

    @property
    def key(self) -> bytes:
        """Equal for folders whose tokenizers are the same."""
        rest = json.dumps((self.specials, self.listed, self.adds_end), sort_keys=True)
        return hashlib.sha256(hashlib.sha256(self.data).digest() + rest.encode()).digest()


class OwnTokenizers:
    """Of the adapters of one base; equal ones are one object.  Thread-safe."""

    def __init__(self, base: Tokenizer, folder: Path, budget: int = BUDGET) -> None:
        """`folder` has the base's files; `budget`: bytes that are kept for requests to come."""
        self._base, self._folder, self._budget = base, folder, budget
        self._written = _written(folder / TOKENIZER_FILE)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Tokenizer, int]] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()

    def get(self, key: bytes) -> Tokenizer | None:
        """One that was read, if it is still there."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._alive.get(key)

    def read(self, folder: Path) -> tuple[Tokenizer, bytes]:
        """That of a folder, and its key.  Raises TextError."""
        files = _read(folder, self._folder)
        key = files.key
        with self._reading:  # whoever wants the same waits for it
            found = self.get(key)
            if found is None:
                found, num_bytes = self._make(files)
                self._keep(key, found, num_bytes)
        return found, key

    def fits(self, folder: Path) -> bool:
        """Whether that of a folder can be kept beside all that are: reckoned from above, as if it
        had a vocabulary of its own."""
        path = folder / TOKENIZER_FILE
        size = path.stat().st_size if path.is_file() else 0
        with self._lock:
            left = self._budget - sum(n for _, n in self._kept.values())
        return _REMEMBERED_BYTES + _BYTES_OF_FILE * size <= left

    def _keep(self, key: bytes, found: Tokenizer, num_bytes: int) -> None:
        with self._lock:
            self._alive[key], self._kept[key] = found, (found, num_bytes)
            while len(self._kept) > 1 and sum(n for _, n in self._kept.values()) > self._budget:
                self._kept.popitem(last=False)

    def _make(self, files: _Files) -> tuple[Tokenizer, int]:
        path = self._folder / TOKENIZER_FILE
        base_data = _bytes_of(path)
        parts, theirs = parts_of(files.data, files.path), parts_of(base_data, path)
        refuse_expressions(parts, theirs, files.path)
        listed = files.listed, read_json(self._folder / CONFIG_FILE).get("added_tokens_decoder")
        refuse_tokens(parts, theirs, listed, files.path)
        rest = rest_of(parts, files.path)
        refuse_work(rest, rest_of(theirs, path), files.path)
        changed = _written(path) != self._written  # what is in memory is not what is compared
        if changed and files.path == path:
            raise TextError(f"{path} was changed since the start: restart lorad")
        shares = not changed and same_model(parts["model"], theirs["model"])
        most = TIMES * len(base_data)
        if not shares and len(files.data) > most:
            raise TextError(
                f"{files.path} has {len(files.data):,} bytes, and a vocabulary of its own may have "
                f"{most:,}, {TIMES} times the base's",
                hint=REMOVE,
            )
        if not shares:
            refuse_other_kind(parts, theirs, files.path)
        inner = (
            joined(self._base.bare(), rest, parts, files.path)
            if shares
            else made(lambda: tokenizers.Tokenizer.from_str(files.data.decode()), files.path)
        )
        if not shares:
            refuse_long(inner.get_vocab(), files.path)
        check_places(inner, parts, files.path)
        size = inner.get_vocab_size()
        made(lambda: add_missing(inner, files.listed, files.path), files.path)
        if files.path == path and inner.get_vocab_size() == size:  # it had something of its own
            raise TextError("its tokenizer.json is gone")
        base = self._base
        ends = (i for i in base.eos_ids if inner.id_to_token(i) == base.spell([i])[0])
        own = made(
            lambda: Tokenizer(
                inner,
                specials={**base.specials, **files.specials},
                eos_ids=frozenset(ends),
                adds_end=base.end_id is not None if files.adds_end is None else files.adds_end,
                model_size=base.model_size if shares else None,
            ),
            files.path,
        )
        made(lambda: own.decode(own.encode(TRIED, add_special=False)), files.path)
        around = made(lambda: own.encode("", add_special=True), files.path)
        if wrong := [i for i in around if i >= own.vocab_size]:
            raise TextError(
                f"{files.path} puts token {wrong[0]} around texts, and has ids up to "
                f"{own.vocab_size - 1}"
            )
        return own, _REMEMBERED_BYTES + (0 if shares else _BYTES_OF_FILE * len(files.data))


def told(error: TextError, folder: Path, base: Path) -> str:
    """Without paths of this host, for whoever has none of them: an adapter's files by their names,
    and those of its base as the base's."""
    return str(error).replace(f"{folder}/", "").replace(f"{base}/", "the base's ")


def _written(path: Path) -> tuple[int, int, int] | None:
    """Another one once a file was written anew; None: it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read(folder: Path, base: Path) -> _Files:
    path = folder / TOKENIZER_FILE
    path = path if path.is_file() else base / TOKENIZER_FILE
    config = read_json(folder / CONFIG_FILE)
    return _Files(
        path,
        _bytes_of(path),
        read_specials(folder),
        config.get("added_tokens_decoder"),
        None if config.get("add_eos_token") is None else config["add_eos_token"] is True,
    )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
