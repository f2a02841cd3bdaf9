"""Text to token ids and back, on the `tokenizers` library alone.

Goes in: a model or adapter folder with tokenizer.json, and beside it, where they exist,
tokenizer_config.json, special_tokens_map.json, config.json and generation_config.json.  Comes out:
ids, text, and the bytes of single tokens.  Knows no torch, no transformers and no chat format.

One Tokenizer serves a whole worker pool: after `load` it is never changed, and nobody who reads a
text holds a lock for long, Python's own included.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import tokenizers

from lorad.text.token_bytes import SPACE_MARK, Bytes, bytes_of, spelling_of, whole

T = TypeVar("T")
Given = ParamSpec("Given")

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"

#: Ends of a turn in the common chat formats.  A chat request stops on those that the vocabulary
#: knows as special tokens, besides the model's own end tokens.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>")

#: Tokens whose spelling is remembered.  Texts use a few thousand; a model that draws from all of
#: 128k had the daemon grow by 30 MB within minutes.
REMEMBERED = 1 << 14

#: Characters, or ids, from which on a text is read as a batch of one, for which the library lets go
#: of Python's lock.  One alone keeps it: 400,000 characters of prose held up everybody's stream for
#: 0.6 s, and 3 million of one letter /readyz for 8 s.  A batch takes 0.15 ms more, whatever it is.
LONG = 8192

#: In a file of JSON beside tokenizer.json; Gemma's has 45,000.  A parser lets nobody else run: a
#: million take it 0.2 s.
MOST_VALUES = 1_000_000


class TextError(Exception):
    """A tokenizer, template or text cannot be used; the message is one line, and `hint` the next
    step where it is another than for all of a folder's files."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def _is_panic(error: BaseException) -> bool:
    """One of the library's, which is no Exception: it would pass by every border."""
    return type(error).__name__ == "PanicException"


def _told(work: Callable[Given, T]) -> Callable[Given, T]:
    """A TextError in place of whatever the library raises at a text, a panic included: one that was
    raised where the engine's tokens are taken in ended the whole daemon."""

    @wraps(work)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except TypeError:  # what cannot become UTF-8
            raise TextError("the text holds a lone surrogate and is not valid Unicode") from None
        except BaseException as error:  # bare, of a vocabulary without a character and its stand-in
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise TextError(f"this vocabulary fails at a text: {_line(error)}") from None

    return wrapped


