"""The reference pages, made from the code they describe: `python docs/generate.py` writes them.

Goes in: the settings' Structs, the commands' Typer apps, the tables of codes, and `words.toml` for
what only words can say.  Comes out: the pages of `docs/reference/`.  KeyError if a key or code has
no sentence, or a sentence no key.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import typer

from engine import histogram
from engine.adapters import reasons
from lorad import config_sections, config_sources, config_values, errors, event_types
from lorad.cli import app as loractl
from lorad.cli import serve as lorad
from lorad.metrics.metric import OTHER, Metric
from lorad.metrics.table import METRICS, OF_ENGINES

HERE = Path(__file__).resolve().parent
WORDS = tomllib.loads((HERE / "words.toml").read_text(encoding="utf-8"))

#: name of the page -> what makes it
PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": lambda: configuration(),
    "cli.md": lambda: commands(),
    "errors.md": lambda: codes(),
    "events.md": lambda: events(),
    "reason-codes.md": reasons.as_markdown,
    "metrics.md": lambda: metrics(),
}


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (HERE / "reference" / name).write_text(make(), encoding="utf-8")


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    heads = list(headings)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def matched(words: Mapping[str, str], known: Iterable[str], what: str) -> Mapping[str, str]:
    """`words`, if there is one for each of `known` and none besides."""
    different = set(words) ^ set(known)
    if different:
        raise KeyError(f"docs/words.toml, {what}: {', '.join(sorted(different))}")
    return words


# ----------------------------------------------------------------- events.md
def events() -> str:
    rows = ((f"`{name}`", words) for name, words in event_types.TYPES.items())
    return (
        "# Events\n\nWhat `loractl events` and `GET /admin/v1/events` tell of. `--type` takes the"
        " beginning of a type.\n\n" + table(("Type", "What happened"), rows) + "\n"
    )


# ----------------------------------------------------------------- configuration.md
def configuration() -> str:
    sections = {"models": config_sections.Model, **config_sections.SECTIONS}
    matched(WORDS["configuration"], sections, "sections")
    parts = [_CONFIGURATION]
    for name, kind in sections.items():
        fields = msgspec.structs.fields(kind)
        words = matched(WORDS["configuration"][name], (f.name for f in fields), name)
        heading = "[[models]]" if name == "models" else f"[{name}]"
        hints = config_values.hints(kind)
        rows = (
            (
                f"`{f.name}`",
                type_name(hints[f.name]),
                f"`{config_sources.spelled(hints[f.name], f.default)}`",
                words[f.name],
                f"`LORAD_{name.upper()}__{f.name.upper()}`",
            )
            for f in fields
        )
        body = table(("key", "type", "default", "meaning", "environment"), rows)
        parts.append(f"## {heading}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def type_name(hint: Any) -> str:
    """`size`, `duration`, `a or b`, `list of int`, `text` ..."""
    marks = get_args(hint)[1:] if hasattr(hint, "__metadata__") else ()
    if marks:
        return " or ".join(marks)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {type_name(get_args(hint)[0])}"
    return {str: "text", bool: "true or false", int: "number", float: "number"}[hint]


_CONFIGURATION = """# Configuration

Made by `python docs/generate.py` from `lorad/config_sections.py`.

Later ones win: the default, `lorad.toml` in the configuration directory (`/etc/lorad`, or
`~/.config/lorad`), `conf.d/*.toml` beside it in the order of their names, the file of `--config` or
`LORAD_CONFIG`, the environment, flags. An unknown key ends the start with the nearest name.
`lorad --print-config` shows every value with where it came from; `lorad --check` only checks.

Sizes are `"16GiB"`, `"500MB"` or a number of bytes; durations `"250ms"`, `"2s"`, `"10m"` or a
number of seconds. In the environment a list is written `a,b`. Of several `[[models]]` the variables
below are the first one's; `LORAD_MODELS__1__NAME` is the second's. `[lora]` holds for each of their
engines by itself. SIGHUP rereads `log.level`, looks
through the inbox, and says in the log what else has changed and needs a restart; a file that is
wrong changes nothing."""


# ----------------------------------------------------------------- cli.md
def commands() -> str:
    parts = [_COMMANDS]
    for name, app in (("loractl", loractl.app), ("lorad", lorad.app)):
        root: Any = typer.main.get_command(app)
        parts.append(command(name, root, "##"))
        shown = {word: sub for word, sub in root.commands.items() if not sub.hidden}
        for word, sub in shown.items():
            parts.append(command(f"{name} {word}", sub, "###"))
            for inner, last in getattr(sub, "commands", {}).items():
                parts.append(command(f"{name} {word} {inner}", last, "####"))
    return "\n\n".join(parts) + "\n"


def command(name: str, parsed: Any, level: str) -> str:
    """Usage, what it does, and its options."""
    context = typer.Context(parsed, info_name=name, terminal_width=1000)
    pieces = " ".join(parsed.collect_usage_pieces(context))
    text = " ".join((parsed.help or "").split())
    rows = [
        (spelling(p), described(p))
        for p in parsed.get_params(context)
        if p.param_type_name == "option" and "--help" not in p.opts
    ]
    options = "\n\n" + table(("option", "meaning"), rows) if rows else ""
    return f"{level} {name}\n\n```\n{name} {pieces}\n```\n\n{text}{options}"


def spelling(option: Any) -> str:
    """`-o`, `--output FORM`"""
    words = [f"`{word}`" for word in (*sorted(option.opts, key=len), *option.secondary_opts)]
    if not option.is_flag:
        value = option.metavar or option.name.upper().replace("_", "-")
        words[-1] = f"{words[-1][:-1]} {value}`"
    return ", ".join(words)


def described(option: Any) -> str:
    """Its help, bounds, default and environment variable."""
    text = option.help or ""
    kind = option.type_descriptor if hasattr(option, "type_descriptor") else None
    bounds = getattr(kind, "parameter_info", None)
    low, high = getattr(bounds, "min", None), getattr(bounds, "max", None)
    if low is not None:
        text += f" {low:g} or more." if high is None else f" {low:g} to {high:g}."
    if option.default not in (None, "") and not isinstance(option.default, bool):
        text += f" Default: {option.default}."
    if option.default is True and option.secondary_opts:
        text += f" Default: {option.opts[0]}."
    if option.envvar:
        text += f" Environment: `{option.envvar}`."
    return text.strip()


_COMMANDS = """# Commands

