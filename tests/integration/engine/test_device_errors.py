"""A card that fails: no memory in the middle of a step, an illegal access.  Injected, in a process.

Either is the end of that process: what it holds cannot be trusted.  Its requests end with an error
that names the cause, and the next process answers as the first one did.
"""

import asyncio
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.messages import SamplingParams, SequenceDelta, Submit
from lorad.service.engine_link import EngineLink
from lorad.service.events import EventRing

#: The engine's process, whose next forward pass fails once the file `flag` is there.  A step takes
#: as long as a real model's, so that nobody has ended by then.
PROGRAM = """
import os, time, torch
from engine import process
from engine.runner import Runner

launch = Runner.launch

def fails(self, work):
    if os.path.exists({flag!r}):
        os.unlink({flag!r})
        raise {error}
    time.sleep(0.02)
    return launch(self, work)

Runner.launch = fails
process.run()
"""
ERRORS = {
    "no memory": 'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")',
    "illegal access": 'RuntimeError("CUDA error: an illegal memory access was encountered")',
}


def submit(name: str, max_tokens: int) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Submit(request_id=name, prompt=[5, 6, 7], sampling=sampling)


class Reader:
    """The deltas of one request."""

    def __init__(self, link: EngineLink, name: str, max_tokens: int) -> None:
        self.deltas: list[SequenceDelta] = []
        self.over = asyncio.Event()
        link.submit(submit(name, max_tokens), self.take)

    def take(self, delta: SequenceDelta) -> None:
        assert not self.over.is_set(), "told of after its end"
        self.deltas.append(delta)
        if delta.finish_reason:
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]


@pytest.mark.parametrize(
    "error", ["illegal access", pytest.param("no memory", marks=pytest.mark.late)]
)
def test_a_card_that_fails_in_a_step_ends_its_requests_with_the_cause(
    model_dir: Path, tmp_path: Path, error: str
) -> None:
    flag = tmp_path / "fail"

    class Client(EngineClient):
        program = ("-c", PROGRAM.format(flag=str(flag), error=ERRORS[error]))

    async def main() -> None:
        config = EngineConfig(
            model=str(model_dir), device="cpu", num_blocks=64, threads=1, deterministic=True
        )
        events = EventRing()
        link = EngineLink(config, events, new_client=Client, first_pause=0.0)
        link.start()
        try:
            async with asyncio.timeout(60):
                await link.ready.wait()
                before = Reader(link, "before", 6)
                await before.over.wait()
                running = [Reader(link, f"running {n}", 150) for n in range(3)]
                while not all(reader.tokens for reader in running):
                    await asyncio.sleep(0.01)
                flag.touch()
                for reader in running:
                    await reader.over.wait()
                    end = reader.deltas[-1]
                    assert (end.finish_reason, end.code) == ("error", "engine_restarting")
                    assert "CUDA" in end.message
                    said = reader.tokens[:6]
                    assert said == before.tokens[: len(said)]
                assert link.state == "engine_restarting"
                await link.ready.wait()
                again = Reader(link, "again", 6)
                await again.over.wait()
                assert again.tokens == before.tokens and link.restarts == 1
                died = [item for item in events.newest(20) if item.type == "engine.died"]
                assert len(died) == 1 and "CUDA" in died[0].message
        finally:
            await link.stop(5)

    asyncio.run(main())
