"""Classification heads of each family against transformers' own classes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.pooling.head import Head, scores

NAMES = ("bert", "roberta", "xlm-roberta", "modernbert", "modernbert-biased", "nomic")


def head_of(encoder: Any) -> Head:
    return Head(encoder.spec.head, encoder.head, eps=encoder.spec.norm_eps)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(make: Callable[..., Any], name: str, labels: int) -> None:
    case = make(name, "ForSequenceClassification", num_labels=labels)
    encoder = case.load()
    head = head_of(encoder)
    assert encoder.spec.num_labels == labels and head.missing() == ""
    got = head.logits(case.run(encoder, case.batch))
    with torch.no_grad():
        theirs = [case.model(input_ids=torch.tensor([tokens])).logits[0] for tokens in case.batch]
    assert (got - torch.stack(theirs)).abs().max() < 1e-5


def test_a_model_for_masked_words_lends_a_classifier_its_dense(make: Callable[..., Any]) -> None:
    """ModernBERT's classifiers are made from it so; a score it has none of."""
    case = make("modernbert", "ForMaskedLM")
    encoder = case.load()
    assert set(encoder.head) == {"head.dense.weight", "head.norm.weight"}
    assert head_of(encoder).missing() == "score.weight"
    assert head_of(encoder).missing(["score.weight", "score.bias"]) == ""


def test_an_encoder_with_a_pooler_lends_it_to_heads(make: Callable[..., Any]) -> None:
    encoder = make("bert").load()
    assert set(encoder.head) == {"head.dense.weight", "head.dense.bias"}
    assert encoder.spec.num_labels == 0


def test_another_head_stands_in_the_place_of_the_bases(make: Callable[..., Any]) -> None:
    case = make("bert", "ForSequenceClassification", num_labels=3)
    encoder = case.load()
    rows = case.run(encoder, case.batch)
    torch.manual_seed(8)
    own = {"score.weight": torch.randn(2, 48), "score.bias": torch.randn(2)}
    got = head_of(encoder).logits(rows, own)
    dense = encoder.head["head.dense.weight"], encoder.head["head.dense.bias"]
    pooled = torch.tanh(torch.stack([one[0] for one in rows]) @ dense[0].T + dense[1])
    torch.testing.assert_close(got, pooled @ own["score.weight"].T + own["score.bias"])


def test_scores_keep_the_order_of_logits_or_are_equal() -> None:
    logits = torch.tensor([[-3.0, 0.5, 40.0, 41.0]])
    assert torch.equal(scores(logits, "identity"), logits)
    squashed = scores(logits, "sigmoid")
    assert squashed[0, 2] == squashed[0, 3] == 1.0  # so rerankers sort by logits
    torch.testing.assert_close(squashed, 1 / (1 + (-logits).exp()))
    assert scores(logits, "softmax").sum().item() == pytest.approx(1.0)
