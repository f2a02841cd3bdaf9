"""A command line that cannot be: what both programs say of it, in one line, with the next step.

Goes in: what Typer raised.  Comes out: words.  Prints nothing, and knows no command.
"""

from typing import Any

import typer

#: Typer 0.29 brought its own copy of click, so the base is found from what Typer exports.
ClickException: Any = typer.BadParameter.__mro__[2]


def shows_help(error: BaseException) -> bool:
    """Is it no mistake but a group without a command, whose message is its help?"""
    return type(error).__name__ == "NoArgsIsHelpError"


def told(error: Any, program: str) -> tuple[str, str]:
    """Of a ClickException: the cause, and the help of the command that it was found in."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else program
    return error.format_message(), f"{command} --help"
