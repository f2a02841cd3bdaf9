"""verify: is what serves what the stored files say?

Goes in: names.  Comes out: a line for each, and a line on stderr for everything that differs.
Knows the wire and nothing behind it.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from lorad import wire
from lorad.cli.complete import any_name
from lorad.cli.listing import short
from lorad.cli.output import UNKNOWN, Column, complain, human_bytes, one_line, print_items
from lorad.cli.session import Failed, Session, Usage, session

VERIFIED: Sequence[Column[wire.Verification]] = (
    Column("NAME", lambda v: v.name, shrinks=True),
    Column("RESULT", lambda v: "ok" if v.ok else v.code),
    Column("MODULES", lambda v: str(v.modules) if v.rev else UNKNOWN, right=True),
    Column("WORST", lambda v: f"{v.worst_error:.1e}" if v.rev else UNKNOWN, right=True),
    Column("WHERE", lambda v: v.worst_module or UNKNOWN, wide=True),
    Column("ROUNDING", lambda v: f"{v.tolerance:.1e}" if v.rev else UNKNOWN, wide=True),
    Column("BYTES", lambda v: human_bytes(v.bytes_checked) if v.rev else UNKNOWN, right=True),
    Column("ALSO", lambda v: ",".join(v.also) or UNKNOWN, drop=1),
    Column("DIFFER", lambda v: str(v.bytes_different) if v.rev else UNKNOWN, right=True),
    Column("REV", lambda v: short(v.rev)),
)


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("verify")(verify)


def verify(
    context: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", autocompletion=any_name)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every resident adapter.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Pack the stored files anew, too, and compare.")
    ] = False,
) -> None:
    """Hold adapters on the GPU against their stored files. Effect and bytes are compared."""
    if bool(names) == every:
        raise Usage("give a NAME, or --all" if not names else "give names or --all, not both")
    s = session(context)
    done = s.client.verify(*names or (), all=every, full=full, timeout_s=s.timeout(300.0))
    _report(s, done)


def _report(s: Session, done: wire.Verifications) -> None:
    """Print each result.  A lone failure is the command's; among several, exit 1."""
    items = done.items
    failed = [item for item in items if not item.ok]
    print_items(items, VERIFIED, s.options, document=done, name=lambda v: v.name)
    if not s.options.machine:
        for item in failed:
            for finding in item.findings:
                _complain_of(item.name, finding)
    if len(items) == 1 and failed:
        raise _failure(failed[0])
    if failed:
        message = f"{len(failed)} of {len(items)} failed; stdout says which"
        raise _failure(wire.Verification(name="", ok=False, code="partly_failed", message=message))


def _complain_of(name: str, finding: wire.VerifyFinding) -> None:
    where = "" if finding.layer is None else f" layer {finding.layer} {one_line(finding.module)}"
    complain(f"{one_line(name)}: {finding.what}{where}: {one_line(finding.message)}")


def _failure(item: wire.Verification) -> Failed:
    return Failed(
        wire.ItemResult(
            name=item.name, ok=False, code=item.code, message=item.message, hint=item.hint
        )
    )
