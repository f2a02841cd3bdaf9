"""Two ranks on the way that steps take on a card, on Triton's interpreter: padded steps, plans that
are told by their class, rows of the slot table, tokens that only a device knows.

Both ranks are threads of this process, of which one computes at a time: the interpreter is not for
two.  Collectives of torch and processes are in `test_ranks.py`.
"""

import json
import os
import select
import socket
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import startup
from engine.adapters.pack import pack_into
from engine.core import EngineCore
from engine.kernels import lora_augment, tiles
from engine.messages import Load
from engine.ranks import crew as crew_module
from engine.ranks import follower as follower_module
from engine.ranks.follower import Follower, follow
from tests.fakes import card_path

pytestmark = pytest.mark.slow


class Meeting:
    """Ranks that meet, and of which one has the turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=120)
        self.said: list = [None] * size

    def gather(self, rank, value):
        self.said[rank] = value
        self.turn.release()
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        self.turn.acquire()
        return heard


class Talking:
    """What `Ranks` does, at a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.count = meeting, rank, meeting.size, 0

    def add_up(self, x):
        self.count += 1
        x.copy_(torch.stack(self.meeting.gather(self.rank, x.clone())).sum(0))

    def side_by_side(self, x, out):
        self.count += 1
        out.copy_(torch.cat(self.meeting.gather(self.rank, x.clone()), dim=1)[:, : out.shape[1]])

    def from_first(self, x):
        self.count += 1
        x.copy_(self.meeting.gather(self.rank, x.clone())[0])

    def least(self, number):
        return min(self.meeting.gather(self.rank, number))

    def close(self):
        pass


class Thread:
    """What a process is to the crew."""

    returncode = 0

    def __init__(self, target) -> None:
        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    def wait(self, timeout=None):
        self._thread.join(timeout)

    def kill(self):
        pass


@pytest.fixture
def two_threads(monkeypatch):
    """Switches to the card's way; what captures a runner's graphs, and the ranks that were made."""
    meeting, followers = Meeting(2), []

    class Turns:
        """A socket of a rank beside the first: while it waits, it has no turn."""

        def __init__(self, sock) -> None:
            self._sock = sock

        def recv(self, size):
            meeting.turn.release()
            try:
                return self._sock.recv(size)
            finally:
                meeting.turn.acquire()

        def fileno(self):
            return self._sock.fileno()

        def sendall(self, data):
            self._sock.sendall(data)

    def start(self, rank, config, lookahead, store):
        ours, theirs = socket.socketpair()
        held, lifeline = socket.socketpair()

        def run():
            with meeting.turn:
                follower = Follower(config, Talking(meeting, rank), self._memory, lookahead)
                capture(follower._runner)
                followers.append(follower)
                follow(follower, Turns(theirs))
            theirs.close()
            lifeline.close()

        return crew_module._Other(rank, Thread(run), ours, held)

    def capture(runner):
        runner.graphs.use_graphs = True
        runner.capture()

    plain_wait = EngineCore.wait

    def wait(self):
        meeting.turn.release()
        try:
            plain_wait(self)
        finally:
            meeting.turn.acquire()

    class Waiting:
        """`select`, without the turn."""

        @staticmethod
        def select(*arguments):
            meeting.turn.release()
            try:
                return select.select(*arguments)
            finally:
                meeting.turn.acquire()

    class First(Talking):
        def __init__(self, *arguments, **named) -> None:
            super().__init__(meeting, 0)

        @staticmethod
        def taken():
            return False

    monkeypatch.setattr(follower_module, "select", Waiting)
    card_path.take(monkeypatch)
    monkeypatch.setattr(crew_module, "Ranks", First)
    monkeypatch.setattr(crew_module.Crew, "_start", start)
    monkeypatch.setattr(EngineCore, "wait", wait)
    meeting.turn.acquire()
    yield capture, followers
    meeting.turn.release()


