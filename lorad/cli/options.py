"""The options that every `loractl` command understands, before or after the command.

Goes in: argv.  Comes out: argv with the global options moved to the front, where the root command
parses them, and an `Options` for the commands.  Knows no command.
"""

import os
import sys
from dataclasses import dataclass
from typing import Literal, cast

Output = Literal["table", "wide", "json", "jsonl", "name"]
OUTPUTS: tuple[str, ...] = ("table", "wide", "json", "jsonl", "name")

_FLAGS = frozenset(
    ("--json", "--no-headers", "-q", "--quiet", "-v", "--verbose", "--no-color", "--no-input")
) | frozenset(("-y", "--yes", "-V", "--version"))
_VALUED = frozenset(("-H", "--host", "-o", "--output", "--timeout"))


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


def hoist(argv: list[str]) -> list[str]:
    """Move global options in front of the command; everything after `--` stays."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in _FLAGS:
            front.append(word)
        elif word in _VALUED:
            front += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.startswith("--") and word.split("=", 1)[0] in _VALUED:
            front.append(word)
        else:
            rest.append(word)
    return front + rest


def output_format(chosen: str | None, json: bool) -> Output:
    """`--json` is short for `-o json`; the environment may set another default."""
    word = "json" if json else chosen or os.environ.get("LORAD_OUTPUT") or "table"
    if word not in OUTPUTS:
        raise ValueError(f"unknown output {word!r}: choose one of {', '.join(OUTPUTS)}")
    return cast(Output, word)


def seconds(text: str) -> float:
    """`30`, `30s`, `1.5m`, `2h`, `250ms` as seconds; ValueError otherwise."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    for unit in sorted(units, key=len, reverse=True):
        if text.endswith(unit):
            number, scale = text[: -len(unit)], units[unit]
            break
    else:
        number, scale = text, 1.0
    try:
        value = float(number) * scale
    except ValueError:
        raise ValueError(f"{text!r} is not a duration; write 30s, 2m or 1h") from None
    if not 0 <= value < 1e9:
        raise ValueError(f"{text!r} is not a duration; write 30s, 2m or 1h")
    return value


def may_ask() -> bool:
    """Both ends are terminals: a question would be seen and could be answered."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
