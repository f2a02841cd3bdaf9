"""Settling: what a sampled token means for its sequence, and how that is told.

Goes in: a sequence and what was drawn for it.  Comes out: whether it ends, and its SequenceDelta.
Knows nothing of memory or queues: the scheduler releases what ends here.
"""

from engine.admission import SchedulerLimits
from engine.messages import FinishReason, SequenceDelta, TokenLogprobs
from engine.sequence import Sampled, Sequence


def append(seq: Sequence, drawn: Sampled, limits: SchedulerLimits) -> SequenceDelta:
    """Take what was drawn in (unless no token was asked for), up to one that ends the sequence."""
    if drawn.more:
        return _append_all(seq, (drawn, *drawn.more), limits)
    asked = seq.sampling.max_tokens > 0
    if asked:
        seq.tokens.append(drawn.token)
    return tell(
        seq,
        tokens=(drawn.token,) if asked else (),
        logprobs=(drawn.logprobs,) if asked and drawn.logprobs else (),
        prompt_logprobs=drawn.prompt_logprobs,
        reason=finish_reason(seq, drawn.token, limits),
    )


def _append_all(
    seq: Sequence, draws: tuple[Sampled, ...], limits: SchedulerLimits
) -> SequenceDelta:
    before, reason = len(seq.tokens), None
    for drawn in draws:
        seq.tokens.append(drawn.token)
        reason = finish_reason(seq, drawn.token, limits)
        if reason is not None:
            break
    told = draws[: len(seq.tokens) - before]
    return tell(
        seq,
        tokens=tuple(drawn.token for drawn in told),
        logprobs=tuple(drawn.logprobs for drawn in told if drawn.logprobs),
        reason=reason,
    )


def finish_reason(seq: Sequence, token: int, limits: SchedulerLimits) -> FinishReason | None:
    """Stop tokens count from `min_tokens` on; the stopping token is part of the output."""
    params, generated = seq.sampling, seq.num_generated
    ends = token in params.stop_token_ids or (
        token in limits.eos_token_ids and not params.ignore_eos
    )
    if ends and generated > params.min_tokens:
        return "stop"
    if len(seq.tokens) >= seq.longest:
        return "length"
    return None


def tell(
    seq: Sequence,
    *,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
    reason: FinishReason | None = None,
    code: str = "",
    message: str = "",
) -> SequenceDelta:
    """The next delta of `seq`; the first one says how much of the prompt was cached."""
    first, seq.told = not seq.told, True
    return SequenceDelta(
        request_id=seq.request_id,
        tokens=tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs if first else (),
        cached_tokens=(seq.cached_tokens or 0) if first else None,
        queued_seconds=seq.queued_seconds if first else None,
        finish_reason=reason,
        code=code,
        message=message,
    )
