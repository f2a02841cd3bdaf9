"""LoRA on encoders, with heads of their own, against PEFT."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.pooling.config import PoolingConfig
from engine.pooling.engine import PoolingEngine

SMALL = {"adapter_pool": 4 << 20, "ram_cache": 4 << 20, "device": "cpu"}
#: case -> what its adapters are on.
TARGETS: dict[str, Any] = {
    "bert": ["query", "value", "dense"],  # the pooler's among them
    "roberta": ["query", "key", "intermediate.dense"],
    "modernbert": "all-linear",
    "modernbert-biased": ["Wqkv", "Wo"],
    "nomic": "all-linear",
}


@dataclass
class Trained:
    folder: Path
    model: Any  # PEFT's

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Any:
        return self.model(input_ids=torch.tensor([tokens])).logits[0].numpy()

    @torch.no_grad()
    def mean(self, tokens: list[int]) -> Any:
        encoder = self.model.get_base_model().base_model
        return encoder(input_ids=torch.tensor([tokens])).last_hidden_state[0].mean(0).numpy()


@pytest.fixture(scope="module")
def train(
    make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Trained]:
    """`train(case, labels, seed, ...)`: a PEFT adapter with every weight moved."""

    def trained(name: str, labels: int, seed: int, **options: Any) -> Trained:
        import peft
        import transformers

        folder = tmp_path_factory.mktemp(f"{name}-{seed}")
        base = make(name, "ForSequenceClassification", num_labels=2)
        kind = type(base.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            model = kind.from_pretrained(
                base.folder, num_labels=labels, ignore_mismatched_sizes=True
            )
            told = {"r": 4, "lora_alpha": 6.0, "target_modules": TARGETS[name]} | options
            adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", **told))
            torch.manual_seed(seed)
            with torch.no_grad():
                for key, parameter in adapted.named_parameters():
                    if parameter.requires_grad and "magnitude" not in key:
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    elif parameter.requires_grad:
                        parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            adapted.save_pretrained(folder)
        return Trained(folder, adapted.eval())

    return trained


@pytest.fixture
def engines() -> Iterator[Callable[..., PoolingEngine]]:
    made: list[PoolingEngine] = []

    def make_one(folder: Path, **options: Any) -> PoolingEngine:
        made.append(PoolingEngine(PoolingConfig(model=str(folder), **SMALL | options)))
        return made[-1]

    yield make_one
    for engine in made:
        engine.close()


SLOW = ("modernbert-biased", "roberta")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(TARGETS)]
)
def test_adapters_with_heads_of_their_own_are_mixed_in_one_batch(
    name: str,
    make: Callable[..., Any],
    train: Callable[..., Trained],
    engines: Callable[..., PoolingEngine],
    tmp_path: Path,
) -> None:
    base = make(name, "ForSequenceClassification", num_labels=2)
    adapters = [train(name, 3, 1), train(name, 1, 2, r=2, use_rslora=True)]
    engine = engines(base.folder)
    revs = [engine.add_folder(one.folder, tmp_path) for one in adapters]
    owners: list[int | None] = [0, None, 1, 0, 1, None]
    wanted = [None if i is None else revs[i] for i in owners]
    for rev in revs:
        engine.load(rev)
    before = engine.core.num_steps
    got = engine.classify(base.batch, wanted)
    assert engine.core.num_steps == before + 1
    vectors = engine.embed(base.batch, wanted)
    for i, (owner, tokens) in enumerate(zip(owners, base.batch, strict=True)):
        with torch.no_grad():
            plain = base.model(input_ids=torch.tensor([tokens])).logits[0].numpy()
        theirs = plain if owner is None else adapters[owner].logits(tokens)
        assert got[i].logits.shape == theirs.shape
        assert np.abs(got[i].logits - theirs).max() < 1e-5
        if owner is not None:
            assert np.abs(vectors[i] - adapters[owner].mean(tokens)).max() < 1e-5
    alone = engine.classify([base.batch[0]], [revs[0]])[0]
    assert np.abs(alone.logits - got[0].logits).max() < 1e-5


@pytest.mark.parametrize("name", ["bert", "nomic"])
def test_dora_is_served_with_the_bases_own_norms(
    name: str,
    make: Callable[..., Any],
    train: Callable[..., Trained],
    engines: Callable[..., PoolingEngine],
    tmp_path: Path,
) -> None:
    base = make(name, "ForSequenceClassification", num_labels=2)
    adapter = train(name, 2, 3, use_dora=True)
    engine = engines(base.folder)
    rev = engine.add_folder(adapter.folder, tmp_path)
    [got] = engine.classify([base.batch[4]], [rev])
    assert np.abs(got.logits - adapter.logits(base.batch[4])).max() < 1e-5


def test_an_encoder_without_a_classifier_serves_adapters_that_bring_one(
    make: Callable[..., Any],
    train: Callable[..., Trained],
    engines: Callable[..., PoolingEngine],
    tmp_path: Path,
) -> None:
    """Its tensors have no `bert.` ahead, and the adapter's do."""
    classifier = make("bert", "ForSequenceClassification", num_labels=2)
    classifier.model.bert.save_pretrained(tmp_path / "bare")
    engine = engines(tmp_path / "bare")
    adapter = train("bert", 3, 1)
    rev = engine.add_folder(adapter.folder, tmp_path)
    tokens = classifier.batch[5]
    [got] = engine.classify([tokens], [rev])
    assert np.abs(got.logits - adapter.logits(tokens)).max() < 1e-5
    close = engine.embed([tokens], [rev])[0] - adapter.mean(tokens)
    assert np.abs(close).max() < 1e-5


def test_deterministic_scores_of_an_adapter_keep_their_bits_beside_others(
    make: Callable[..., Any],
    train: Callable[..., Trained],
    engines: Callable[..., PoolingEngine],
    tmp_path: Path,
) -> None:
    base = make("bert", "ForSequenceClassification", num_labels=2)
    engine = engines(base.folder, deterministic=True)
    revs = [engine.add_folder(train("bert", 3, seed).folder, tmp_path) for seed in (1, 2)]
    wanted = [revs[0], None, revs[1], revs[0], None, revs[1]]
    together = engine.classify(base.batch, wanted)
    for tokens, rev, got in zip(base.batch, wanted, together, strict=True):
        [alone] = engine.classify([tokens], [rev])
        assert np.array_equal(alone.logits, got.logits)
    plain = engine.classify(base.batch, None)
    assert np.array_equal(plain[1].logits, together[1].logits)