class Tokenizer:
    """A loaded vocabulary.  `vocab_size` is the largest id plus one, holes included."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        specials: Mapping[str, str],
        eos_ids: frozenset[int] = frozenset(),
        adds_end: bool = False,
        model_size: int | None = None,
    ) -> None:
        """`model_size`: the largest id plus one, added tokens left out, where it is known."""
        # A tokenizer.json may carry the truncation of its training run; a server must not cut.
        inner.no_truncation()
        inner.no_padding()
        added = inner.get_added_tokens_decoder()
        self._inner = inner
        self.specials = dict(specials)  # "bos_token" -> "<s>", as chat templates know them
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.model_size = _model_size(inner) if model_size is None else model_size
        self.vocab_size = max(self.model_size, 1 + max(added, default=-1))
        self.bos_id = self._id_of("bos_token")
        own_end = self._id_of("eos_token")
        self.eos_ids = eos_ids | ({own_end} if own_end is not None else frozenset())
        #: What belongs behind a text, whether `joined` puts it there or not; None: nothing is said.
        self.end_id = own_end if adds_end else None
        ends = (inner.token_to_id(text) for text in TURN_ENDS)
        self.chat_stop_ids = self.eos_ids | {i for i in ends if i in self.special_ids}
        self.spelling = spelling_of(inner.decoder)
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        self.strips_first_space = self._strips_first_space()

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a folder.  TextError when tokenizer.json is missing or is not one."""
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise TextError(
                f"no tokenizer.json in {folder}: save the model with a fast tokenizer "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        inner = made(lambda: tokenizers.Tokenizer.from_file(str(path)), path)
        config = read_json(folder / CONFIG_FILE)
        add_missing(inner, config.get("added_tokens_decoder"), path)
        return cls(
            inner,
            specials=read_specials(folder),
            eos_ids=_end_ids(folder),
            adds_end=config.get("add_eos_token") is True,
        )

    def bare(self) -> tokenizers.Tokenizer:
        """Another tokenizer on the same vocabulary and merges, which are held once, and with
        nothing else yet: it takes no time and no memory."""
        return tokenizers.Tokenizer(self._inner.model)

    @_told
    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of `text`.  `add_special` lets the vocabulary put its bos in front, as for a plain
        completion; a rendered chat template brings its own."""
        if len(text) < LONG:
            return list(self._inner.encode(text, add_special_tokens=add_special).ids)
        [found] = self._inner.encode_batch_fast([text], add_special_tokens=add_special)
        return list(found.ids)

    @_told
    def pieces(self, text: str) -> tokenizers.Encoding:
        """`text` by itself, before special tokens are put around it: see `joined`."""
        if len(text) < LONG:
            return self._inner.encode(text, add_special_tokens=False)
        [found] = self._inner.encode_batch([text], add_special_tokens=False)  # with offsets
        return found

    @_told
    def many(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """`pieces` of each, on several threads, without offsets."""
        return list(self._inner.encode_batch_fast(list(texts), add_special_tokens=False))

    @_told
    def joined(
        self, first: tokenizers.Encoding, second: tokenizers.Encoding | None = None
    ) -> tokenizers.Encoding:
        """One text, or a pair, with the special tokens that the vocabulary puts around it."""
        return self._inner.post_process(first, second, add_special_tokens=True)

    def num_added(self, *, pair: bool) -> int:
        """Special tokens that `joined` adds."""
        return int(self._inner.num_special_tokens_to_add(pair))

    @_told
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`.  Ids that the vocabulary lacks (padding rows of the head) are nothing."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        if len(known) < LONG:
            return str(self._inner.decode(known, skip_special_tokens=skip_special))
        return str(self._inner.decode_batch([known], skip_special_tokens=skip_special)[0])

    def spell(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it, "" if it has none."""
        known = (i if 0 <= i < self.vocab_size else None for i in ids)
        return ["" if i is None else self._inner.id_to_token(i) or "" for i in known]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, halves of characters included; b"" if unknown."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._spell(token_id)
            _remember(self._bytes, token_id, known)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The characters that a token stands for; None if it may begin or end within one."""
        try:
            return self._whole[token_id]
        except KeyError:
            found = whole(self.token_bytes(token_id))
            _remember(self._whole, token_id, found)
            return found

    def token_text(self, token_id: int) -> str:
        """The same as text; a half character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of one token written as in the vocabulary."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def _id_of(self, role: str) -> int | None:
        text = self.specials.get(role)
        return None if text is None else self.token_id(text)

    def _strips_first_space(self) -> bool:
        """Whether decoding drops the space that sentencepiece put before the first word."""
        if self.spelling is not Bytes.SPACE_MARK:
            return False
        spelled = ((i, self._inner.id_to_token(i) or "") for i in range(self.model_size))
        word = next((i for i, text in spelled if text[:1] == SPACE_MARK), None)
        return word is not None and not self.decode([word], skip_special=False).startswith(" ")

    def _spell(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self.spelling is not Bytes.OTHER:
            return bytes_of(token, self.spelling)
        return self.decode([token_id], skip_special=False).encode()


def _remember(known: dict[int, T], token_id: int, spelling: T) -> None:
    """Begins anew when there are too many: what is used comes back at once."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[token_id] = spelling


def read_specials(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token`, `pad_token` and the like, as text; absent ones left out."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", CONFIG_FILE):
        for role, value in read_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str):
                found[role] = text
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is absent.  TextError when it is there and broken."""
    try:
        data = path.read_bytes()
        if num_values(data) > MOST_VALUES:
            raise TextError(f"{path} has more than {MOST_VALUES:,} values")
        value = json.loads(data)
        if b"\\u" in data or b"\xed" in data:  # lone surrogates, of which nothing makes text
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(f"{path} cannot be read: {_line(error)}") from None
    if not isinstance(value, dict):
        raise TextError(f"{path} is not a JSON object")
    return value


def num_values(data: bytes) -> int:
    """At least as many as JSON has, without making them."""
    return sum(map(data.count, (b",", b"[", b"{")))


def _end_ids(folder: Path) -> frozenset[int]:
    """The union of what config.json and generation_config.json call end tokens."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids.update(i for i in (value if isinstance(value, list) else [value]) if type(i) is int)
    return frozenset(ids)


def made(make: Callable[[], T], path: Path) -> T:
    """What `make` makes of the file at `path`; TextError if the library cannot."""
    try:
        return make()
    except TextError:
        raise
    except BaseException as error:  # the library raises bare Exception
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise TextError(f"{path} is not a tokenizer: {_line(error)}") from None


def add_missing(inner: tokenizers.Tokenizer, listed: object, path: Path) -> None:
    """Old folders list added tokens in tokenizer_config.json only.  They must land on their ids."""
    if not isinstance(listed, dict):
        return
    wanted: dict[str, int] = {}
    missing: list[tuple[str, Mapping[str, Any]]] = []
    for key, entry in sorted(listed.items(), key=lambda item: (len(item[0]), item[0])):
        content = entry.get("content") if isinstance(entry, dict) and key.isdecimal() else None
        if not isinstance(content, str) or content in wanted:
            continue  # of one that is listed twice the first place counts
        if inner.token_to_id(content) is None:
            missing.append((content, entry))
            wanted[content] = int(key)
    add_tokens(inner, missing)
    for content, place in wanted.items():
        if inner.token_to_id(content) != place:
            raise TextError(
                f"{path} lacks the token {content[:40]!r} that tokenizer_config.json places at "
                f"id {place}"
            )


def add_tokens(
    inner: tokenizers.Tokenizer, listed: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """Add tokens with their flags as the files have them, in this order; the library says on which
    ids.  All in one call: each has it build its search for all of them anew."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    inner.add_tokens(
        [
            tokenizers.AddedToken(content, **{name: bool(flags.get(name)) for name in names})
            for content, flags in listed
        ]
    )


def _model_size(inner: tokenizers.Tokenizer) -> int:
    """The largest id of the vocabulary itself plus one.  Where it has no holes, as most, that is
    found without a dict of all of it, which kept Python's lock for 90 ms at 128k tokens."""
    model, size = inner.model, int(inner.get_vocab_size(with_added_tokens=False))
    if all(model.id_to_token(i) is not None for i in range(size)):
        return size
    return 1 + max(inner.get_vocab(with_added_tokens=False).values(), default=-1)


def _line(error: BaseException) -> str:
    """The first line of what a library says; it may quote the file."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]
