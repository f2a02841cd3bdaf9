"""The search of the sampling kernels: where top-k and top-p end among logits, without a sort.

Device functions, each done by one program over a list in memory that lies in the order of its ids.
What they find is exact but for the rounding of sums of weights; see `sample_reference`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from engine.kernels.sample_parts import from_ordered, ordered

#: `ordered(-inf)`, and steps of a search that may go by value.
_BOTTOM, _BY_VALUE = tl.constexpr(-2139095041), tl.constexpr(16)


@triton.jit
def load_part(values, start, count, TAKE: tl.constexpr):
    """Places and values of a list from `start` on; -inf beyond its end."""
    at = start + tl.arange(0, TAKE)
    x = tl.load(values + at, mask=at < count, other=float("-inf"))
    return at, x.to(tl.float32)


@triton.jit
def weigh_above(values, count, pivot, peak, heat, WEIGH: tl.constexpr, TAKE: tl.constexpr):
    """How many of the list are over `pivot`, and if WEIGH their weight: exp((x - peak) * heat)."""
    number = tl.zeros([TAKE], tl.int32)
    weight = tl.zeros([TAKE], tl.float32)
    for start in range(0, count, TAKE):
        _, x = load_part(values, start, count, TAKE)
        over = x > pivot
        number += over.to(tl.int32)
        if WEIGH:
            weight += tl.where(over, tl.exp((x - peak) * heat), 0.0)
    return tl.sum(number, 0), tl.sum(weight, 0)


@triton.jit
def _highest(values, count, limit, TAKE: tl.constexpr):
    """The largest of the list that is not over `limit`."""
    highest = tl.full([TAKE], float("-inf"), tl.float32)
    for start in range(0, count, TAKE):
        _, x = load_part(values, start, count, TAKE)
        highest = tl.where((x <= limit) & (x > highest), x, highest)
    return tl.max(highest, 0)


@triton.jit
def _between(low, high, step):
    """A key between: first by value, which is where logits lie; in the end by bits, which end."""
    middle = low + ((high - low) >> 1)
    from_low = from_ordered(tl.maximum(low, _BOTTOM).to(tl.int32))
    value = from_low * 0.5 + from_ordered(high.to(tl.int32)) * 0.5
    by_value = tl.minimum(tl.maximum(ordered(value).to(tl.int64), low + 1), high - 1)
    far = (high - low > 1 << 25) & (low > _BOTTOM) & (step < _BY_VALUE)
    return tl.where(far, by_value, middle)


@triton.jit
def _search(values, count, limit, low, high, peak, heat, WEIGH: tl.constexpr, TAKE: tl.constexpr):
    """The smallest key in (low, high] over which there are at most `limit`, and how many.

    With WEIGH: over which lies less weight than `limit`, and how much.  A single value that is left
    between the two ends the search: it is the one.
    """
    over = tl.full([], 0.0, tl.float32)
    over_low, over_high, step = count + 0, 0, 0
    while (high - low > 1) & (over_low - over_high != 1):
        middle = _between(low, high, step)
        pivot = from_ordered(middle.to(tl.int32))
        number, weight = weigh_above(values, count, pivot, peak, heat, WEIGH, TAKE)
        amount = weight if WEIGH else number.to(tl.float32)  # exact below 2^24
        fits = (amount < limit) if WEIGH else (amount <= limit)
        over = tl.where(fits, amount, over)
        high = tl.where(fits, middle, high)
        over_high = tl.where(fits, number, over_high)
        low = tl.where(fits, low, middle)
        over_low = tl.where(fits, over_low, number)
        if not WEIGH:
            low = tl.where(amount == limit, high - 1, low)  # exactly so many: no ties to part
        step += 1
    if high - low > 1:
        last = _highest(values, count, from_ordered(high.to(tl.int32)), TAKE)
        high = ordered(last).to(tl.int64)
    return high, over


@triton.jit
def _last_tie(values, count, bound, ties, TAKE: tl.constexpr):
    """The place of the last of the first `ties` that equal `bound`; -1 if there are none."""
    last = -1
    passed = 0
    for start in range(0, count, TAKE):
        at, x = load_part(values, start, count, TAKE)
        equal = ((x == bound) & (at < count)).to(tl.int32)
        rank = passed + tl.cumsum(equal, 0)
        last = tl.maximum(last, tl.max(tl.where((equal > 0) & (rank <= ties), at, -1), 0))
        passed += tl.sum(equal, 0)
    return last


@triton.jit
def bound_of_filters(values, count, limited, top_k, top_p, peak, heat, total, TAKE: tl.constexpr):
    """What top-k and top-p leave: values over the bound, and equal ones up to a place.

    If `limited` there is a k, and all that it leaves is in the list; else `total` is the row's
    whole weight.
    """
    top = ordered(peak).to(tl.int64)
    key = tl.full([], _BOTTOM, tl.int64)
    ties = tl.full([], 0.0, tl.float32)
    if limited & (top_k < count):
        limit = top_k.to(tl.float32)
        key, over = _search(values, count, limit, key, top, peak, heat, False, TAKE)
        ties = limit - over
    if top_p < 1.0:
        if limited:
            bound = from_ordered(key.to(tl.int32))
            _, over = weigh_above(values, count, bound, peak, heat, True, TAKE)
            total = over + ties * tl.exp((bound - peak) * heat)
        limit = top_p * total
        spent, over = _search(values, count, limit, key - 1, top, peak, heat, True, TAKE)
        weight = tl.exp((from_ordered(spent.to(tl.int32)) - peak) * heat)
        fitting = tl.ceil((limit - over) / tl.maximum(weight, 1e-30))
        fitting = tl.minimum(fitting, 16777216.0)
        ties = tl.where(spent == key, tl.minimum(ties, fitting), fitting)
        key = spent
    bound = from_ordered(key.to(tl.int32))
    place = -1
    if ties > 0:
        place = _last_tie(values, count, bound, ties.to(tl.int32), TAKE)
    return bound, place
