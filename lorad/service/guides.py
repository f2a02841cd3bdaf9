"""Guides: the form that an answer is to have → the grammar that the engine follows, or why not.

Goes in: a `Format`.  Comes out: a grammar of `engine/grammar.py` that was compiled against the
model's own tokenizer, so that what cannot be followed is a 400 before anything is queued.  That
takes milliseconds, or for ever for a text that is made to: it happens in a process that is ended
when it has worked for two seconds (`grammar_checker.py`), and once for the same text.
"""

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path

import msgspec

from engine import grammar as grammars
from engine.errors import EngineError
from engine.messages import EngineInfo
from lorad.errors import LoradError
from lorad.service.ask import Format
from lorad.service.grammar_checker import GrammarChecker, TooMuchWork
from lorad.service.seams import OwnVocabulary
from lorad.service.threads import Rooms

#: Grammars that are kept; each is about as long as its schema.
CACHED = 256
#: Who waits longer, behind those of others, is asked to come again.
WAIT_SECONDS = 10.0
#: Vocabularies of adapters' own whose processes are kept, besides the base's.
OWN = 2
#: One that takes long must not keep all others waiting; a tenant with many of them has one at work.
THREADS = 2


class Guides:
    """For the base model in `folder`, and adapters with a vocabulary of their own.  `close` ends
    its threads and processes."""

    def __init__(self, folder: Path, wait_seconds: float = WAIT_SECONDS) -> None:
        self._path = folder / "tokenizer.json"
        self._wait_seconds = wait_seconds
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lorad-guides")
        self._rooms = Rooms(each=1, total=THREADS)
        self._works: set[asyncio.Task[str]] = set()  # some go on when nobody waits for them
        self._lock = threading.Lock()
        #: By the key of a vocabulary, b"" for the base's; those in use, and how often.
        self._checkers: OrderedDict[bytes, GrammarChecker] = OrderedDict()
        self._used: Counter[bytes] = Counter()
        #: Grammars, and what was said of those that were given up: they are not tried again.
        self._known: OrderedDict[bytes, str | TooMuchWork] = OrderedDict()

    async def grammar(
        self, asked: Format, info: EngineInfo, tenant: str = "", own: OwnVocabulary | None = None
    ) -> str:
        """For a request on the account of `tenant`, if there are any, to an adapter whose
        vocabulary is `own`.  Raises LoradError: unsupported_parameter, invalid_value, queue_full.
        """
        key = sha256(f"{asked.kind}\0{asked.text}".encode("utf-8", "surrogatepass")).digest()
        key += own.key if own is not None else b""
        if key in self._known:
            self._known.move_to_end(key)
        else:
            self._known[key] = await self._made(asked, info, tenant, own)
            while len(self._known) > CACHED:
                self._known.popitem(last=False)
        known = self._known[key]
        if isinstance(known, TooMuchWork):
            raise _refused(asked, known)
        return known

    async def _made(
        self, asked: Format, info: EngineInfo, tenant: str, own: OwnVocabulary | None
    ) -> str | TooMuchWork:
        work = asyncio.create_task(self._in_turn(asked, info, tenant, own))
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await asyncio.shield(work)
        except TimeoutError:
            message = f"{asked.param} waits behind others that take long to compile"
            raise LoradError("queue_full", message, param=asked.param) from None
        except TooMuchWork as error:
            return error
        except EngineError as error:
            raise _refused(asked, error) from None
        finally:
            work.cancel()  # nothing, if it has ended

    async def _in_turn(
        self, asked: Format, info: EngineInfo, tenant: str, own: OwnVocabulary | None
    ) -> str:
        """Cancelled, it ends with the thread's work: until then the tenant's room is not free."""
        async with self._rooms.at(tenant) if tenant else nullcontext():
            job = self._pool.submit(self._compile, asked, info, own)
            work = asyncio.wrap_future(job)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                if not job.cancel():  # it has begun
                    await asyncio.wait({work})
                    work.exception()  # which is nobody's any more
                raise

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._checkers:
                self._checkers.popitem()[1].close()

    # ----------------------------------------------------------------- on a thread of its own
    def _compile(self, asked: Format, info: EngineInfo, own: OwnVocabulary | None) -> str:
        grammars.require()
        made = _grammar_of(asked)
        with self._checking(info, own) as checker:
            checker.check(made)
        return made

    @contextmanager
    def _checking(self, info: EngineInfo, own: OwnVocabulary | None) -> Iterator[GrammarChecker]:
        """The one for that vocabulary.  Of those that are not in use some stay for the next."""
        key = own.key if own is not None else b""
        with self._lock:
            checker = self._checkers.get(key)
            if checker is None:
                checker = self._checkers[key] = self._checker(info, own)
            if own is not None:
                checker.path = own.path  # that of the first may be gone by now
            self._checkers.move_to_end(key)
            self._used[key] += 1
            idle = [k for k in self._checkers if k and not self._used[k]]
            for old in idle[: max(0, len(self._checkers.keys() - {b""}) - OWN)]:
                self._checkers.pop(old).close()
                del self._used[old]
        try:
            yield checker
        finally:
            with self._lock:
                self._used[key] -= 1

    def _checker(self, info: EngineInfo, own: OwnVocabulary | None) -> GrammarChecker:
        if own is None:
            return GrammarChecker(self._path, info.vocab_size, info.eos_token_ids)
        return GrammarChecker(own.path, info.vocab_size + info.extra_vocab, own.ends)


def _refused(asked: Format, error: EngineError) -> LoradError:
    message = f"{asked.param}: {error.message}"
    return LoradError(error.code, message, param=asked.param, hint=error.hint)


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
