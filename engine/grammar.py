"""Grammars of answers: what may be written, token by token, for one vocabulary.

Goes in: a grammar in llguidance's own form (`json_schema`, `regex`, `choice` and `lark` make one)
and a tokenizer.json.  Comes out: a `Matcher`, which follows an answer and fills in the bits of the
tokens that may come next.  The one module that touches llguidance; both sides of the border use it:
lorad to refuse a grammar before it is queued, the engine to follow it.  Torch-free.  Knows no
sequences and no threads, but what is slow here lets go of the interpreter's lock, except where a
tokenizer is read.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from engine.conjunctions import MOST, lark_is_too_much, schema_is_too_much
from engine.errors import GrammarInvalid, GuidesMissing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled grammars that are kept; each is copied for the sequence that follows it.
CACHED = 64
#: Between the parts of a JSON document.  Without an end, a small model writes blanks until
#: max_tokens; sixty-four are more than any indented document has in a row.
WHITESPACE = r"[\x20\n\r\t]{0,64}"

#: Where a grammar leaves no choice, llguidance asks the tokenizer which token is next; that makes
#: one of a special token's text, which llguidance then refuses, as no text is one: `<s>` of HTML
#: ended answers with an error.  With this, what may be next goes by the bytes.
_BY_BYTES = '%llguidance {"no_forcing": true}\n'

P = ParamSpec("P")
T = TypeVar("T")
Mask = npt.NDArray[np.uint32]


def _without_panics(work: Callable[P, T]) -> Callable[P, T]:
    """A panic of the library is no Exception: it would pass by every border, and leave its request
    without an answer.  Of 65,000 odd texts seven were (an error message cut within a character)."""

    @wraps(work)
    def careful(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            message = f"llguidance broke off: {_line(str(error))}"
        raise GrammarInvalid(message)

    return careful


def available() -> bool:
    """Whether answers can be guided at all."""
    return find_spec("llguidance") is not None


def require() -> None:
    """Raise GuidesMissing unless they can."""
    if not available():
        raise GuidesMissing(
            "guided answers need the library llguidance, which is not installed here",
            hint="pip install '.[guided]' in a checkout of lorad",
        )


# ----------------------------------------------------------------- grammars from what people write
def json_schema(schema: str) -> str:
    """The grammar of a JSON schema's documents; `schema` is JSON."""
    from llguidance import LLMatcher

    with suppress(ValueError, RecursionError):  # the library says what is wrong with it
        if schema_is_too_much(json.loads(schema)):
            raise GrammarInvalid(f"more than {MOST} patterns for one value; make it simpler")
    return _made(
        lambda: LLMatcher.grammar_from_json_schema(
            # `lenient` would leave out in silence what the library does not know.
            schema,
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False},
        )
    )


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_schema('{"type": "object"}')


def regex(pattern: str) -> str:
    """The grammar of what a whole regular expression (Rust's syntax, no look-around) matches."""
    from llguidance import LLMatcher

    return _made(lambda: LLMatcher.grammar_from_regex(pattern))


def choice(texts: Sequence[str]) -> str:
    """The grammar of one text out of several, as they are written."""
    rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return lark(f"start: {rule}")


def lark(text: str) -> str:
    """The grammar of a Lark text; one that is written as GBNF is translated."""
    from llguidance import grammar_from

    if lark_is_too_much(text):
        raise GrammarInvalid(f"more than {MOST} of & and ~; make it simpler")
    return _made(lambda: grammar_from("grammar", text))


@_without_panics
def _made(make: Callable[[], str]) -> str:
    try:
        return make()
    except ValueError as error:  # what the library says of a text that it cannot read
        raise GrammarInvalid(_line(str(error))) from None


