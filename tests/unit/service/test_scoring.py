"""Which way two texts are scored, by what the model has and is served for."""

import dataclasses

import numpy as np
import pytest

from engine.messages import PackedModule
from engine.pooling.requests import PoolResult
from engine.pooling.spec import PoolingSpec
from lorad.errors import LoradError
from lorad.registry.records import RevisionRecord
from lorad.service import similarity
from lorad.service.pool_ask import Input, PoolAsk, ScoreAsk, Wish
from lorad.service.pooling_facts import labels_of
from lorad.service.scoring import Compared, Model, plan
from tests.fakes.pooled import info

ASK = ScoreAsk(
    wish=Wish(model="m", endpoint="rerank"),
    firsts=("q",),
    seconds=("a", "b"),
    params=("query", "documents"),
)
ALL = ("embed", "rerank", "classify")


def model(labels=0, own=0, tasks=ALL, similarity="cosine", words=(), instructed=False):
    labels = 1 if words else labels
    names = tuple(f"L{i}" for i in range(labels))
    return Model(
        info(num_labels=labels, labels=names, score_tokens=words),
        PoolingSpec(similarity=similarity),
        tasks,
        tuple(f"LABEL_{i}" for i in range(own)),
        instructed,
    )


@pytest.mark.parametrize(
    ("served", "how"),
    [
        (model(1), "head"),
        (model(0), "vectors"),
        (model(0, similarity="MaxSim"), "maxsim"),
        (model(1, similarity="MaxSim"), "head"),
        (model(1, tasks=("embed",)), "vectors"),
        (model(0, own=1, tasks=("embed",)), "head"),
        (model(3, own=1), "head"),
        (model(words=(9, 4), tasks=("rerank",)), "head"),
        (model(words=(9, 4), tasks=("embed",)), "vectors"),
    ],
)
def test_what_the_model_has_decides(served, how):
    planned = plan(ASK, served)
    assert planned.how == how and (planned.compared is None) == (how == "head")
    assert len(planned.ask.inputs) == (2 if how == "head" else 3)


@pytest.mark.parametrize("served", [model(3), model(1, own=2), model(3, tasks=("classify",))])
def test_a_head_of_several_classes_scores_no_pairs(served):
    with pytest.raises(LoradError, match="classes apart") as refused:
        plan(ASK, served)
    assert ("cosine" in refused.value.hint) == served.embeds


def test_an_instruction_needs_a_text_that_has_room_for_it():
    ask = dataclasses.replace(ASK, instruction="find it")
    assert plan(ask, model(words=(9, 4), instructed=True)).ask.instruction == "find it"
    with pytest.raises(LoradError, match="takes no instruction for it") as refused:
        plan(ask, model(1))
    assert refused.value.param == "instruction"


def test_words_of_an_answer_tell_no_classes_of_a_text_alone():
    def asked(*inputs):
        return PoolAsk(wish=ASK.wish, task="classify", inputs=inputs)

    served = model(words=(9, 4), tasks=("rerank", "classify"))
    with pytest.raises(LoradError, match="how well two texts fit") as refused:
        served.check(asked(Input("a", "b"), Input("alone")))
    assert "/v1/rerank" in refused.value.hint
    served.check(asked(Input("a", "b"), Input((1, 2, 3))))
    model(words=(9, 4), own=3).check(asked(Input("alone")))
    model(1).check(asked(Input("alone")))


def test_an_adapters_own_classes_are_counted_and_have_no_names():
    def record(*modules):
        return RevisionRecord(
            rev="r",
            rank=4,
            ranks={},
            alpha=8,
            rslora=False,
            targets=(),
            num_layers=1,
            dtype="float32",
            file_bytes=1,
            changes_kv=True,
            modules=modules,
        )

    head = PackedModule(layer=2, module="score.weight.rows", rank=3, scaling=1.0)
    assert labels_of(record(head)) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert labels_of(record()) == labels_of(None) == ()
    assert model(2, own=3).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def result(*values):
    return PoolResult("r", num_tokens=3, values=np.array(values, np.float32))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_vectors_are_compared_as_they_come_and_none_is_held(order):
    """One against all, and each against its own."""
    vectors = [result(1, 0), result(0, 1), result(2, 1), result(4, 3)]
    for count, wanted in ((1, [0.0, 2.0, 4.0]), (2, [2.0, 3.0])):
        compared = Compared(count, similarity.dot)
        for number in order:
            kept = compared.take(number, vectors[number])
            assert kept.values is None and kept.num_tokens == 3
        assert [compared.scores[i] for i in range(4 - count)] == wanted
        assert not compared._early
