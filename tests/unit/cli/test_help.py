"""The lists of commands that --help prints, in a terminal of 80 columns."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from lorad.cli.app import app as loractl
from lorad.cli.serve import app as lorad

#: What click leaves of 80 columns beside the longest name of a list.
ROOM = 78 - 6


def groups(command: Any) -> Iterator[Any]:
    if hasattr(command, "commands"):  # Typer's own copy of click has a Group of its own
        yield command
        for below in command.commands.values():
            yield from groups(below)


@pytest.mark.parametrize("app", [loractl, lorad], ids=["loractl", "lorad"])
def test_what_a_command_does_is_never_cut_short(app: typer.Typer) -> None:
    found = list(groups(typer.main.get_command(app)))
    assert len(found) > 1
    for group in found:
        room = ROOM - max(map(len, group.commands))
        cut = {
            name: said
            for name, command in group.commands.items()
            if (said := command.get_short_help_str(room)).endswith("...")
        }
        assert cut == {}
