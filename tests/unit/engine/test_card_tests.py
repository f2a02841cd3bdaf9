"""Which tests of a card run where there is none."""

from types import SimpleNamespace

import pytest
import torch

from tests.fakes import card_tests


@pytest.mark.parametrize(
    ("marked", "asked", "card", "runs"),
    [
        (True, "not late", False, False),
        (True, "", False, False),
        (True, "gpu", False, True),
        (True, "", True, True),
        (False, "", False, True),
    ],
)
def test_a_card_is_needed_by_its_own_tests_unless_they_are_asked_for_by_name(
    monkeypatch, marked, asked, card, runs
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    config = SimpleNamespace(option=SimpleNamespace(markexpr=asked))
    item = SimpleNamespace(get_closest_marker=lambda name: marked or None, config=config)
    if runs:
        card_tests.leave_out(item)
    else:
        with pytest.raises(pytest.skip.Exception, match="there is no card"):
            card_tests.leave_out(item)