def write_folder(adapter, folder: Path) -> Path:
    folder.mkdir()
    tensors = {}
    for (layer, module), (a, b) in adapter.tensors.items():
        part = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        stem = f"base_model.model.model.layers.{layer}.{part}.{module}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({module for _, module in adapter.tensors})
    rank = adapter.manifest.max_rank
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


#: (seed of the prompt, its tokens, adapter, tokens to generate)
MIXED = [(0, 7, None, 3), (1, 30, 0, 3), (2, 18, 1, 2), (3, 3, None, 2)]
ADAPTED = [(1, 30, 0, 3), (2, 18, 1, 2)]


@pytest.mark.parametrize("asked", [MIXED, ADAPTED], ids=["mixed", "guests"])
def test_two_ranks_answer_as_plain_torch(
    start_core, adapters, prompt, model_dir, tmp_path, request, monkeypatch, asked
) -> None:
    """Also where prompts of more than 24 rows have their adapters as guests of the products."""
    right, took, settings = [], [], {}
    for n, length, which, tokens in asked:
        driver = start_core()
        if which is not None:
            driver.add(adapters[which])
        rev = None if which is None else adapters[which].rev
        right.append(driver.submit("r", prompt(length, n), rev, max_tokens=tokens, logprobs=0))
        driver.finish()

    capture, followers = request.getfixturevalue("two_threads")
    if asked is ADAPTED:
        settings = {"graph_tokens": 24, "mixed_tokens": 40}
        augment = lora_augment.augment
        monkeypatch.setattr(lora_augment, "augment", lambda *a: took.append(a) or augment(*a))
        rooms = iter((32, 48))  # of cards that are not alike
        monkeypatch.setattr(startup, "room_for", lambda *told: next(rooms))
        monkeypatch.setattr(tiles, "PREFILL_ROWS", 24)
    driver = start_core(
        lookahead=True,
        deterministic=False,
        max_num_seqs=3,
        max_rank=16,
        slots=2,
        max_batch_tokens=40,
        tensor_parallel=2,
        **settings,
    )
    capture(driver.core.runner)
    manifests = []
    for n in (0, 1):
        told = {"block_size": 16, "dtype": "float32", "max_rank": 16, "ranks": 2}
        folder = write_folder(adapters[n], tmp_path / str(n))
        manifests.append(pack_into(folder, model_dir, tmp_path / "packed", **told))

    class Packed:
        def __init__(self, manifest) -> None:
            self.manifest = manifest

    driver.add(*map(Packed, manifests))
    if asked is ADAPTED:  # whose step has no rows of the base; copies go on while others' steps run
        for n, manifest in enumerate(manifests):
            driver.core.take(Load(command_id=f"load {n}", rev=manifest.rev))
        while sum(row.ready for row in driver.core.slots.rows.values()) < 2:
            driver.submit(f"base {len(driver.stories)}", prompt(3), None, max_tokens=2)
            driver.finish()
    stories = [
        driver.submit(
            f"r{n}",
            prompt(length, n),
            None if which is None else manifests[which].rev,
            max_tokens=tokens,
            logprobs=0,
        )
        for n, length, which, tokens in asked
    ]
    driver.finish()
    for story, want in zip(stories, right, strict=True):
        assert story.tokens == want.tokens
        values = [[one.logprob for one in s.logprobs] for s in (story, want)]
        assert values[0] == pytest.approx(values[1], abs=2e-3)
    runner = driver.core.runner
    eager = runner.forward_passes - runner.graphs.num_replays
    assert eager == (asked is ADAPTED), "other steps ran eagerly than the long prompt's"
    assert len(took) == 12 * eager  # of two ranks, in two layers: qkv, gate and up, down
    [follower] = followers
    assert {each.room for each in (runner, follower._runner)} == {32 * eager}
    assert follower._runner.graphs.num_replays == runner.graphs.num_replays
