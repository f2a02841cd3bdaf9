"""Every refusal says what may be done about it: of the daemon by its code, of a start by itself."""

import ast
import re
from pathlib import Path

import pytest
import typer

from lorad.cli.app import app
from lorad.cli.next_steps import HINTS, next_step
from lorad.errors import TABLE

ROOT = Path(__file__).parents[3]
#: What ends a start, and what becomes one of those.
REFUSALS = {
    *("StartError", "BadConfig", "CannotBind", "RegistryUnusable", "NoUsableDevice", "LockHeld"),
    *("ConfigError", "NoDevice", "ModelUnsupported"),
}


def test_every_code_has_a_next_step_where_the_daemon_gives_none():
    assert set(HINTS) == set(TABLE)
    assert next_step("invalid_value", "loractl set") == "loractl set --help"
    assert next_step("other_version", "loractl ls") == "", "is no code of the daemon"


@pytest.mark.parametrize("code", sorted(HINTS))
def test_a_next_step_names_commands_that_there_are(code):
    root = typer.main.get_command(app)
    named = re.findall(r"loractl (\w+)", next_step(code, "loractl ls"))
    assert set(named) <= set(root.commands)


def test_every_refusal_of_a_start_has_a_next_step():
    """A range is one by itself: what must be so is said."""
    bare = []
    for path in (*ROOT.glob("lorad/**/*.py"), *ROOT.glob("engine/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", "")
            if name not in REFUSALS or any(each.arg == "hint" for each in node.keywords):
                continue
            if "must be" not in ast.unparse(node):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}")
    assert bare == []
