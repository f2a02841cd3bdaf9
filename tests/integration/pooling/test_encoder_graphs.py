"""Small steps of an encoder as on a card: padded, and replayed from buffers that never move.

Only the graph itself and torch's kernel are missing: what stands in for the first computes again
from the tensors of the capture, what stands in for the second reads on the device where inputs are.
"""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import assembly, ladder
from engine.kernels import backend, layer_norm, ragged_attention
from engine.kernels.ragged_attention import Ragged
from engine.ladder import InputLadder
from engine.messages import AddRevision, PackedManifest
from engine.pooling import machine
from engine.pooling.encoder_graphs import EncoderGraphs
from engine.pooling_messages import GiveWay
from engine.recording import WORTH_IT, Recorder

ROWS, SEQS = 24, 4
#: Steps one by one: their inputs' lengths.
STEPS = ((24,), (1,), (5, 1, 9, 4), (8,), (3, 3), (16,), (2, 1, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float, window: int) -> Tensor:
    """By what lies on the device alone; rows of nobody get nothing that could be used."""
    starts = ragged.on_device.tolist()
    out = torch.full_like(q, torch.nan)
    for first, last in pairwise(starts):
        assert 0 <= last - first <= ragged.longest
        if last > first:
            rows = slice(first, last)
            scores = scale * torch.einsum("qhd,khd->hqk", q[rows], k[rows])
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[rows])
    return out


@pytest.fixture
def on_card_path(monkeypatch: pytest.MonkeyPatch) -> None:
    small = InputLadder

    def ladder_of(config: Any, spec: Any, dtype: str) -> InputLadder:
        return small(rows=min(ROWS, config.graph_tokens), seqs=min(SEQS, config.max_num_seqs))

    monkeypatch.setattr(ladder, "ENCODER", (8, 16, 24))
    monkeypatch.setattr(ladder, "INPUTS", (2, 4))
    monkeypatch.setattr(machine, "is_card", lambda device: True)
    monkeypatch.setattr(machine, "ladder_of", ladder_of)
    monkeypatch.setattr(ragged_attention, "takes_ragged", lambda *_: True)
    monkeypatch.setattr(ragged_attention, "_on_card", attend)
    monkeypatch.setattr(
        Recorder, "record", lambda self, compute, parts: SimpleNamespace(replay=compute)
    )


def graphs_of(driver: Any) -> EncoderGraphs:
    """With those of the start, and nothing that may be used in what a step leaves behind."""
    graphs: EncoderGraphs = driver.core.machine.backbone.graphs
    graphs.use_graphs = True
    graphs.capture()
    graphs._hidden.fill_(torch.nan)
    return graphs


def asked(
    driver: Any,
    steps: tuple[tuple[int, ...], ...] = STEPS,
    revs: tuple[str | None, ...] = (None,),
    **more: Any,
) -> Iterator[np.ndarray]:
    """One step after the other: the values of each of its inputs."""
    for number, lengths in enumerate(steps):
        names = [f"{number} {n}" for n in range(len(lengths))]
        for n, (name, length) in enumerate(zip(names, lengths, strict=True)):
            tokens = [3 + (7 * number + 5 * n + i * i) % 40 for i in range(length)]
            types = [int(2 * i > length) for i in range(length)] if n % 2 else None
            rev = revs[(number + n) % len(revs)]
            driver.ask(name, rev, tokens=tokens, types=types, **more)
        driver.until(lambda names=names: set(names) <= driver.results.keys())
        yield from (driver.results[name].values for name in names)