# ----------------------------------------------------------------- one vocabulary
class Matcher:
    """Follows one answer.  One thread at a time."""

    def __init__(self, inner: "LLMatcher", num_words: int) -> None:
        self._inner, self._num_words = inner, num_words

    @_without_panics
    def take(self, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`.  Raises GrammarInvalid if it may not, or if following
        it takes more work than is allowed."""
        if tokens and not self._inner.consume_tokens(list(tokens)):
            raise self._trouble()

    @_without_panics
    def mask(self, ends: Sequence[int] = ()) -> Mask:
        """(words,) bits of the tokens that may come next; where the answer may end, the model's own
        end tokens and `ends` are among them."""
        words: Mask = np.zeros(self._num_words, np.uint32)
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._inner.is_error():
            raise self._trouble()
        if ends and self._inner.is_accepting():
            for token in (token for token in ends if 0 <= token // 32 < len(words)):
                words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def _trouble(self) -> GrammarInvalid:
        text = _line(self._inner.get_error()).removesuffix(" <non-verbose/>")
        if text == "NoExtensionBias":
            text = "there is nothing that it allows to be written"
        return GrammarInvalid(f"the grammar cannot be followed: {text}")


class Grammars:
    """Compiles grammars for a tokenizer.json, of which ids below `vocab_size` are drawn.

    Thread-safe.  Raises GuidesMissing, and GrammarInvalid for a tokenizer that cannot be used.
    Reading one takes two pieces of 0.10 and 0.06 s for 49k tokens, 0.39 and 0.16 for 128k of 193k
    merges, in which no other thread runs.
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        require()
        from llguidance import LLParserLimits

        self._num_words = -(-vocab_size // 32)
        try:
            text = path.read_text("utf-8").lstrip()  # what begins otherwise is taken for a path
            self._marks = _marks(text)
            self._tokenizer = _tokenizer_of(text, vocab_size, eos_token_ids)
        except OSError as error:
            raise unread("this model's", error) from None
        except ValueError as error:
            message = f"answers cannot be guided with this model's tokenizer: {_line(str(error))}"
            raise GrammarInvalid(message) from None
        # The library's own measures of work, a mask of some 20 ms at most; a fifth of its states,
        # of 2 KB each; and no parser state in what a client gets to read.
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raise GrammarInvalid unless it can be followed from its beginning."""
        self.matcher(grammar).mask()

    @_without_panics
    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of an answer.  Raises GrammarInvalid."""
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
        if known is None:
            known = self._compile(grammar)
        return Matcher(known.deep_copy(), self._num_words)

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        key, said = grammar, _said(grammar)
        if any(mark in said for mark in self._marks):
            grammar = _by_bytes(grammar)
        wrong = LLMatcher.validate_grammar(grammar, self._tokenizer, limits=self._limits)
        if wrong and not wrong.startswith("WARNING:"):
            raise GrammarInvalid(_line(wrong))
        made = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if made.is_error():
            raise GrammarInvalid(_line(made.get_error()))
        with self._lock:
            self._known[key] = made
            while len(self._known) > CACHED:
                self._known.popitem(last=False)
        return made


@_without_panics
def _tokenizer_of(text: str, vocab_size: int, ends: Sequence[int]) -> "LLTokenizer":
    """A stranger's may be anything: one whose byte token is `<0xZZ>` was such a panic."""
    from llguidance import LLTokenizer

    # The library keeps the interpreter's lock: in two pieces, between which a step can begin.
    plain = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(ends), slices=[])
    return plain.with_slices(LLTokenizer.general_slices())


class _Added(Struct):
    content: str = ""
    special: bool = False


class _File(Struct):
    """Of a tokenizer.json, what is looked at here; a decoder skips the rest in milliseconds."""

    added_tokens: list[_Added] = []


def _marks(tokenizer: str) -> list[str]:
    """Texts of tokens that llguidance takes for special ones: it does of all in angle brackets."""
    try:
        found = msgspec.json.decode(tokenizer, type=_File).added_tokens
    except msgspec.MsgspecError:
        return []  # the library says what is wrong with it
    marks = [t.content for t in found if t.special or re.fullmatch(r"(?s)<.*>", t.content)]
    forms = {_said(form) for mark in marks for form in (mark, json.dumps(mark)[1:-1])}
    return sorted(forms - {""})


def _said(text: str) -> str:
    """As it can be looked for: an expression escapes some characters, and JSON those beyond ASCII,
    in either case."""
    return text.replace("\\", "").lower()


def _by_bytes(grammar: str) -> str:
    """The same, of which nothing is written by the tokenizer's choice."""
    if not grammar.startswith("{"):
        return grammar if "%llguidance" in grammar else _BY_BYTES + grammar
    made = json.loads(grammar)
    for part in made["grammars"]:
        if part["json_schema"] is not None:
            part["lark_grammar"] = f"start: %json {json.dumps(part['json_schema'])}"
            part["json_schema"] = None
        part["lark_grammar"] = _BY_BYTES + part["lark_grammar"]
    return json.dumps(made)


def unread(whose: str, error: OSError) -> GrammarInvalid:
    """For a client, who is not told where files lie."""
    return GrammarInvalid(
        f"answers cannot be guided with {whose} tokenizer: {error.strerror or type(error).__name__}"
    )


def _line(text: str) -> str:
    """What the library says in several lines, in one."""
    return " ".join(text.split())[:400]
