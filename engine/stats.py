"""Counters of one engine: what the snapshot shows beside the owners' own numbers.

Goes in: each step's work and what it drew.  Comes out: plain integers and histograms.  Has no
clock and knows no names.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from engine.histogram import ADAPTERS, BYTES, SECONDS, TOKENS, Histogram
from engine.sequence import Status, StepWork
from engine.status_messages import HistogramStatus, StepsStatus


def _histogram(bounds: tuple[float, ...]) -> Callable[[], Histogram]:
    return lambda: Histogram(bounds)


@dataclass(slots=True)
class Steps:
    """What steps of one kind were like."""

    seconds: Histogram = field(default_factory=_histogram(SECONDS))
    batch_tokens: Histogram = field(default_factory=_histogram(TOKENS))
    adapters: Histogram = field(default_factory=_histogram(ADAPTERS))
    lora_bytes: Histogram = field(default_factory=_histogram(BYTES))

    def status(self) -> StepsStatus:
        return StepsStatus(
            seconds=_told(self.seconds),
            batch_tokens=_told(self.batch_tokens),
            adapters=_told(self.adapters),
            lora_bytes=_told(self.lora_bytes),
        )


def _told(histogram: Histogram) -> HistogramStatus:
    return HistogramStatus(tuple(histogram.counts), histogram.total)


@dataclass(slots=True)
class Stats:
    """Written by the step loop alone.  The key None is the base model.

    `lora_bytes`: of a revision's weights; 0 for one that has gone.
    """

    lora_bytes: Callable[[str], int] = lambda rev: 0
    steps: int = 0
    prompt_tokens: int = 0  # rows of prompts computed; what a prefix hit saves is not in it
    generated_tokens: int = 0
    pooled_tokens: int = 0  # of `prompt_tokens`, rows of what is pooled
    generated_by_rev: Counter[str | None] = field(default_factory=Counter)
    drafted_by_rev: Counter[str | None] = field(default_factory=Counter)  # tokens of drafts
    accepted_by_rev: Counter[str | None] = field(default_factory=Counter)  # of them, told
    pooled_by_rev: Counter[str | None] = field(default_factory=Counter)  # rows of what is pooled
    base_steps: Steps = field(default_factory=Steps)  # without an adapter
    lora_steps: Steps = field(default_factory=Steps)
    _untimed: list[Steps] = field(default_factory=list)  # settled, and not known to have ended
    _began: float = 0.0  # the first of them
    _ended: float = 0.0  # when the device was last known to have

    def note(self, work: StepWork, launched: float, now: float, *, waited: bool) -> None:
        """A step was launched at `launched` and is about to be settled.

        Rows of sequences that ended while it was under way were computed for nobody.
        """
        self.steps += 1
        rows, last, revs = 0, None, set[str]()
        for chunk in work.chunks:
            seq = chunk.seq
            rows += chunk.length
            if seq.rev is not None and seq.rev != last:  # rows of one adapter stand together
                revs.add(seq.rev)
                last = seq.rev
            end = min(chunk.start + chunk.length, seq.num_prompt)
            self.prompt_tokens += max(end - chunk.start, 0)
            if seq.pooled is not None:
                self.pooled_tokens += chunk.length
                self.pooled_by_rev[seq.rev] += chunk.length
            if chunk.samples and seq.status is not Status.FINISHED and seq.doom is None:
                self.generated_tokens += 1
                self.generated_by_rev[seq.rev] += 1
        kind = self.lora_steps if revs else self.base_steps
        kind.batch_tokens.observe(rows)
        kind.adapters.observe(len(revs))
        kind.lora_bytes.observe(sum(map(self.lora_bytes, revs)))
        self._time(kind, launched, now, waited)

    def note_drafts(self, rev: str | None, proposed: int, accepted: int) -> None:
        """In a step that `note` was told of, a draft was judged; `accepted` of it are told."""
        self.drafted_by_rev[rev] += proposed
        self.accepted_by_rev[rev] += accepted
        self.generated_tokens += accepted
        self.generated_by_rev[rev] += accepted

    def note_pooled(self, by_rev: Mapping[str | None, int], seconds: float) -> None:
        """A step of an engine that pools has ended: rows on each of its revisions."""
        rows, revs = sum(by_rev.values()), {rev for rev in by_rev if rev is not None}
        self.pooled_by_rev.update(by_rev)
        self.steps += 1
        self.prompt_tokens += rows
        self.pooled_tokens += rows
        kind = self.lora_steps if revs else self.base_steps
        kind.seconds.observe(seconds)
        kind.batch_tokens.observe(rows)
        kind.adapters.observe(len(revs))
        kind.lora_bytes.observe(sum(map(self.lora_bytes, revs)))

    def keep(self, revs: Iterable[str]) -> None:
        """Forget the counts of revisions that are not among `revs`."""
        known = {None, *revs}
        every = self.generated_by_rev, self.drafted_by_rev, self.accepted_by_rev, self.pooled_by_rev
        for counts in every:
            for rev in [r for r in counts if r not in known]:
                del counts[rev]

    def _time(self, kind: Steps, launched: float, now: float, waited: bool) -> None:
        """A step that draws nothing is not waited for: it shares the time with the next that is."""
        if not self._untimed:
            self._began = max(launched, self._ended)  # or when the one before it left the device
        self._untimed.append(kind)
        if waited:
            seconds = max(now - self._began, 0.0) / len(self._untimed)
            for each in self._untimed:
                each.seconds.observe(seconds)
            self._untimed.clear()
            self._ended = now
