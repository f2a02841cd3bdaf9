"""Regular expressions from foreign files, matched in bounded time.

PEFT's rank_pattern and alpha_pattern keys, and a target_modules string, are Python regexes.  The
`re` module backtracks: `(a+)+$` on forty characters runs for hours.  Here the pattern is read by
Python's own parser, so that the meaning is Python's, and is then matched by walking all its states
at once, which is linear in the name.  Whether a match exists does not depend on greediness, and
nothing else is asked.

Goes in: pattern texts and names.  Comes out: whether they match, or PatternRefused for syntax
errors, for features without such a walk (backreferences, lookaround, flags), and for work beyond
the budget.  Knows nothing of adapters.
"""

import importlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Generic, TypeVar

# There is no public door to the parser; the module has kept this name since Python 3.11.
_parser: Any = importlib.import_module("re._parser")

MAX_PATTERN_CHARS = 1024
MAX_TARGET_CHARS = 8192  # unsloth writes target_modules strings of about 1,000
MAX_KEYS = 2048  # a pattern a module of an 80-layer model needs 560
MAX_STATES = 4096
#: States visited in one inspection, at most about a second.  A regex for each of 80 layers, met by
#: all 560 modules, takes 450,000.
MAX_VISITS = 1_500_000

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")

V = TypeVar("V")
_Test = Callable[[str], bool]
_Key = tuple[frozenset[int], bool | None, str | None]


class PatternRefused(ValueError):
    """The pattern cannot be matched safely; the text says why, without the pattern itself."""


class Budget:
    """Work left for one inspection, shared by all its patterns."""

    def __init__(self, visits: int = MAX_VISITS) -> None:
        self.left = visits

    def spend(self, visits: int) -> None:
        """Raise PatternRefused once more was spent than there was."""
        self.left -= visits
        if self.left < 0:
            raise PatternRefused("the patterns need too much work to match")


