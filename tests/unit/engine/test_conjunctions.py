"""Which schemas and grammars put more expressions on one text than can be followed."""

import pytest

from engine.conjunctions import MOST, lark_is_too_much, schema_is_too_much

PATTERNS = [{"pattern": f"^(z|y.*a.{{{n}}}b.*)$"} for n in range(MOST + 1)]
CHAIN = {f"d{n}": {**one, "$ref": f"#/$defs/d{n + 1}"} for n, one in enumerate(PATTERNS)}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"properties": {"a": {"type": "integer"}, "b": {"allOf": PATTERNS}}},
        {"allOf": [{"properties": {"x": one}} for one in PATTERNS]},
        {"items": {"anyOf": [{"type": "null"}, {"allOf": PATTERNS}]}},
        {"$ref": "#/$defs/d0", "$defs": CHAIN},
        {"allOf": [{"oneOf": [{"const": 1}, one]} for one in PATTERNS]},
    ],
    ids=("all", "far", "merged", "one way", "chain", "ways"),
)
def test_too_many_patterns_on_one_value_are_found_wherever_they_hide(schema):
    assert schema_is_too_much(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": PATTERNS * 9},
        {"allOf": [{"properties": {f"p{n}": one}} for n, one in enumerate(PATTERNS)]},
        {"allOf": PATTERNS[:MOST]},
        {"allOf": [PATTERNS[0]] * 1 + [{"$ref": "#"}], "properties": {"again": {"$ref": "#"}}},
        {"$ref": "#/no/where"},
        {"allOf": 3, "properties": [], "items": True},
        7,
    ],
    ids=("ways", "others", "most", "itself", "nowhere", "odd", "number"),
)
def test_what_can_be_followed_or_cannot_be_read_is_let_by(schema):
    assert not schema_is_too_much(schema)


def test_a_schema_that_is_a_maze_is_too_much():
    maze = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    assert schema_is_too_much({"$ref": "#/$defs/d0", "$defs": maze})


def test_operators_of_a_grammar_are_counted_outside_of_its_texts():
    assert lark_is_too_much("start: T\nT: " + " & ".join(["/a/"] * (MOST + 2)))
    assert not lark_is_too_much('start: "&&&&&&&&&&&&" | /~~~~~~~~~~~~/ // & & & & & & & & & &')
