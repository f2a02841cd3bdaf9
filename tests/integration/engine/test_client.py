"""The engine as a process, seen through EngineClient."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from engine.client import (
    EVENTS_AHEAD,
    READ_BYTES,
    EngineClient,
    pack,
    packed_layout,
    read_spec,
)
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import AdapterInvalid, EngineDied, EngineError
from engine.framing import encode_frame
from engine.layout import layout_of
from engine.messages import (
    AddRevision,
    EngineReady,
    Event,
    Fatal,
    GetSnapshot,
    Heartbeat,
    SamplingParams,
    SequenceDelta,
    Starting,
    StepFrame,
    Submit,
)

WEIGHTS = "adapter_model.safetensors"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def config(model: Path, **settings: object) -> EngineConfig:
    defaults: dict[str, object] = {"num_blocks": 128, "max_num_seqs": 8, "slots": 8, "threads": 1}
    return EngineConfig(
        **{"model": str(model), "device": "cpu", "deterministic": True, **defaults, **settings}
    )


async def until(client: EngineClient, done: Callable[[Event], bool]) -> list[Event]:
    """Events up to and with the first for which `done` holds."""
    events = []
    async with asyncio.timeout(30):
        while True:
            events.append(await client.events.get())
            if done(events[-1]):
                return events


def finished(request_id: str) -> Callable[[Event], bool]:
    return lambda event: (
        isinstance(event, StepFrame)
        and any(d.request_id == request_id and d.finish_reason for d in event.deltas)
    )


def has_tokens(event: Event) -> bool:
    return isinstance(event, StepFrame) and any(d.tokens for d in event.deltas)


def deltas(events: list[Event], request_id: str) -> list[SequenceDelta]:
    frames = [e for e in events if isinstance(e, StepFrame)]
    return [d for frame in frames for d in frame.deltas if d.request_id == request_id]


def tokens(events: list[Event], request_id: str) -> list[int]:
    return [token for delta in deltas(events, request_id) for token in delta.tokens]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def with_client(body: Callable[[EngineClient], Awaitable[None]], settings: EngineConfig) -> None:
    """Run `body` with a started client; whatever happens, no process is left behind."""

    async def main() -> None:
        client = EngineClient()
        await client.start(settings)
        try:
            await body(client)
        finally:
            await client.stop(5)
            assert client.returncode is not None

    asyncio.run(main())


def test_a_whole_life_from_start_to_shutdown(model_dir, adapters, start_core, prompt) -> None:
    driver = start_core()
    driver.add(adapters[0])
    expected = [
        driver.submit(n, prompt(9), rev) for n, rev in (("b", None), ("a", adapters[0].rev))
    ]
    driver.finish()

    async def life(client: EngineClient) -> None:
        assert client.state == "starting"
        info = await client.wait_ready()
        assert client.state == "ready" and info.pid == client.pid and info.num_blocks == 128
        layout = packed_layout(read_spec(model_dir), block_size=16, dtype=info.dtype)
        assert (layout.id, layout.block_bytes) == (info.layout, info.block_bytes)
        assert layout_of(info) == layout
        started = await until(client, lambda e: isinstance(e, EngineReady))
        assert all(isinstance(e, Starting | Heartbeat) for e in started[:-1]) and started[:-1]

        answer = await client.call(
            AddRevision(command_id=client.next_id(), manifest=adapters[0].manifest)
        )
        assert answer.code == ""
        client.submit(Submit(request_id="b", prompt=prompt(9), sampling=GREEDY))
        client.submit(
            Submit(request_id="a", prompt=prompt(9), sampling=GREEDY, rev=adapters[0].rev)
        )
        events = await until(client, finished("a"))
        assert [tokens(events, "b"), tokens(events, "a")] == [e.tokens for e in expected]
        assert deltas(events, "a")[-1].finish_reason == "length"
        assert any(isinstance(e, StepFrame) and e.adapters for e in events)

        client.submit(Submit(request_id="long", prompt=prompt(9), sampling=ENDLESS))
        await until(client, has_tokens)
        client.abort("long")
        events = await until(client, finished("long"))
        assert deltas(events, "long")[-1].finish_reason == "abort"

        snapshot = (await client.call(GetSnapshot(client.next_id()))).snapshot
        assert snapshot is not None and snapshot.running == 0
        assert [(r.rev, r.state) for r in snapshot.revisions] == [(adapters[0].rev, "idle")]
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)  # Ctrl+C in the daemon's terminal reaches it too
        before = cpu_seconds(client.pid)
        for _ in range(2):
            await until(client, lambda e: isinstance(e, Heartbeat))
        assert cpu_seconds(client.pid) - before < 0.25, "an idle engine spins"

        client.submit(Submit(request_id="last", prompt=prompt(9), sampling=ENDLESS))
        await until(client, has_tokens)
        await client.stop(10)
        assert client.returncode == 0 and client.state == "dead"
        left = [client.events.get_nowait() for _ in range(client.events.qsize())]
        assert deltas(left, "last")[-1].finish_reason == "abort"
        assert not any(isinstance(e, Fatal) for e in left)

    with_client(life, config(model_dir))


def test_a_killed_engine_ends_every_owed_answer(model_dir, prompt) -> None:
    async def life(client: EngineClient) -> None:
        await client.wait_ready()
        client.submit(Submit(request_id="r", prompt=prompt(9), sampling=ENDLESS))
        await until(client, has_tokens)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)  # so that the answer is surely owed when it dies
        owed = asyncio.create_task(client.call(GetSnapshot(client.next_id())))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="signal 9"):
            await owed
        assert client.state == "dead" and client.returncode == -signal.SIGKILL
        events = await until(client, lambda e: isinstance(e, Fatal))
        assert not any(isinstance(e, Fatal) for e in events[:-1])
        with pytest.raises(EngineDied):
            client.submit(Submit(request_id="late", prompt=[1], sampling=GREEDY))
        with pytest.raises(EngineDied):
            await client.call(GetSnapshot(client.next_id()))
        client.abort("late")

    with_client(life, config(model_dir))


def test_an_engine_that_cannot_start_says_why(model_dir, tmp_path, capfd) -> None:
    async def no_model(client: EngineClient) -> None:
        with pytest.raises(EngineError) as caught:
            await client.wait_ready()
        assert caught.value.code in ("invalid_config", "model_unsupported")
        events = await until(client, lambda e: isinstance(e, Fatal))
        assert str(tmp_path) in events[-1].message and client.returncode == 1

    with_client(no_model, config(tmp_path))
    assert "Traceback" not in capfd.readouterr().err


def test_the_engine_ends_with_the_process_that_started_it(model_dir) -> None:
    script = """
