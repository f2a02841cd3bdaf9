"""A pooling core with the face that the engine process serves: what it tells, what it refuses."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine.adapters.pack import pack_into
from engine.adapters.verify import main as verifier
from engine.layout import layout_of, place
from engine.messages import (
    Abort,
    AddRevision,
    Answer,
    Explain,
    GetSnapshot,
    Load,
    PackedManifest,
    SamplingParams,
    StepFrame,
    Submit,
)
from engine.pooling.config import PoolingConfig
from engine.pooling.fit import read_model
from engine.pooling.machine import resolve
from engine.pooling.requests import AbortPool, PoolRequest, unpacked
from engine.pooling.served import ServedPooling
from engine.verify_messages import VerifyReport, VerifyRevision
from tests.fakes.tiny_bert import HIDDEN, LAYERS, LENGTH, VOCAB, write_bert, write_bert_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), pooling="cls")


@dataclass(frozen=True)
class Stored:
    """An adapter as the store has it, and what the engine is told."""

    folder: Path
    model: Path
    packed: PackedManifest


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = write_bert_adapter(tmp_path_factory.mktemp("adapter") / "one", 1)
    store = tmp_path_factory.mktemp("store")
    packed = pack_into(folder, model, store, block_size=0, dtype="float32", max_rank=64)
    return Stored(folder, model, packed)


@pytest.fixture(scope="module")
def adapter(stored: Stored) -> PackedManifest:
    return stored.packed


@pytest.fixture
def served(model: Path) -> Iterator[ServedPooling]:
    config = PoolingConfig(model=str(model), device="cpu", adapter_pool=1 << 20, ram_cache=1 << 20)
    served = ServedPooling(config)
    yield served
    served.close()


def bring_up(served: ServedPooling, rev: str) -> None:
    served.take(Load(command_id=2, rev=rev))
    told: dict[int, str] = {}
    while 2 not in told:
        told |= {answer.command_id: answer.code for answer in served.step().answers}
        if 2 not in told:
            served.wait()
    assert not any(told.values()), told


def answer(served: ServedPooling, command: Explain | GetSnapshot | VerifyRevision) -> Answer:
    served.take(command)
    (answer,) = served.step().answers
    assert answer.command_id == command.command_id
    return answer


def embed(request_id: str, rev: str | None = None) -> PoolRequest:
    return PoolRequest(request_id=request_id, tokens=[1, 2, 3], rev=rev)


def test_it_says_what_it_is_with_no_room_for_keys_and_values(served: ServedPooling) -> None:
    info = served.info
    assert info.pooling is not None and info.pooling.kinds == ("cls",)
    assert (info.pooling.width, info.max_model_len, info.vocab_size) == (HIDDEN, LENGTH, VOCAB)
    assert (info.block_size, info.eos_token_ids, info.pooling.kv_bytes) == (0, (), 0)
    assert info.num_blocks * info.block_bytes == info.arena_bytes == info.pooling.adapter_bytes
    assert "kv          0.0 KiB" in served.memory_table()


def test_from_what_it_says_of_itself_follows_how_many_blocks_an_adapter_takes(
    served: ServedPooling, adapter: PackedManifest
) -> None:
    layout = layout_of(served.info)
    assert layout.id == served.info.layout == adapter.layout
    assert place(adapter.modules, layout).num_blocks == adapter.num_blocks


def test_results_are_bytes_that_read_as_vectors(served: ServedPooling) -> None:
    served.take(embed("a"))
    (pooled,) = served.step().pooled
    result = unpacked(pooled)
    assert result.values is not None and result.values.shape == (HIDDEN,)
    assert np.linalg.norm(result.values) == pytest.approx(1, abs=1e-6)
    assert (result.num_tokens, result.num_cut) == (3, 0)


def test_to_generate_is_refused_and_an_abort_of_it_is_nothing(served: ServedPooling) -> None:
    served.take(Submit(request_id="a", prompt=[1], sampling=SamplingParams()))
    (delta,) = served.step().deltas
    assert (delta.request_id, delta.finish_reason, delta.code) == ("a", "error", "invalid_value")
    served.take(Abort("a"))
    served.take(AbortPool("a"))
    assert served.step().silent


def verify(served: ServedPooling, stored: Stored, probe: Path) -> VerifyReport:
    """As the daemon has it done: the probe from the stored folder, then the engine's word."""
    told = ("--folder", stored.folder, "--model", stored.model, "--out", probe.parent)
    numbers = ("--block-size", "0", "--dtype", "float32", "--probe", probe)
    assert verifier(list(map(str, (*told, *numbers)))) == 0
    served.take(VerifyRevision(3, stored.packed.rev, str(probe)))
    while not (answers := [*served.step().answers]):
        if served.idle:
            served.wait()
    assert answers[0].report is not None, answers[0]
    return answers[0].report


