"""Settings of an engine that contradict each other are refused when they are made."""

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"speculation": "draft"},
            "speculation = 'draft': draft_model names no model that drafts",
        ),
        (
            {"speculation": "ngram", "draft_model": "m"},
            "draft_model = 'm': speculation = 'ngram' has no use for it",
        ),
        (
            {"draft_model": "m"},
            "draft_model = 'm': speculation = 'off' has no use for it",
        ),
        ({"speculation": "medusa"}, "speculation = 'medusa': heads that draft are not served"),
        ({"speculation": "mtp"}, "speculation = 'mtp': heads that draft are not served"),
        ({"speculation": "eagle3"}, "speculation = 'eagle3': heads that draft are not served"),
        ({"speculation": "EAGLE"}, "speculation = 'EAGLE': heads that draft are not served"),
        ({"speculation": "on"}, "speculation = 'on': there is no such kind of drafts"),
        ({"speculation_tokens": 0}, "speculation_tokens = 0: must be 1 to 8"),
        ({"speculation_tokens": 9}, "speculation_tokens = 9: must be 1 to 8"),
        (
            {"speculation": "ngram", "mixed_tokens": 1},
            "mixed_tokens = 1 leaves no row for a draft beside the token itself",
        ),
        (
            {"speculation": "ngram", "max_batch_tokens": 1, "max_num_seqs": 1},
            "max_batch_tokens = 1 leaves no row for a draft beside the token itself",
        ),
    ],
)
def test_speculation_that_cannot_work_is_refused_in_one_line(settings, message) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **settings)
    assert caught.value.message == message
    assert "\n" not in str(caught.value)


def test_speculation_is_off_unless_asked_for() -> None:
    assert EngineConfig(model="m", mixed_tokens=1).draft_tokens == 0
    assert EngineConfig(model="m", speculation="ngram").draft_tokens == 4
