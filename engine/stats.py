"""Counters of one engine: what the snapshot shows beside the owners' own numbers.

Goes in: each step's work and what it drew.  Comes out: plain integers.  Knows no time and no names.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.sequence import Status, StepWork


@dataclass(slots=True)
class Stats:
    """Written by the step loop alone.  The key None is the base model."""

    steps: int = 0
    prompt_tokens: int = 0  # rows of prompts computed; what a prefix hit saves is not in it
    generated_tokens: int = 0
    generated_by_rev: Counter[str | None] = field(default_factory=Counter)

    def note(self, work: StepWork) -> None:
        """One step has run and is about to be settled.

        Rows of sequences that ended while it was under way were computed for nobody.
        """
        self.steps += 1
        for chunk in work.chunks:
            end = min(chunk.start + chunk.length, chunk.seq.num_prompt)
            self.prompt_tokens += max(end - chunk.start, 0)
            ended = chunk.seq.status is Status.FINISHED or chunk.seq.doom is not None
            if chunk.samples and not ended:
                self.generated_tokens += 1
                self.generated_by_rev[chunk.seq.rev] += 1

    def keep(self, revs: Iterable[str]) -> None:
        """Forget the counts of revisions that are not among `revs`."""
        known = {None, *revs}
        for rev in [r for r in self.generated_by_rev if r not in known]:
            del self.generated_by_rev[rev]
