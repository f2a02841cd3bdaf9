"""What a test defines within itself is used there: one scenario was written and never played."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[2]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def idle(source: str) -> list[str]:
    """Functions within a module's functions that nobody names there; methods, and what is
    decorated, others call."""
    found = []
    for outer in ast.parse(source).body:
        if isinstance(outer, FUNCTION):
            inside = [node for node in ast.walk(outer) if node is not outer]
            classes = [node for node in inside if isinstance(node, ast.ClassDef)]
            methods = {id(member) for one in classes for member in one.body}
            named = {node.id for node in inside if isinstance(node, ast.Name)}
            functions = [node for node in inside if isinstance(node, FUNCTION)]
            found += [
                f"{outer.name}: {node.name}"
                for node in functions
                if not (node.name in named or node.decorator_list or id(node) in methods)
            ]
    return found


def test_every_scenario_is_played() -> None:
    files = sorted(TESTS.rglob("*.py"))
    assert len(files) > 100
    found = {str(file.relative_to(TESTS)): idle(file.read_text()) for file in files}
    assert not {name: functions for name, functions in found.items() if functions}


def test_one_that_is_not_is_seen() -> None:
    written = "def test_it(world):\n    async def scenario(w):\n        assert w\n"
    assert idle(written) == ["test_it: scenario"]
    assert idle(f"{written}    world(scenario)\n") == []
