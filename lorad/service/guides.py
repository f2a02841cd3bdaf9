"""Guides: the form that an answer is to have → the grammar that the engine follows, or why not.

Goes in: a `Format`.  Comes out: a grammar of `engine/grammar.py` that was compiled against the
model's own tokenizer, so that what cannot be followed is a 400 before anything is queued.  That
takes a millisecond, or a second for a text that is made to take long: it happens on threads of its
own, for a limited time, and once for the same text.
"""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec

from engine import grammar as grammars
from engine.errors import EngineError
from engine.grammar import Grammars
from engine.messages import EngineInfo
from lorad.errors import LoradError
from lorad.service.ask import Format

#: Grammars that are kept; each is about as long as its schema.
CACHED = 256
#: Who wants one that takes longer is refused.
COMPILE_SECONDS = 10.0
#: One that takes long must not keep all others waiting.
THREADS = 2


class Guides:
    """For the base model in `folder`; adapters have its vocabulary.  `close` ends its threads."""

    def __init__(self, folder: Path, seconds: float = COMPILE_SECONDS) -> None:
        self._path = folder / "tokenizer.json"
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lorad-guides")
        self._lock = threading.Lock()
        self._vocabulary: Grammars | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def grammar(self, asked: Format, info: EngineInfo) -> str:
        """Raises LoradError: unsupported_parameter, invalid_value."""
        key = sha256(f"{asked.kind}\0{asked.text}".encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                made = await loop.run_in_executor(self._pool, self._compile, asked, info)
        except TimeoutError:
            message = f"{asked.param} was not compiled within {self._seconds:g} s; make it simpler"
            raise LoradError("invalid_value", message, param=asked.param) from None
        except EngineError as error:
            message = f"{asked.param}: {error.message}"
            raise LoradError(error.code, message, param=asked.param, hint=error.hint) from None
        self._known[key] = made
        while len(self._known) > CACHED:
            self._known.popitem(last=False)
        return made

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ----------------------------------------------------------------- on a thread of its own
    def _compile(self, asked: Format, info: EngineInfo) -> str:
        grammars.require()
        made = _grammar_of(asked)
        self._words(info).check(made)
        return made

    def _words(self, info: EngineInfo) -> Grammars:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Grammars(self._path, info.vocab_size, info.eos_token_ids)
            return self._vocabulary


def _grammar_of(asked: Format) -> str:
    match asked.kind:
        case "json_object":
            return grammars.json_object()
        case "json_schema":
            return grammars.json_schema(asked.text)
        case "regex":
            return grammars.regex(asked.text)
        case "choice":
            return grammars.choice(msgspec.json.decode(asked.text, type=list[str]))
        case "grammar":
            return grammars.lark(asked.text)
