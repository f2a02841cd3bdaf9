"""Text that a model writes → what it says, and which tools it calls.

Goes in: an answer's text, in pieces of any size, and the names of the request's tools.  Comes out:
`Said`s, as soon as they are certain: text, the beginning of a call, its arguments as they are
written.  How the text was cut makes no difference.  Two forms are read:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Hermes, Qwen: anywhere, any name
    {"name": "f", "parameters": {...}}                            Llama 3, and arrays of them: where
                                                                  an answer begins, known names only

What begins like a call and is none comes out as the text that it is.  Arguments are the model's own
words: nobody has checked that they are JSON.  Knows no request and no OpenAI.
"""

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: A vocabulary may have them as special tokens; with them left out nobody would see a call.
TAGS = (OPEN, CLOSE)
#: Characters in which a call has to say its name; what is longer is read at its end, or is text.
MAX_HEAD = 1024

_NAMED = r'[\s\[]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"'
_NAME = re.compile(_NAMED)
_HEAD = re.compile(_NAMED + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'[\s\[]*\{\s*"([^"\\]*)"')
_KEYS = ("name", "type", "function", "arguments", "parameters")
_BETWEEN = "];, \t\r\n"


class Said(NamedTuple):
    """Text, or a part of call number `call`; its first part has its name."""

    text: str = ""
    call: int = -1
    name: str = ""
    arguments: str = ""


class ToolCalls:
    """One answer.  `count`: calls that have begun."""

    def __init__(self, names: Collection[str]) -> None:
        self.count = 0
        self._names = frozenset(names)
        self._held = ""  # not yet certain
        self._gap = ""  # white space before an opening tag, which is text only if that is
        self._tagged = False  # the call that is read stands in tags
        self._value = _Value()
        self._out: list[Said] = []
        #: Takes from `_held` what is certain; True: `_state` may be another, which goes on.
        self._state: Callable[[], bool] = self._begin

    def push(self, text: str) -> list[Said]:
        """What is certain now."""
        self._held += text
        while self._held and self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Said]:
        """The rest: nothing follows."""
        held, self._held = self._held, ""
        if self._state == self._in_tags and not self._calls(held, None):
            self._say(self._gap + OPEN + held)
        if self._state == self._begin and not self._calls(held, self._names):
            self._say(held.rstrip() if self.count else held)
        if self._state == self._text:
            self._say(held.rstrip() if self.count else held)
        out, self._out = self._out, []
        return out

    # ----------------------------------------------------------------- states
    def _begin(self) -> bool:
        """Where a call without tags may stand."""
        start = self._held.lstrip()
        if not start:
            return False
        if start[0] in "{[" and self._could_be_call():
            return self._open(tagged=False)
        self._state = self._text
        return True

    def _could_be_call(self) -> bool:
        head = self._held[:MAX_HEAD]
        if name := _NAME.match(head):
            return name[1] in self._names
        if key := _FIRST_KEY.match(head):
            return key[1] in _KEYS
        return len(self._held) <= MAX_HEAD

    def _text(self) -> bool:
        before, found, after = self._held.partition(OPEN)
        if found:
            text = before.rstrip()
            self._say(text)
            self._gap = before[len(text) :]
            self._held, self._state = after, self._in_tags
            return True
        kept = next((n for n in range(len(OPEN) - 1, 0, -1) if before.endswith(OPEN[:n])), 0)
        certain = before[: len(before) - kept].rstrip()
        self._say(certain)
        self._held = before[len(certain) :]
        return False

    def _in_tags(self) -> bool:
        if self._open(tagged=True):
            return True
        whole, found, after = self._held.partition(CLOSE)
        if not found:
            return False
        if not self._calls(whole, None):
            self._say(self._gap + OPEN + whole + CLOSE)
        self._held, self._state = after, self._text
        return True

    def _arguments(self) -> bool:
        end = self._value.take(self._held)
        self._out.append(Said(call=self.count - 1, arguments=self._held[:end]))
        self._held = self._held[end:]
        if self._value.over:
            self._state = self._close
        return self._value.over

    def _close(self) -> bool:
        """Behind the arguments: a brace, and what ends a call."""
        rest = self._held.lstrip()
        rest = rest[1:].lstrip() if rest.startswith("}") else rest
        if not self._tagged:
            rest = rest.lstrip(_BETWEEN)
            if rest:
                self._held, self._state = rest, self._begin
            return bool(rest)
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        self._held, self._state = rest.removeprefix(CLOSE), self._text
        return True

    # ----------------------------------------------------------------- what they share
    def _open(self, *, tagged: bool) -> bool:
        """Begin a call, if all of its head is there."""
        head = _HEAD.match(self._held[:MAX_HEAD])
        if head is None:
            return False
        self._call(head[1], "")
        self._held = self._held[head.end() :]
        self._tagged, self._value, self._state = tagged, _Value(), self._arguments
        return True

    def _calls(self, text: str, names: Collection[str] | None) -> bool:
        """Calls that are all there; False if it is something else."""
        found = _whole(text)
        if names is not None and any(not args or name not in names for name, args in found):
            return False
        for name, arguments in found:
            self._call(name, arguments or "{}")
        return bool(found)

    def _call(self, name: str, arguments: str) -> None:
        self._out.append(Said(call=self.count, name=name, arguments=arguments))
        self.count += 1

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Said(text))


class _Value:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._quoted = self._escaped = False

    def take(self, text: str) -> int:
        """How many characters belong to it."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.over = True
                    return at + 1
        return len(text)


def _whole(text: str) -> list[tuple[str, str]]:
    """(name, arguments or "") of each call of a JSON object or array; [] if it is none."""
    try:
        value = msgspec.json.decode(text.strip(_BETWEEN.replace("]", "")).encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return []
    calls = [_one(item) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if None not in calls else []


def _one(item: Any) -> tuple[str, str] | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
        return None
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        return item["name"], arguments
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return item["name"], "" if arguments is None else msgspec.json.encode(arguments).decode()
