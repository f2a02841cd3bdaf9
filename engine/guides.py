"""Guides: for each sequence with a grammar, the tokens that it may draw next.

Goes in: sequences that arrive, and those whose next token has just been settled.  Comes out: masks
for the rows of a draw, and who is late.  A mask is made on a helper thread from the moment that the
token before it is known, which is while the device computes the row that it is for; the draw is
put into the device's queue behind that.  Who is late is not drawn for in this step: it waits for
its mask, and nobody else does for more than `WAIT_SECONDS`.  Knows nothing of devices.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from engine.errors import EngineError
from engine.grammar import Grammars, Mask, Matcher
from engine.sequence import Sequence, Status

#: What a draw may wait for masks.  The device is at the forward pass before it meanwhile, which
#: takes 4 ms or more; a mask takes 2 us to 7 ms, and the threads some 50 us to hand it over.
WAIT_SECONDS = 0.002
#: A mask takes longer than this only if a thread is lost: then its sequence fails.
LOST_SECONDS = 30.0
#: A mask that takes long must not keep all others waiting; and where each takes long (a regular
#: expression over 128k tokens: 370 us), a batch of 64 has to be shared out to be there in time.
LEAST_THREADS, MOST_THREADS = 2, 8


@dataclass(slots=True, eq=False)
class _Track:
    """How far a sequence's matcher is.  `matcher` is the helper threads', the rest is guarded."""

    seq: Sequence
    tokenizer: str = ""  # its adapter's own
    matcher: Matcher | None = None
    asked: int = 0  # generated tokens that the mask which was asked for last follows
    mask: Mask | None = None  # for the token after `asked`, once it is made
    since: float = 0.0  # when it was asked for
    wrong: EngineError | None = None
    held: bool = False  # told to be late, and not ready since


@dataclass(slots=True)
class Masks:
    """Of one draw: row -> mask; `late` rows must not be drawn for."""

    ready: dict[int, Mask] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)


class Guides:
    """Used from the step loop's thread.  `find` has the grammars of a tokenizer
    (`GrammarShelf.of`), and is asked on one helper thread; `wake` is called when a mask is ready.
    """

    def __init__(
        self,
        find: Callable[[str, int, tuple[int, ...]], Grammars],
        wake: Callable[[], None],
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._find, self._wake, self._wait_seconds = find, wake, wait_seconds
        self._tracks: dict[Sequence, _Track] = {}
        self._changed = threading.Condition()
        self._compilers: ThreadPoolExecutor | None = None
        self._maskers: ThreadPoolExecutor | None = None
        self.num_late = 0  # draws that were put off

    def __bool__(self) -> bool:
        return bool(self._tracks)

    # ------------------------------------------------------------- the step loop's side
    def read_ahead(self) -> None:
        """Read the base's tokenizer now, while nobody streams yet: what it holds up then (see
        `Grammars`) would be everybody's streams at the first guided answer."""
        self._compiler().submit(self._read)

    def enter(self, seq: Sequence, tokenizer: str = "") -> None:
        """A sequence with a grammar arrives: compile it, and make its first mask.  `tokenizer`: its
        adapter's own tokenizer.json; "" = the base's."""
        track = self._tracks[seq] = _Track(seq, tokenizer, since=time.monotonic())
        self._compiler().submit(self._tell, track, partial(self._begin, track))

    def follow(self, seqs: Iterable[Sequence]) -> None:
        """Tokens of these were settled: make the next mask of those that have a grammar."""
        for seq in seqs:
            track = self._tracks.get(seq)
            if track is None or seq.status is Status.FINISHED:
                continue
            tokens = seq.tokens[seq.num_prompt + track.asked :]
            if tokens and track.wrong is None:
                with self._changed:
                    track.asked += len(tokens)
                    track.mask, track.since = None, time.monotonic()
                assert self._maskers is not None, "tokens came before the first mask"
                self._maskers.submit(self._tell, track, partial(self._go_on, track, tokens))

    def masks(self, seqs: Seq[Sequence]) -> Masks:
        """For a draw whose row i is for `seqs[i]`.  Waits for `wait_seconds` at most."""
        found = Masks()
        wanted = {row: track for row, seq in enumerate(seqs) if (track := self._wanted(seq))}
        with self._changed:
            self._changed.wait_for(
                lambda: all(track.mask is not None for track in wanted.values()),
                self._wait_seconds,
            )
            for row, track in wanted.items():
                assert track.asked == track.seq.num_generated, "a mask for another token"
                if track.mask is None:
                    track.held = True
                    found.late.append(row)
                else:
                    found.ready[row] = track.mask
        self.num_late += len(found.late)
        return found

    def take_ready(self) -> list[Sequence]:
        """Who was late and is no more."""
        with self._changed:
            ready = [t for t in self._tracks.values() if t.held and t.mask is not None]
        for track in ready:
            track.held = False
        return [track.seq for track in ready]

    def take_failures(self) -> list[tuple[Sequence, str, str]]:
        """Who can not go on, with a code and why."""
        overdue = time.monotonic() - LOST_SECONDS
        failed = []
        for track in self._tracks.values():
            if track.wrong is not None:
                failed.append((track.seq, track.wrong.code, track.wrong.message))
            elif track.held and track.since < overdue:
                message = f"what may come next was not known after {LOST_SECONDS:g} s"
                failed.append((track.seq, "internal_error", message))
        return failed

    def forget_ended(self) -> None:
        """Drop what was kept for sequences that have ended."""
        for seq in [s for s in self._tracks if s.status is Status.FINISHED]:
            del self._tracks[seq]

    def close(self) -> None:
        """End the helper threads."""
        for pool in (self._compilers, self._maskers):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def _wanted(self, seq: Sequence) -> _Track | None:
        """Its track, unless it has ended and what is drawn for it is nobody's."""
        if not seq.sampling.grammar or seq.status is Status.FINISHED or seq.doom is not None:
            return None
        return self._tracks[seq]

    def _compiler(self) -> ThreadPoolExecutor:
        """The thread that reads and compiles; those that make masks are there then, too."""
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(1, thread_name_prefix="lorad-grammar")
            half = (os.cpu_count() or 1) // 2
            threads = min(max(half, LEAST_THREADS), MOST_THREADS)
            self._maskers = ThreadPoolExecutor(threads, thread_name_prefix="lorad-mask")
        return self._compilers

    # ------------------------------------------------------------- the helper threads' side
    def _read(self) -> None:
        """The base's; what is wrong with it is told to who asks for a guide."""
        with suppress(EngineError):
            self._find("", 0, ())

    def _begin(self, track: _Track) -> Mask:
        seq, ends = track.seq, tuple[int, ...]()
        if track.tokenizer and seq.sampling.ignore_eos:  # the base's ends may be words in it
            ends = seq.sampling.stop_token_ids
        grammars = self._find(track.tokenizer, seq.num_tokens, ends)
        track.matcher = grammars.matcher(track.seq.sampling.grammar)
        return self._go_on(track, [])

    def _go_on(self, track: _Track, tokens: list[int]) -> Mask:
        assert track.matcher is not None, "a token came before the first mask"
        track.matcher.take(tokens)
        return track.matcher.mask(track.seq.sampling.stop_token_ids)

    def _tell(self, track: _Track, work: Callable[[], Mask]) -> None:
        """The border of these threads: whatever goes wrong ends one sequence, and is told."""
        mask, wrong = None, None
        try:
            mask = work()
        except EngineError as error:
            wrong = error
        except Exception as error:
            traceback.print_exc()
            wrong = EngineError(f"its guide failed: {type(error).__name__}: {error}")
        with self._changed:
            track.mask, track.wrong = mask, wrong
            self._changed.notify_all()
        self._wake()