Made by `python docs/generate.py` from the commands themselves. Exit statuses are in
[errors](errors.md).

`loractl` operates a running daemon; its own options may stand before or after the command. Results
go to stdout, all else to stderr. `lorad` is the daemon."""


# ----------------------------------------------------------------- errors.md
def codes() -> str:
    words = matched(WORDS["errors"], errors.TABLE, "errors")
    rows = (
        (
            f"`{code}`",
            str(meaning.status),
            str(meaning.exit),
            "yes" if meaning.retryable else "",
            words[code],
        )
        for code, meaning in errors.TABLE.items()
    )
    api = table(("code", "HTTP", "exit", "retry", "meaning"), rows)
    told = matched(WORDS["own"], loractl.OWN_EXITS, "own")
    mine = ((f"`{code}`", str(status), told[code]) for code, status in loractl.OWN_EXITS.items())
    own = table(("code", "exit", "meaning"), mine)
    starts = sorted(errors.StartError.__subclasses__(), key=lambda kind: kind.exit)
    tree = errors.__doc__ or ""
    ends = ((str(kind.exit), sentence(tree, kind.__name__)) for kind in starts)
    return _ERRORS.format(api=api, own=own, starts=table(("exit", "meaning"), ends))


def sentence(tree: str, name: str) -> str:
    """What the error tree in the module's docstring says of a class."""
    line = next(line for line in tree.splitlines() if f" {name} " in line)
    return line.partition(name)[2].strip().partition("   ")[2].strip() + "."


_ERRORS = """# Errors

Made by `python docs/generate.py` from `lorad/errors.py`.

Every refusal on both sockets is `{{"error": {{"message", "type", "param", "code", "details"}}}}`,
the shape that OpenAI's clients know. `retry`: the same request may succeed later, unchanged; where
it is worth waiting, `Retry-After` says how long. `exit` is what `loractl` ends with for one name;
when some of several names fail it is 1.

{api}

## What loractl says by itself

{own}

130 and 141 (the reader of a pipe left) are silent or one line. With `--json` an error is one JSON
object on stderr: `{{"error": {{"code", "message", "why", "hint", "details"}}}}`.

## How lorad ends

0 after a drain, 1 for a crash, and when it cannot start, with one line on stderr and a next step:

{starts}
"""


# ----------------------------------------------------------------- metrics.md
def metrics() -> str:
    groups = dict.fromkeys(metric.group for metric in METRICS)
    parts = [_METRICS]
    for group in groups:
        rows = (
            (
                f"`{m.name}`",
                m.type,
                labels_of(m),
                m.help + (f" Bounds: {bounds(m.bounds)}." if m.bounds else ""),
            )
            for m in METRICS
            if m.group == group
        )
        parts.append(f"## {group}\n\n{table(('name', 'type', 'labels', 'meaning'), rows)}")
    return "\n\n".join(parts) + "\n"


def bounds(values: tuple[float, ...]) -> str:
    """As few words as they allow: those of one scale are named by it."""
    known = {
        histogram.SECONDS: "seconds",
        histogram.LOAD_SECONDS: "load seconds",
        histogram.TOKENS: "tokens",
        histogram.ADAPTERS: "adapters",
        histogram.BYTES: "bytes",
    }
    return known[values]


def spelled(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" if value < 1e6 else str(int(value)) for value in values)


def labels_of(metric: Metric) -> str:
    """With the one that is there only where several models are."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    if "adapter" not in metric.labels and metric.name not in OF_ENGINES:
        return labels
    return f"{labels} and `model`" if labels else "and `model`"


_METRICS = f"""# Metrics

Made by `python docs/generate.py` from `lorad/metrics/table.py`. How to scrape them is in
[how to](../howto/metrics.md).

`GET /metrics` on the admin socket, and on `metrics.tcp` if that is set, answers in Prometheus' text
format, or in OpenMetrics where the `Accept` header asks for it. `loractl metrics` prints the same.
Beside these there are `process_*` of the daemon's own process.

- **`adapter`** is the name that requests use. At most `metrics.adapter_labels` adapters have one of
  their own: pinned ones first, then resident ones, then the most used. All others are summed up as
  `{OTHER}`, and the base model is `__base__`. What an adapter counted while it had no
  label stays with `{OTHER}`, so that every series only grows and sums of rates are
  right. The series of a removed adapter go away.
- **`model`**, where several are served: beside each `adapter`, also `{OTHER}`, and on what is of
  one engine ("and `model`" below). The base models are then told apart by it. One model alone has
  no such label.
- **Histograms** have no adapter, but `kind`: `base` or `lora`.
- **Counters** start at 0 with the daemon, and go on when the engine is restarted.
- No label comes from the text of a request. There is no tenant label unless `metrics.tenant_label`
  is set.

Bounds of histograms: seconds {spelled(histogram.SECONDS)}; load seconds
{spelled(histogram.LOAD_SECONDS)}; tokens {spelled(histogram.TOKENS)}; adapters
{spelled(histogram.ADAPTERS)}; bytes {spelled(histogram.BYTES)}."""


if __name__ == "__main__":
    main()