def test_small_steps_are_replayed_and_give_what_whole_ones_give(
    drive: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    told = {"deterministic": False}
    expected = [*asked(drive(**told))]
    request.getfixturevalue("on_card_path")
    driver = drive(**told)
    graphs = graphs_of(driver)
    num_graphs = graphs.num_graphs
    for got, want in zip(asked(driver), expected, strict=True):
        assert np.abs(got - want).max() < 1e-5
    assert graphs.num_replays == driver.core.num_steps == len(STEPS)
    assert graphs.num_graphs == num_graphs == 6


def test_a_sum_and_its_norm_are_one_launch_in_a_step_that_is_replayed(
    drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    told, steps, calls = {"deterministic": False}, ((5, 3), (30,)), []
    expected = [*asked(drive(**told), steps)]
    request.getfixturevalue("on_card_path")
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    sum_norm = layer_norm.sum_norm

    def counted(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append(len(x))
        return sum_norm(x, *rest, **options)

    monkeypatch.setattr(layer_norm, "sum_norm", counted)
    driver = drive(**told)
    graphs_of(driver)
    calls.clear()
    for got, want in zip(asked(driver, steps), expected, strict=True):
        assert np.abs(got - want).max() < 1e-5
    assert calls == [8] * 4, "two of each layer of the first step, and none of the larger one"


@pytest.mark.parametrize("task", ["embed", "classify", "tokens"])
def test_a_step_that_no_rung_holds_is_not_padded(
    drive: Callable[..., Any], request: pytest.FixtureRequest, task: str
) -> None:
    steps = ((25,), (30, 2), (1, 1, 1, 1, 1), (6, 6))
    told = {"deterministic": False}
    expected = [*asked(drive(**told), steps, task=task)]
    request.getfixturevalue("on_card_path")
    driver = drive(**told)
    graphs = graphs_of(driver)
    for got, want in zip(asked(driver, steps, task=task), expected, strict=True):
        assert got.shape == want.shape and np.abs(got - want).max() < 1e-5
    assert graphs.num_replays == 1 and driver.core.num_steps == len(steps)


def test_inputs_with_rows_that_nobody_sees_are_not_padded(
    drive: Callable[..., Any], on_card_path: None
) -> None:
    driver = drive(deterministic=False)
    graphs = graphs_of(driver)
    driver.ask("filled up", unseen=2)
    driver.until(lambda: "filled up" in driver.results)
    assert driver.results["filled up"].code == "" and graphs.num_replays == 0


def test_steps_that_give_way_are_replayed_as_others_are(
    drive: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    told, steps = {"deterministic": False}, ((5, 3), (16,))
    expected = [*asked(drive(**told), steps)]
    request.getfixturevalue("on_card_path")
    driver = drive(**told)
    graphs, driver.tick = graphs_of(driver), 0.05
    for share in (0.5, 1.0):
        driver.core.take(GiveWay(share))
        before = graphs.num_replays
        for got, want in zip(asked(driver, steps), expected, strict=True):
            assert np.abs(got - want).max() < 1e-5
        assert graphs.num_replays == before + len(steps)
        driver.results.clear()


def test_an_eager_step_of_a_rung_has_the_bits_of_its_graph(
    drive: Callable[..., Any], on_card_path: None
) -> None:
    replayed, eager = drive(deterministic=False), drive(deterministic=False)
    graphs_of(replayed)
    graphs_of(eager).use_graphs = False
    for one, other in zip(asked(replayed), asked(eager), strict=True):
        assert np.array_equal(one, other)
    assert replayed.core.machine.backbone.graphs.num_replays == len(STEPS)
    assert eager.core.machine.backbone.graphs.num_replays == 0


def test_graphs_with_adapters_come_when_steps_like_them_come_back(
    drive: Callable[..., Any],
    pack: Callable[[int], PackedManifest],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    manifests = [pack(1), pack(2)]
    revs = (None, *(m.rev for m in manifests))
    steps = ((5, 1, 9), (4, 4, 4), (7, 2, 3), (6, 6, 2), (13,), (10, 2, 2))
    small = {"deterministic": False, "slots": 2, "max_rank": 16, "max_batch_tokens": 32}

    def loaded() -> Any:
        driver = drive(**small)
        for n, manifest in enumerate(manifests):
            driver.core.take(AddRevision(command_id=n, manifest=manifest))
        return driver

    expected = [*asked(loaded(), steps, revs)]
    request.getfixturevalue("on_card_path")
    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    driver = loaded()
    graphs = graphs_of(driver)
    num_graphs, num_steps = graphs.num_graphs, []
    for got, want in zip(asked(driver, steps, revs), expected, strict=True):
        assert np.abs(got - want).max() < 1e-4
        num_steps.append(graphs.num_replays)
    late = graphs.num_graphs - num_graphs
    assert late >= 1 and len({*num_steps}) > 1, "a class came back, and got a graph"
    assert graphs.num_replays <= driver.core.num_steps - (WORTH_IT - 1)
    rung, kind = [*graphs._graphs][-1]
    assert kind is not None and kind in graphs.kinds(rung)
