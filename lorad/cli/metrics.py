"""metrics: what Prometheus would read, whole or in part.

Goes in: the daemon's exposition.  Comes out: its lines, or with -o json each sample as an object.
Knows the wire and nothing behind it.
"""

import re
from collections.abc import Iterator
from typing import Annotated

import typer

from lorad.cli.output import note, plain, print_document, print_line
from lorad.cli.session import Usage, session


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("metrics")(metrics)


def metrics(
    context: typer.Context,
    filter: Annotated[
        str,
        typer.Option(
            "--filter", metavar="RE", help="Only series whose name or labels this is found in."
        ),
    ] = "",
) -> None:
    """Print the daemon's metrics, as Prometheus reads them."""
    s = session(context)
    try:
        wanted = re.compile(filter)
    except re.error as error:
        raise Usage(f"--filter {filter!r}: {error}", hint="a regular expression") from None
    lines = list(kept(s.client.metrics(), wanted))
    if s.options.machine:
        print_document({"schema": "lorad/metrics.v1", "items": samples(lines)}, s.options)
        return
    for line in lines:
        print_line(plain(line))
    if not lines:
        note(f"no series has {filter!r} in its name or labels", s.options)


def kept(text: str, wanted: re.Pattern[str]) -> Iterator[str]:
    """Lines of series that match, each family's behind its HELP and TYPE."""
    head: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            head = [line] if line.startswith("# HELP") else [*head, line]
        elif wanted.search(line.rpartition(" ")[0]):
            yield from head
            head = []
            yield line


def samples(lines: list[str]) -> list[dict[str, object]]:
    """Each series with its labels and value; NaN and infinity, which JSON lacks, as text."""
    from prometheus_client.parser import text_string_to_metric_families

    found = (s for f in text_string_to_metric_families("\n".join(lines) + "\n") for s in f.samples)
    return [{"name": s.name, "labels": s.labels, "value": _number(s.value)} for s in found]


def _number(value: float) -> object:
    finite = value - value == 0.0
    return (int(value) if value.is_integer() else value) if finite else str(value)
