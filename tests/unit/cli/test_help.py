"""The lists of commands that --help prints, in a terminal of 80 columns."""

from collections.abc import Iterator

import pytest
import typer.main
from click import Command, Group

from lorad.cli.app import app as loractl
from lorad.cli.serve import app as lorad

#: What click leaves of 80 columns beside the longest name of a list.
ROOM = 78 - 6


def groups(command: Command) -> Iterator[Group]:
    if isinstance(command, Group):
        yield command
        for below in command.commands.values():
            yield from groups(below)


@pytest.mark.parametrize("app", [loractl, lorad], ids=["loractl", "lorad"])
def test_what_a_command_does_is_never_cut_short(app: typer.Typer) -> None:
    for group in groups(typer.main.get_command(app)):
        room = ROOM - max(map(len, group.commands))
        cut = {
            name: said
            for name, command in group.commands.items()
            if (said := command.get_short_help_str(room)).endswith("...")
        }
        assert cut == {}
