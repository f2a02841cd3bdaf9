"""What the demos print: lines, answers, claims that were checked, failures, and what to try next.

Goes in: what is to be said.  Comes out: stdout, and stderr for failures; DemoFailed where a claim
does not hold.  Asks no daemon.
"""

import os
import shutil
import sys
import textwrap
from pathlib import Path

from lorad.cli.output import one_line
from lorad.demo_stage import DemoFailed, Stage


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def show(name: str, text: str) -> None:
    """An answer beside whose it is."""
    width = max(40, min(100, shutil.get_terminal_size((100, 24)).columns)) - 16
    lines = textwrap.wrap(one_line(text), width) or ["(nothing)"]
    for line in lines[:4]:
        say(f"   {name:<10} | {line}")
        name = ""


def claim(holds: bool, text: str) -> None:
    """Print a claim that was checked; DemoFailed if it does not hold."""
    if not holds:
        raise DemoFailed(f"this should hold and does not: {text}")
    say(f"   ok  {text}")


def complain(failure: Exception, hint: str = "") -> None:
    """The failure on stderr, and what to do; its own next step goes first."""
    hint = getattr(failure, "hint", "") or hint
    print(f"error: {failure}" + (f"\n  try: {hint}" if hint else ""), file=sys.stderr)


def next_steps(here: Stage, name: str, prompt: str, keep: bool, demo: str = "demo") -> None:
    """What to try now: `name` is an adapter that answers, `demo` the command that was given."""
    lorad, activate = "lorad", ""
    if shutil.which("loractl") is None:  # run by `make`, or by its path
        scripts = os.path.relpath(Path(sys.executable).parent)
        lorad, activate = f"{scripts}/lorad", f"\n   . {scripts}/activate"
    if not keep:
        say(f"\nNext: `{lorad} {demo} --keep` leaves the daemon running, and prints what to try.")
        return
    admin, inference = here.admin_socket, here.inference_socket
    say(
        f"""
The daemon goes on (pid {here.pid}).  Try:
{activate}
   export LORAD_HOST=unix://{admin}
   loractl ps
   loractl run {name} "{prompt}"
   loractl top
   curl --unix-socket {inference} http://lorad/v1/models

Replace a folder below {here.inbox} and ask again.
End it with: kill {here.pid}    and remove {here.root}"""
    )
