"""What one render of a chat template may use: time, characters, entries, digits.

Goes in: values as they are made, and operations before they are run.  Comes out: `Exceeded` when
they are more than a prompt can need.  Knows no Jinja.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

#: Characters, or list and dict entries, of one value and of the output.
MAX_VALUE = 8 * 1024 * 1024
#: Entries of one list, and numbers of one range (Jinja's own limit).
MAX_ITEMS = 1_000_000
MAX_RANGE = 100_000
#: Characters and entries that one render may produce in all, thrown away ones included.
MAX_PRODUCED = 64 * 1024 * 1024
#: Bits of an integer.
MAX_INT_BITS = 4096

CONTAINERS = (list, tuple, dict)

#: Four digits of width or precision, a width taken from an argument, a width that is a field.
_WIDE_FORMAT = re.compile(r"\d{4}|%[^%a-zA-Z]*\*|\{[^{}]*:[^{}]*\{")


class Exceeded(Exception):
    """A template asked for more time, room or rights than it gets; the message says which."""


class Budget:
    """What one render may still use.  Dies with it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = seconds
        self._deadline = clock() + seconds
        self._left = MAX_PRODUCED
        self._weights: dict[int, tuple[object, int]] = {}  # holds the object, so the id stays its

    def tick(self, produced: int = 0) -> None:
        """One more iteration or call.  Exceeded when time or room is used up."""
        if self._clock() > self._deadline:
            raise Exceeded(f"it runs longer than {self._seconds:g} s")
        self._left -= produced
        if self._left < 0:
            raise Exceeded("it makes too much text")

    def take(self, value: Any) -> Any:
        """Account for a value that was just made, and hand it on."""
        weight = self.weigh(value)
        need_room(weight)
        if isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
            raise Exceeded(f"it makes a list of more than {MAX_ITEMS} entries")
        # A list's entry is a pointer: as much memory as eight characters.
        self.tick(weight + 7 * len(value) if isinstance(value, CONTAINERS) else weight)
        return value

    def weigh(self, value: Any) -> int:
        """Characters and entries of a value, shared parts counted each time they would print."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            need_bits(value.bit_length())
            return 1
        if not isinstance(value, CONTAINERS):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        weight = 1 + len(parts)
        for part in parts:
            weight += self.weigh(part)
        self._weights[id(value)] = (value, weight)
        return weight


_current: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def limited(budget: Budget) -> Iterator[None]:
    """Render inside; each thread and task has its own."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Budget:
    """The budget of the render that this thread is in."""
    return _current.get()


# ----------------------------------------------------------------- measured before it is run
def need_room(size: int) -> None:
    """Refuse a value of `size` characters or entries before or after it is made."""
    if size > MAX_VALUE:
        raise Exceeded("it makes a value that is too large")


def need_bits(bits: int) -> None:
    """Refuse an integer of that many bits."""
    if bits > MAX_INT_BITS:
        raise Exceeded("it makes a number that is too large")


def need_product(left: Any, right: Any) -> None:
    """Before `left * right`, whichever of them is the count."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, *CONTAINERS)) and isinstance(times, int):
            need_room(current().weigh(value) * max(0, times))
    if isinstance(left, int) and isinstance(right, int):
        need_bits(left.bit_length() + right.bit_length())


def need_power(left: Any, right: Any) -> None:
    """Before `left ** right`."""
    if isinstance(left, int) and isinstance(right, int):
        need_bits(left.bit_length() * max(0, right))


def need_replace(text: str, old: str, new: str) -> None:
    """Before `text.replace(old, new)`."""
    need_room(len(text) + text.count(old) * len(new))


def need_format(text: str, *values: Any) -> None:
    """Before `%` or `format`: a field prints its value, padded to three digits of width at most."""
    if _WIDE_FORMAT.search(text):
        raise Exceeded("it formats with a width of more than three digits")
    fields = text.count("%") + text.count("{")
    need_room(len(text) + fields * (1000 + max(map(current().weigh, values), default=0)))


def need_parts(separator: str, values: Any) -> list[str]:
    """Before a join: its parts as text."""
    budget = current()
    parts = [str(budget.take(value)) for value in islice(values, MAX_ITEMS + 1)]
    need_room(sum(map(len, parts)) + len(separator) * len(parts))
    return parts
