"""What one rank is told of a step: the other's batch, laid out again, is the same batch."""

import queue
import socket
import threading
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from engine.batch import Batch, Batcher, Packed
from engine.errors import EngineError, NoDevice
from engine.kernels import tiles
from engine.kernels.lora_meta import LoraClass
from engine.ladder import Ladder
from engine.messages import SamplingParams
from engine.ranks import crew as crews
from engine.ranks.crew import Crew, _Other
from engine.ranks.follower import Follower
from engine.ranks.told import Copied, Failed, Kind, Reader, Step, Stop, frame, words_of
from engine.sequence import Chunk, Sequence, StepWork

PLAN_WORDS = 24


def batcher(padded: bool, lookahead: bool) -> Batcher:
    ladder = Ladder(max_seqs=8, mixed_rows=64, often=32) if padded else None
    return Batcher(
        max_rows=128,
        max_seqs=8,
        max_draws=12,
        max_blocks=9,
        block_size=16,
        device=torch.device("cpu"),
        ladder=ladder,
        lookahead=lookahead,
        plan_words=PLAN_WORDS,
    )


def sequence(number: int, length: int) -> Sequence:
    rng = np.random.default_rng(number)
    seq = Sequence(
        str(number),
        rng.integers(0, 99, length).tolist(),
        length,
        SamplingParams(),
        None,
        "",
        "",
        0,
        0,
    )
    seq.blocks = rng.permutation(50)[: -(-(length + 1) // 16)].tolist()
    return seq


def works() -> list[StepWork]:
    """Decode rows alone, and beside prompts; with drafts; a token that nobody knows yet."""
    seqs = [sequence(n, length) for n, length in enumerate((1, 17, 40, 33))]
    decode = tuple(Chunk(seq, len(seq.tokens) - 1, 1, True) for seq in seqs)
    prompts = (
        Chunk(seqs[0], 0, 1, True),
        Chunk(seqs[1], 3, 14, True),
        Chunk(seqs[2], 8, 20, False),
    )
    drafts = (Chunk(seqs[2], 37, 5, True, drafts=(7, 8)), Chunk(seqs[3], 32, 1, True))
    ahead = (Chunk(seqs[1], 17, 1, True), Chunk(seqs[3], 0, 33, True))
    return [StepWork(chunks) for chunks in (decode, prompts, drafts, ahead)]


def over_a_socket(step: Step, words: tuple[np.ndarray, ...]) -> tuple[Step, bytes]:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(frame(step, words) + frame(Stop()))
        reader = Reader(there)
        told, payload = reader.next()
        assert isinstance(told, Step) and reader.next() == (Stop(), b"")
        here.shutdown(socket.SHUT_WR)
        assert reader.next() is None
    return told, payload


def told_of(packed: Packed) -> Packed:
    """As the other rank gets it."""
    step = Step(
        packed.seqs,
        packed.rows,
        packed.draws,
        packed.width,
        tuple(part.size for part in packed.words),
        tuple(part.dtype.str for part in packed.words),
        -1,
        ((0, 1, 2),),
        [(1, -1)],
        [],
    )
    told, payload = over_a_socket(step, packed.words)
    assert told == step
    return replace(packed, words=words_of(told, payload))


def same(one: object, two: object) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_that_was_told_is_the_batch_that_was_packed(padded: bool, lookahead: bool) -> None:
    first, other = batcher(padded, lookahead), batcher(padded, lookahead)
    for number, work in enumerate(works()[: 4 if lookahead else 3]):
        first.ids[:] = other.ids[:] = torch.arange(12) + 60  # what was drawn, on either
        drawing = {chunk.seq: n for n, chunk in enumerate(work.chunks)}

        def plan(words: np.ndarray, rung: object, filled: int = number) -> int:
            words[len(words) - filled :] = np.arange(filled) + 5
            return filled

        packed = first.pack(work, drawing, plan)
        told = other.lay(told_of(first.packed()))
        compare(packed, told)
        assert torch.equal(first.plan[PLAN_WORDS - number :], other.plan[PLAN_WORDS - number :])


def compare(packed: Batch, told: Batch) -> None:
    assert len(told.sampled) == len(packed.sampled)
    for name in ("tokens", "positions", "sample_rows", "rung", "samples_every_row"):
        assert same(getattr(packed, name), getattr(told, name)), name
    for field in fields(packed.attn):
        if field.name == "block_tables":  # what lies beyond a sequence's blocks is not read
            for row, length in enumerate(packed.attn.seq_lens):
                used = slice(0, -(-length // 16))
                pair = packed.attn.block_tables[row, used], told.attn.block_tables[row, used]
                assert torch.equal(*pair)
        else:
            assert same(getattr(packed.attn, field.name), getattr(told.attn, field.name)), field


def test_a_class_of_plans_is_the_same_on_the_other_side() -> None:
    """It is a key: of graphs, and of what their tiles are asked for."""
    short = LoraClass(tiles.ALONE, 1, 2)
    kind = LoraClass(next(iter(tiles.GRAPHED_SHORT)), 12, 34, True, short)
    here, there = socket.socketpair()
    with here, there:
        here.sendall(frame(Kind(3, kind)))
        told, _ = Reader(there).next()
    assert told == Kind(3, kind) and {told.kind: 1}[kind] == 1
    assert told.kind.tiles in tiles.GRAPHED_SHORT


def test_numbers_of_classes_are_few_on_every_rank_however_many_steps_bring_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crews, "KINDS", 8)
    crew, follower = object.__new__(Crew), object.__new__(Follower)
    crew._kinds, follower._kinds = {}, {}

    def hear(data: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            here.sendall(data)
            told, payload = Reader(there).next()
            follower.do(told, payload)

    monkeypatch.setattr(crew, "_tell", hear)
    draw = np.random.default_rng(2)
    for items in (1, 2, *draw.integers(1, 40, 200).tolist(), 1):
        kind = LoraClass(tiles.ALONE, items, items)
        assert follower._kinds[crew._number(kind)] == kind
        assert len(follower._kinds) <= 8 and len(crew._kinds) <= 8


class Ended:
    """A process that has ended."""

    returncode = -9

    def wait(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("last_words", "code", "message"),
    [
        (Failed("invalid_config", "no room", "more memory"), "invalid_config", "rank 1: no room"),
        (None, "internal_error", "rank 1 has died: signal 9"),
    ],
)
def test_a_rank_that_ends_is_told_of_with_its_last_words(
    last_words: Failed | None, code: str, message: str
) -> None:
    told: list[EngineError] = []
    crew = object.__new__(Crew)
    crew._over, crew._serving, crew._on_death = threading.Event(), True, told.append
    crew._reports, crew._wake = queue.SimpleQueue(), lambda: None
    ours, theirs = socket.socketpair()
    held, lifeline = socket.socketpair()
    with ours, theirs, held, lifeline:
        theirs.sendall(frame(Copied("rev")) + (frame(last_words) if last_words else b""))
        theirs.shutdown(socket.SHUT_WR)
        crew._listen(_Other(1, Ended(), ours, held))  # type: ignore[arg-type]
    [error] = told
    assert (error.code, error.message) == (code, message)
    assert crew.reports() == ["rev"]


def test_more_ranks_than_gpus_are_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NoDevice, match=r"tensor_parallel = 2: this process sees 1 GPU$"):
        crews._check_cards(2)
    crews._check_cards(1)


@pytest.mark.parametrize(
    ("told", "own"),
    [
        (None, "1,0,2"),
        ("", "1,0,2"),
        ("4,7,9,5", "7,4,9"),
        ("GPU-a, GPU-b,GPU-c", "GPU-b,GPU-a,GPU-c"),
    ],
)
def test_a_rank_sees_its_own_gpu_first(
    told: str | None, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    env = crews._environment(1, 3)
    assert env["CUDA_VISIBLE_DEVICES"] == own
    assert (env["NCCL_NVLS_ENABLE"], env["NCCL_SOCKET_IFNAME"]) == ("0", "eth1")