import asyncio, os, sys, msgspec
from engine.client import EngineClient
from engine.config import EngineConfig
async def main():
    client = EngineClient()
    await client.start(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    info = await client.wait_ready()
    print(info.pid, flush=True)
    sys.stdin.read()
    os._exit(0)
asyncio.run(main())
"""
    import msgspec

    command = [sys.executable, "-c", script, msgspec.json.encode(config(model_dir)).decode()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pid = int(parent.stdout.readline())
        engine = os.pidfd_open(pid)
        parent.stdin.close()
        parent.wait(10)
    ended, _, _ = select.select([engine], [], [], 10)
    os.close(engine)
    assert ended, "the engine outlived the daemon"


def test_the_client_imports_no_torch() -> None:
    code = "import sys, engine.client; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def peft_folder(adapters, model_dir, tmp_path) -> Path:
    """The adapter "all" as PEFT would have saved it."""
    folder = tmp_path / "all"
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 2,
        "target_modules": sorted({module for _, module in adapters[0].tensors}),
        "base_model_name_or_path": str(model_dir),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for (layer, module), (a, b) in adapters[0].tensors.items():
        block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        name = f"base_model.model.model.layers.{layer}.{block}.{module}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)
    return folder


def test_a_folder_is_packed_into_what_the_engine_reads(
    peft_folder, model_dir, adapters, tmp_path
) -> None:
    packed = asyncio.run(
        pack(peft_folder, model=model_dir, block_size=16, dtype="float32", out_dir=tmp_path)
    )
    ours = adapters[0].manifest
    assert Path(packed.path).read_bytes() == Path(ours.path).read_bytes()
    assert (packed.layout, packed.num_blocks, packed.true_bytes, packed.max_rank) == (
        ours.layout,
        ours.num_blocks,
        ours.true_bytes,
        ours.max_rank,
    )
    assert packed.modules == ours.modules


def test_a_folder_that_the_library_adds_serves_as_its_packed_file_does(
    peft_folder, model_dir, adapters, prompt, tmp_path
) -> None:
    config = EngineConfig(model=str(model_dir), device="cpu", num_blocks=64, slots=4)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    with Engine(config) as engine:
        rev = engine.add_folder(peft_folder, tmp_path / "packed")
        engine.add_adapter(adapters[0].manifest)
        revs = [None, rev, adapters[0].manifest.rev]
        base, ours, packed = (g.tokens for g in engine.generate([prompt(9)] * 3, sampling, revs))
        assert ours == packed != base
        (peft_folder / WEIGHTS).write_bytes(b"no tensors here")
        with pytest.raises(AdapterInvalid, match="the header says"):
            engine.add_folder(peft_folder, tmp_path / "packed")


@pytest.mark.late
def test_adapters_are_packed_for_blocks_that_a_draft_model_shares(
    peft_folder, model_dir, adapters_beside, prompt, tmp_path
) -> None:
    more = {"speculation": "draft", "draft_model": str(model_dir)}
    config = EngineConfig(model=str(model_dir), device="cpu", num_blocks=64, slots=4, **more)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    with Engine(config) as engine:
        info = engine.info
        ours = adapters_beside(info.draft_block_bytes)[0].manifest
        rev = engine.add_folder(peft_folder, tmp_path / "packed")
        engine.add_adapter(ours)
        answers = engine.generate([prompt(9)] * 3, sampling, [None, rev, ours.rev])
        assert answers[1].tokens == answers[2].tokens != answers[0].tokens
    share = {"draft_bytes": info.draft_block_bytes}
    layout = packed_layout(read_spec(model_dir), block_size=16, dtype="float32", **share)
    assert (layout.id, layout.block_bytes) == (info.layout, info.block_bytes)
    assert layout_of(info) == layout
    packed = asyncio.run(
        pack(
            peft_folder, model=model_dir, block_size=16, dtype="float32", out_dir=tmp_path, **share
        )
    )
    assert packed.layout == info.layout
    assert Path(packed.path).read_bytes() == Path(ours.path).read_bytes()


def test_a_refused_folder_is_adapter_invalid_with_its_reason(
    peft_folder, model_dir, tmp_path
) -> None:
    async def packing() -> None:
        await pack(peft_folder, model=model_dir, block_size=16, dtype="float32", out_dir=tmp_path)

    (peft_folder / WEIGHTS).write_bytes(b"no tensors here")
    with pytest.raises(AdapterInvalid) as caught:
        asyncio.run(packing())
    assert caught.value.reason.startswith("E_") and caught.value.message


def test_a_packer_that_cannot_write_is_an_error_of_ours(peft_folder, model_dir, tmp_path) -> None:
    nowhere = tmp_path / "missing"
    with pytest.raises(EngineError) as caught:
        asyncio.run(
            pack(peft_folder, model=model_dir, block_size=16, dtype="float32", out_dir=nowhere)
        )
    assert not isinstance(caught.value, AdapterInvalid) and str(nowhere) in caught.value.message


FLOOD = """
import socket, sys
from engine.messages import Starting
from engine.framing import encode_frame
sock = socket.socket(fileno=int(sys.argv[1]))
word = "x" * 1000
for number in range(20_000):  # 20 MB
    sock.sendall(encode_frame(Starting(word, float(number))))
"""


class FloodClient(EngineClient):
    program = ("-c", FLOOD)


def test_what_nobody_takes_is_not_read() -> None:
    """Or a daemon that is behind would hold all that the engine has ever said."""

    async def main() -> None:
        client = FloodClient()
        await client.start(EngineConfig(model="none"))
        seen = 0
        while seen < EVENTS_AHEAD or client.events.qsize() > seen:  # until it grows no more
            seen = client.events.qsize()
            await asyncio.sleep(0.1)
        frame = len(encode_frame(Starting("x" * 1000, 1.0)))
        assert seen <= EVENTS_AHEAD + READ_BYTES // frame + 1
        assert client.state == "starting"  # it waits; it was not hung up on
        async with asyncio.timeout(20):
            told = [await client.events.get() for _ in range(20_000)]
            assert isinstance(await client.events.get(), Fatal)
        assert [event.fraction for event in told] == list(range(20_000))  # type: ignore[union-attr]
        await client.stop(5)

    asyncio.run(main())


def test_a_client_that_is_behind_can_be_stopped() -> None:
    async def main() -> None:
        client = FloodClient()
        await client.start(EngineConfig(model="none"))
        while client.events.qsize() <= EVENTS_AHEAD:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await client.stop(0.1)
        assert client.returncode is not None

    asyncio.run(main())


CREW = """
import signal, socket, subprocess, sys
from engine.messages import Starting
from engine.framing import encode_frame
sock = socket.socket(fileno=int(sys.argv[1]))
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
other.send_signal(signal.SIGSTOP)
sock.sendall(encode_frame(Starting("crew", float(other.pid))))
signal.pause()
"""


class CrewClient(EngineClient):
    program = ("-c", CREW)


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_rank_that_hangs_ends_with_the_engine(way) -> None:
    """Or it would keep its GPU from those who are started next."""

    async def main() -> None:
        client = CrewClient()
        await client.start(EngineConfig(model="none"))
        [told] = await until(client, lambda event: isinstance(event, Starting))
        assert isinstance(told, Starting)
        other = os.pidfd_open(int(told.fraction))
        try:
            if way == "killed":
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
                await until(client, lambda event: isinstance(event, Fatal))
            else:
                await client.stop(0.0)
            ended, _, _ = select.select([other], [], [], 10)
            if not ended:
                signal.pidfd_send_signal(other, signal.SIGKILL)
            assert ended, "it outlived the engine"
        finally:
            os.close(other)

    asyncio.run(main())
