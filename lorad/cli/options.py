"""The options that every `loractl` command understands, before or after the command.

Goes in: argv.  Comes out: the global options apart from the rest, and an `Options` for the
commands.  Knows no command.
"""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

Output = Literal["table", "wide", "json", "jsonl", "name"]
OUTPUTS: tuple[str, ...] = ("table", "wide", "json", "jsonl", "name")

_FLAGS = frozenset(
    ("--json", "--no-headers", "-q", "--quiet", "-v", "--verbose", "--no-color", "--no-input")
) | frozenset(("-y", "--yes", "-V", "--version"))
_VALUED = frozenset(("-H", "--host", "-o", "--output", "--timeout"))
#: `-qy`, and `-ojson` with its value attached.
_JOINED = re.compile(r"-[qvyV]{2,}|-[Ho].+")


@dataclass(frozen=True, slots=True)
class Options:
    """Global options as the commands see them.  `timeout` is seconds, None = the command's own."""

    host: str | None = None
    output: Output = "table"
    headers: bool = True
    quiet: bool = False
    verbose: bool = False
    timeout: float | None = None
    interactive: bool = True  # may ask: stdin is a terminal and --no-input was not given
    yes: bool = False

    @property
    def machine(self) -> bool:
        """True when stdout is read by a program."""
        return self.output in ("json", "jsonl")


def hoist(argv: list[str], takes_value: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """(global options, all the rest), each in order; everything after `--` is rest.

    `takes_value`: options of commands whose next word is their value, whatever it looks like.
    """
    front: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in takes_value:
            rest += [word, *_next(words)]
        elif word in _FLAGS or _JOINED.fullmatch(word):
            front.append(word)
        elif word in _VALUED:
            front += [word, *_next(words)]
        elif word.startswith("--") and word.split("=", 1)[0] in _VALUED:
            front.append(word)
        else:
            rest.append(word)
    return front, rest


def _next(words: Iterator[str]) -> list[str]:
    return [value for value in (next(words, None),) if value is not None]


def asks_json(front: list[str], env: Mapping[str, str]) -> bool:
    """Are errors wanted as JSON?  For when the command line could not be parsed, too."""
    chosen = env.get("LORAD_OUTPUT", "")
    for place, word in enumerate(front):
        if word == "--json":
            return True
        if word in ("-o", "--output"):
            chosen = "".join(front[place + 1 : place + 2])
        elif word.startswith("-o"):
            chosen = word[2:]
        elif word.startswith("--output="):
            chosen = word.partition("=")[2]
    return chosen in ("json", "jsonl")


def output_format(chosen: str | None, json: bool) -> Output:
    """`--json` is short for `-o json`; the environment may set another default."""
    word = "json" if json else chosen or os.environ.get("LORAD_OUTPUT") or "table"
    if word not in OUTPUTS:
        raise ValueError(f"unknown output {word!r}: choose one of {', '.join(OUTPUTS)}")
    return cast(Output, word)


def seconds(text: str) -> float:
    """`30`, `30s`, `1.5m`, `2h`, `250ms` as seconds; ValueError otherwise."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", text, re.ASCII)
    if match is None or (value := float(match[1]) * units[match[2]]) >= 1e9:
        raise ValueError(f"{text!r} is not a duration; write 30s, 2m or 1h")
    return value


def may_ask() -> bool:
    """Both ends are terminals: a question would be seen and could be answered."""
    return all(end is not None and end.isatty() for end in (sys.stdin, sys.stderr))
