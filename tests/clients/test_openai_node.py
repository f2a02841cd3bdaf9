"""openai-node, with undici's way to a Unix socket, through both doors."""

import json

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def test_the_tour(door, given, node, check_tour):
    shown = {"LORAD_FORMAT": json.dumps(given.format), "LORAD_TOOL": json.dumps(given.tool)}
    check_tour(node("tour.mjs", door, **shown))


def test_retries_are_those_that_may_help_and_wait_as_told(steered_door, node, check_retries):
    check_retries(lambda: node("once.mjs", steered_door))


def test_a_stream_that_is_left_is_aborted(steered, steered_door, node):
    steered.api.hold_engine(4)
    assert node("once.mjs", steered_door, LORAD_LEAVE="1") is None
    steered.api.until(lambda: steered.api.engine.aborts)