def test_an_adapter_does_what_its_stored_files_say(
    served: ServedPooling, stored: Stored, tmp_path: Path
) -> None:
    served.take(AddRevision(command_id=1, manifest=stored.packed))
    bring_up(served, stored.packed.rev)
    report = verify(served, stored, tmp_path / "probe")
    assert report.findings == () and report.modules == 2 * LAYERS
    assert 0 < report.worst_error < report.tolerance
    assert report.bytes_checked == stored.packed.num_blocks * served.info.block_bytes


def test_a_resident_byte_that_is_not_what_was_packed_is_named(
    served: ServedPooling, stored: Stored, tmp_path: Path
) -> None:
    served.take(AddRevision(command_id=1, manifest=stored.packed))
    bring_up(served, stored.packed.rev)
    row = served.core.slots.find(stored.packed.rev)
    assert row is not None
    served.core.machine.arena.bytes[row.blocks[0], 2] ^= 0xFF
    found = verify(served, stored, tmp_path / "probe").findings
    assert {(f.what, f.layer, f.module) for f in found} >= {("resident", 0, "q_proj")}


def test_one_that_is_not_on_the_device_is_not_verified(
    served: ServedPooling, adapter: PackedManifest
) -> None:
    served.take(AddRevision(command_id=1, manifest=adapter))
    served.step()
    for rev, code in ((adapter.rev, "conflict"), ("unknown", "model_not_found")):
        assert answer(served, VerifyRevision(3, rev, "probe")).code == code


def test_the_picture_has_steps_rows_and_who_waits(
    served: ServedPooling, adapter: PackedManifest
) -> None:
    served.take(AddRevision(command_id=1, manifest=adapter))
    served.take(embed("base"))
    served.step()
    served.take(embed("waits", adapter.rev))
    served.step()  # it is on its way from the disk
    picture = answer(served, GetSnapshot(2)).snapshot
    assert picture is not None and picture.pool.block_size == 0
    assert (picture.pool.kv_active, picture.pool.kv_cached) == (0, 0)
    assert picture.prompt_tokens == 3 and picture.step == 1 and picture.generated_tokens == 0
    assert picture.base_steps.batch_tokens.total == 3.0
    (status,) = picture.revisions
    assert (status.rev, status.leases) == (adapter.rev, 1)
    assert (picture.waiting, picture.running, picture.base.waiting) == (1, 0, 0)
    told = answer(served, Explain(3, adapter.rev)).explanation
    assert told is not None and (told.queue_turn, told.queue_turns) == (1, 1)
    assert told.waiting == 1 and told.room.kv_floor == 0 and told.tokens_left == 0
    assert answer(served, Explain(4, "unknown")).code == "model_not_found"


def test_a_step_with_an_adapter_is_counted_apart(
    served: ServedPooling, adapter: PackedManifest
) -> None:
    served.take(AddRevision(command_id=1, manifest=adapter))
    served.take(embed("a", adapter.rev))
    while not served.step().pooled:
        served.wait()
    picture = answer(served, GetSnapshot(2)).snapshot
    assert picture is not None
    assert sum(picture.lora_steps.adapters.counts) == 1
    assert picture.lora_steps.lora_bytes.total == adapter.true_bytes
    assert sum(picture.base_steps.adapters.counts) == 0


def test_at_its_end_who_waits_is_told_and_who_has_just_come(
    served: ServedPooling, adapter: PackedManifest
) -> None:
    served.take(AddRevision(command_id=1, manifest=adapter))
    served.take(embed("waits", adapter.rev))
    served.step()
    served.take(embed("came"))
    frame: StepFrame = served.shutdown()
    assert {(p.request_id, p.code) for p in frame.pooled} == {
        ("waits", "draining"),
        ("came", "draining"),
    }
    assert served.step().pooled == ()


def test_each_layer_of_a_step_is_a_sign_of_life(model: Path) -> None:
    signs: list[int] = []
    served = ServedPooling(
        PoolingConfig(model=str(model), device="cpu", adapter_pool=1 << 20, ram_cache=1 << 20),
        alive=lambda: signs.append(served.stats.steps),
    )
    served.take(embed("a"))
    served.step()
    served.close()
    assert signs == [0] * LAYERS  # within the step


@pytest.mark.parametrize(
    ("hidden", "layers", "rows"), [(384, 6, 4096), (768, 12, 529), (1024, 24, 256)]
)
def test_steps_on_a_cpu_are_as_short_as_the_model_is_large(
    model: Path, hidden: int, layers: int, rows: int
) -> None:
    _, spec, pooling = read_model(PoolingConfig(model=str(model)))
    sizes = {"hidden_size": hidden, "ffn_size": 4 * hidden, "head_dim": hidden // spec.num_heads}
    large = dataclasses.replace(spec, num_layers=layers, **sizes)
    config = PoolingConfig(model=str(model), device="cpu")
    assert resolve(config, large, pooling).max_batch_tokens == rows
    told = PoolingConfig(model=str(model), device="cpu", max_batch_tokens=99)
    assert resolve(told, large, pooling).max_batch_tokens == 99
