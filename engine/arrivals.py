"""Arrivals: a request becomes a sequence, or is told at once why it never can be one.

Goes in: Submits.  Comes out: a Sequence that has its place in the order of arrival, or a Refusal.
Queues nothing, and holds nothing for anybody.
"""

from collections.abc import Callable

from engine.adapters.residency import Residency
from engine.admission import Refusal, SchedulerLimits, invoke, never_fits, refusal
from engine.memory.reclaim import Reclaimer
from engine.messages import SequenceDelta, Submit
from engine.sequence import PooledInput, Sequence


class Arrivals:
    """Of one scheduler, whose owners and clock it looks at."""

    def __init__(
        self,
        memory: Reclaimer,
        residency: Residency,
        limits: SchedulerLimits,
        clock: Callable[[], float],
    ) -> None:
        self._memory, self._residency = memory, residency
        self._limits, self._clock = limits, clock
        self._count = 0

    def sequence(self, submit: Submit, pooled: PooledInput | None) -> Sequence | Refusal:
        """What is to run of it."""
        ready = self._ready(submit)
        return ready if isinstance(ready, Refusal) else self._made(*ready, pooled)

    def _ready(self, submit: Submit) -> tuple[Submit, int] | Refusal:
        """What runs of a request, and from which row its adapter acts; or why it never can."""
        wrong = refusal(submit, self._limits, self._residency)
        invoked = wrong or invoke(submit, self._residency)
        if isinstance(invoked, Refusal):
            return invoked
        rev, length = invoked[0].rev, len(submit.prompt)
        return never_fits(length, rev, self._limits, self._memory, self._residency) or invoked

    def _made(self, submit: Submit, activation: int, pooled: PooledInput | None) -> Sequence:
        self._count += 1
        seconds, now = submit.deadline_seconds, self._clock()
        rev = submit.rev
        return Sequence(
            request_id=submit.request_id,
            tokens=list(submit.prompt),
            num_prompt=len(submit.prompt),
            sampling=submit.sampling,
            rev=submit.rev,
            identity=self._residency.identity(submit.rev),
            salt=submit.cache_salt,
            priority=submit.priority,
            order=self._count,
            activation=activation,
            num_tokens=0 if rev is None else self._residency.manifest(rev).num_tokens,
            tenant=submit.tenant,
            weight=submit.weight,
            longest=self._limits.longest(submit),
            deadline=None if seconds is None else now + seconds,
            arrived_at=now,
            pooled=pooled,
        )


def refused(request_id: str, code: str, message: str) -> SequenceDelta:
    """How a request ends that never was a sequence."""
    return SequenceDelta(
        request_id=request_id,
        cached_tokens=0,
        finish_reason="error",
        code=code,
        message=message,
    )