class Pattern:
    """One regex.  `starts` answers as `re.match` would, `covers` as `re.fullmatch`."""

    def __init__(self, text: str, budget: Budget) -> None:
        self._budget = budget
        budget.spend(20 * len(text))  # parsing costs about as much as twenty visits a character
        try:
            tree = _parser.parse(text)
            if tree.state.flags & ~re.UNICODE:
                raise PatternRefused("inline flags are not supported")
            self._program = _Program()
            self._program.sequence(tree)
            self._program.add("match")
        except (re.error, OverflowError, FutureWarning) as error:
            raise PatternRefused(f"not a valid regular expression: {error}") from None
        except RecursionError:
            raise PatternRefused("nested too deeply") from None
        budget.spend(len(self._program.code))
        self._moves: dict[_Key, tuple[bool, frozenset[int]]] = {}

    def starts(self, name: str) -> bool:
        """Whether the pattern matches at the start of `name`."""
        return self._walk(name, whole=False)

    def covers(self, name: str) -> bool:
        """Whether the pattern matches all of `name`."""
        return self._walk(name, whole=True)

    def _walk(self, name: str, *, whole: bool) -> bool:
        self._budget.spend(1 + len(name) // 4)  # a remembered move costs a quarter of a visit
        states = frozenset((0,))
        before: str | None = None
        for char in (*name, None):
            key = (states, None if before is None else _is_word(before), char)
            move = self._moves.get(key)
            if move is None:
                move = self._moves[key] = self._move(states, before, char)
            matched, states = move
            if matched and (char is None or not whole):
                return True
            if not states:
                return False
            before = char
        return False

    def _move(
        self, states: frozenset[int], before: str | None, char: str | None
    ) -> tuple[bool, frozenset[int]]:
        """Follow the empty edges between `before` and `char`, then read `char`."""
        code = self._program.code
        seen, todo, after = set(states), list(states), set()
        matched = False
        while todo:
            at = todo.pop()
            op, arg, target = code[at]
            reached: tuple[int, ...] = ()
            if op == "match":
                matched = True
            elif op == "split":
                reached = (at + 1, target)
            elif op == "jump":
                reached = (target,)
            elif op == "at":
                reached = (at + 1,) if arg(before, char) else ()
            elif char is not None and arg(char):
                after.add(at + 1)
            for state in reached:
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        self._budget.spend(len(seen))
        return matched, frozenset(after)


class PatternTable(Generic[V]):
    """PEFT's rule for rank_pattern and alpha_pattern: the first key, in file order, for which
    `re.match(rf"(.*\\.)?({key})$", name)` holds gives the value."""

    def __init__(self, pairs: Iterable[tuple[str, V]], budget: Budget) -> None:
        self._rows: list[tuple[str, Pattern | None, V]] = []
        for key, value in pairs:
            if len(self._rows) == MAX_KEYS:
                raise PatternRefused(f"more than {MAX_KEYS} patterns")
            if len(key) > MAX_PATTERN_CHARS:
                raise PatternRefused(f"a pattern is longer than {MAX_PATTERN_CHARS} characters")
            plain = _PLAIN.fullmatch(key) is not None
            pattern = None if plain else Pattern(rf"(.*\.)?({key})$", budget)
            self._rows.append((key, pattern, value))

    def get(self, name: str) -> V | None:
        """The value for the module `name`, None if no key matches."""
        for key, pattern, value in self._rows:
            if _plain_match(key, name) if pattern is None else pattern.starts(name):
                return value
        return None


def _plain_match(key: str, name: str) -> bool:
    """The table's rule for a key of word characters and dots, where a dot matches anything."""
    if not name.endswith(key.rpartition(".")[2]):
        return False
    start = len(name) - len(key)
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return False
    return all(k in (".", n) for k, n in zip(key, name[start:], strict=True))


class _Program:
    """A pattern as a list of (op, argument, target); the machine of Thompson's 1968 paper."""

    def __init__(self) -> None:
        self.code: list[tuple[str, Any, int]] = []

    def add(self, op: str, arg: Any = None, target: int = 0) -> int:
        """Append one instruction and return its place; PatternRefused when the program is full."""
        if len(self.code) >= MAX_STATES:
            raise PatternRefused(f"the pattern unfolds to more than {MAX_STATES} states")
        self.code.append((op, arg, target))
        return len(self.code) - 1

    def patch(self, place: int) -> None:
        """Let the instruction at `place` lead to the next one to be added."""
        op, arg, _ = self.code[place]
        self.code[place] = (op, arg, len(self.code))

    def sequence(self, items: Iterable[tuple[Any, Any]]) -> None:
        """Compile the parser's (op, argument) pairs one after another."""
        for op, arg in items:
            self._item(str(op), arg)

    def _item(self, op: str, arg: Any) -> None:
        if op == "SUBPATTERN":
            _, flags_on, flags_off, body = arg
            if flags_on or flags_off:
                raise PatternRefused("inline flags are not supported")
            self.sequence(body)
        elif op == "BRANCH":
            self._branch(arg[1])
        elif op in ("MAX_REPEAT", "MIN_REPEAT"):
            self._repeat(*arg)
        elif op == "AT":
            self.add("at", _ASSERTIONS[str(arg)])
        elif op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            self.add("char", _char_test(op, arg))
        else:
            raise PatternRefused(f"{op.lower().replace('_', ' ')} is not supported")

    def _branch(self, choices: list[Any]) -> None:
        ends = []
        for choice in choices[:-1]:
            split = self.add("split")
            self.sequence(choice)
            ends.append(self.add("jump"))
            self.patch(split)
        self.sequence(choices[-1])
        for end in ends:
            self.patch(end)

    def _repeat(self, least: int, most: Any, body: Any) -> None:
        for _ in range(least):
            before = len(self.code)
            self.sequence(body)
            if len(self.code) == before:
                break  # an empty body: repeating it changes nothing
        if most is _parser.MAXREPEAT:
            split = self.add("split")
            self.sequence(body)
            self.add("jump", target=split)
            self.patch(split)
            return
        splits = []
        for _ in range(most - least):
            splits.append(self.add("split"))
            self.sequence(body)
        for split in splits:
            self.patch(split)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _word_at(char: str | None) -> bool:
    return char is not None and _is_word(char)


_ASSERTIONS: dict[str, Callable[[str | None, str | None], bool]] = {
    "AT_BEGINNING": lambda before, after: before is None,
    "AT_BEGINNING_STRING": lambda before, after: before is None,
    "AT_END": lambda before, after: after is None,  # module names hold no newline
    "AT_END_STRING": lambda before, after: after is None,
    "AT_BOUNDARY": lambda before, after: _word_at(before) != _word_at(after),
    "AT_NON_BOUNDARY": lambda before, after: _word_at(before) == _word_at(after),
}

_CATEGORIES: dict[str, _Test] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda c: not c.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda c: not c.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda c: not _is_word(c),
}


def _char_test(op: str, arg: Any) -> _Test:
    if op == "ANY":
        return lambda c: c != "\n"
    if op == "LITERAL":
        wanted = chr(arg)
        return lambda c: c == wanted
    if op == "NOT_LITERAL":
        unwanted = chr(arg)
        return lambda c: c != unwanted
    if op == "RANGE":
        low, high = chr(arg[0]), chr(arg[1])
        return lambda c: low <= c <= high
    if op == "CATEGORY":
        return _CATEGORIES[str(arg)]
    tests = [_char_test(str(o), a) for o, a in arg if str(o) != "NEGATE"]
    negate = str(arg[0][0]) == "NEGATE"

    @cache  # a class may list a thousand characters, a name has few different ones
    def in_class(c: str) -> bool:
        return any(test(c) for test in tests) != negate

    return in_class
