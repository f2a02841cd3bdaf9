"""An engine of two processes, over gloo: what it says equals what one process says, and what it
does when one of the two dies.

The engine of two looks ahead, so that tokens are drawn on the first rank alone and the second one
has to be given them.
"""

import asyncio
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import speculation
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.errors import ConfigError, EngineError
from engine.layout import layout_of
from engine.messages import Evict, Fatal, SamplingParams
from engine.sequence import Sequence
from engine.verify_messages import VerifyRevision

WAIT = 120.0
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 16,
    "num_blocks": 64,  # not enough for all that is asked for at once
    "max_num_seqs": 8,
    "slots": 3,
    "ram_cache": 1 << 20,
    "speculation": "ngram",
    "threads": 1,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_folder(adapter: Any, folder: Path) -> Path:
    """As PEFT saves it."""
    folder.mkdir()
    tensors = {}
    for (layer, module), (a, b) in adapter.tensors.items():
        part = "self_attn" if module in ATTENTION else "mlp"
        stem = f"base_model.model.model.layers.{layer}.{part}.{module}"
        tensors[f"{stem}.lora_A.weight"] = a
        tensors[f"{stem}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": adapter.manifest.max_rank,
        "lora_alpha": 2,
        "target_modules": sorted({module for _, module in adapter.tensors}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Side:
    """One engine, and its own packed files of the same adapters."""

    def __init__(self, model: Path, folders: list[Path], store: Path, ranks: int) -> None:
        config = EngineConfig(model=str(model), tensor_parallel=ranks, **SETTINGS)
        self.engine = Engine(config, lookahead=ranks > 1)
        self.core = self.engine.core
        self.revs = [self.engine.add_folder(folder, store) for folder in folders]
        self.store = store

    def ask(
        self, prompts: list[list[int]], adapters: list[int | None], **sampling: Any
    ) -> list[Generation]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
        revs = [None if which is None else self.revs[which] for which in adapters]
        return self.engine.generate(prompts, params, revs)

    def packed(self, adapter: int) -> int:
        """Bytes of its packed file."""
        [path] = (self.store / self.revs[adapter]).glob("packed-*.bin")
        return path.stat().st_size


@pytest.fixture(scope="module")
def sides(
    model_dir: Path, adapters: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Side, Side]]:
    """Of one process, and of two."""
    root = tmp_path_factory.mktemp("ranks")
    folders = [write_folder(a, root / f"adapter-{n}") for n, a in enumerate(adapters)]
    both = [Side(model_dir, folders, root / f"packed-{n}", n) for n in (1, 2)]
    yield both[0], both[1]
    for side in both:
        side.engine.close()


def equal(sides: tuple[Side, Side], ask: Callable[[Side], list[Generation]]) -> list[Generation]:
    one, two = (ask(side) for side in sides)
    assert [s.finish_reason for s in two] == [s.finish_reason for s in one]
    assert [s.tokens for s in two] == [s.tokens for s in one]
    return two


@pytest.mark.late
def test_mixed_batches_of_more_adapters_than_slots_say_the_same(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]]
) -> None:
    prompts = [prompt(11 + 7 * n, seed=n) for n in range(10)]
    which = [None, 0, 1, 2, 3, 0, None, 1, 2, 3]
    equal(sides, lambda side: side.ask(prompts, which, max_tokens=20))
    drawn = equal(sides, lambda side: side.ask(prompts, which, temperature=0.7, seed=5))
    assert len({tuple(one.tokens) for one in drawn}) > 1


@pytest.mark.late
def test_what_is_cached_is_found_and_says_the_same(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]]
) -> None:
    long = prompt(70, seed=40)
    for which in (None, 1):
        equal(sides, lambda side, w=which: side.ask([long], [w]))
        [again] = equal(sides, lambda side, w=which: side.ask([long], [w]))
        assert again.cached_tokens == 64


@pytest.mark.late
def test_sequences_that_give_way_go_on_with_the_same_tokens(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]]
) -> None:
    before = sides[1].core.scheduler.num_preemptions
    prompts = [prompt(90, seed=50 + n) for n in range(8)]
    equal(sides, lambda side: side.ask(prompts, [None, 0] * 4, max_tokens=60, ignore_eos=True))
    assert sides[1].core.scheduler.num_preemptions > before


@pytest.mark.late
def test_prompts_have_the_same_log_probabilities(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]]
) -> None:
    one, two = (
        side.ask([prompt(30, seed=60)], [2], prompt_logprobs=0, logprobs=1)[0] for side in sides
    )
    for name in ("prompt_logprobs", "logprobs"):
        a, b = ([p.logprob for p in getattr(s, name) if p is not None] for s in (one, two))
        torch.testing.assert_close(torch.tensor(b), torch.tensor(a), atol=1e-4, rtol=1e-4)


@pytest.mark.late
def test_an_adapter_that_comes_back_from_disk_says_the_same(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]]
) -> None:
    ids = prompt(25, seed=70)
    [before] = equal(sides, lambda side: side.ask([ids], [1]))
    for side in sides:
        side.core.take(Evict(command_id=0, rev=side.revs[1], to="disk"))
    [after] = equal(sides, lambda side: side.ask([ids], [1]))
    assert after.tokens == before.tokens


@pytest.mark.late
def test_a_step_with_adapters_has_the_collectives_of_one_without(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]]
) -> None:
    """One for embeddings, two a layer, one for logits, and one for what was drawn."""
    side = sides[1]
    assert side.core.crew is not None
    ranks, runner = side.core.crew.ranks, side.core.runner
    for which in ([None] * 3, [0, 1, 2], [3, None, 0]):
        before = ranks.count, runner.forward_passes
        side.ask([prompt(9, seed=80 + n) for n in range(3)], which, max_tokens=8)
        count, passes = ranks.count - before[0], runner.forward_passes - before[1]
        assert count == passes * (1 + 2 * 2 + 1 + 1)


@pytest.mark.late
def test_each_rank_holds_its_part_of_an_adapter(sides: tuple[Side, Side]) -> None:
    one, two = (side.core.residency.manifest(side.revs[0]) for side in sides)
    assert one.rev == two.rev and one.layout != two.layout
    assert one.true_bytes / 2 < two.true_bytes < one.true_bytes
    assert sides[1].packed(0) == 2 * two.num_blocks * sides[1].core.info.block_bytes


@pytest.mark.late
def test_verification_is_refused_by_name(sides: tuple[Side, Side]) -> None:
    core = sides[1].core
    core.take(VerifyRevision(command_id=77, rev=sides[1].revs[0], probe="/nowhere"))
    [answer] = core.step().answers
    assert answer.code and "tensor_parallel" in answer.message


@pytest.mark.late
def test_drafts_are_judged_as_one_process_would_go_on(
    sides: tuple[Side, Side], prompt: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what one process has answered, but for every fifth token."""
    monkeypatch.setattr(speculation, "WORTH", 0.0)
    prompts, which = [prompt(9 + n, seed=90 + n) for n in range(3)], [None, 0, None]
    one, two = sides
    known = [told.tokens for told in one.ask(prompts, which, max_tokens=40, ignore_eos=True)]

    def guess(seq: Sequence, most: int) -> tuple[int, ...]:
        right = known[seq.num_prompt - 9]
        place = range(seq.num_generated, len(right))[:most]
        return tuple((right[n] + (n % 5 == 0)) % 256 for n in place)

    monkeypatch.setattr(two.core.scheduler.speculation, "_guess", guess)
    before = two.core.stats.accepted_by_rev.total()
    told = two.ask(prompts, which, max_tokens=40, ignore_eos=True)
    assert [one.tokens for one in told] == known
    assert two.core.stats.accepted_by_rev.total() > before + 20


# ----------------------------------------------------------------- death
def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


async def started(model: Path) -> tuple[EngineClient, int]:
    """An engine process of two ranks, and the id of the second one."""
    client = EngineClient()
    await client.start(EngineConfig(model=str(model), tensor_parallel=2, **SETTINGS))  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT):
        info = await client.wait_ready()
    assert info.tensor_parallel == 2 and layout_of(info).id == info.layout
    assert client.pid is not None
    [other] = children(client.pid)
    return client, other


@pytest.mark.late
def test_a_rank_that_dies_ends_the_engine_with_a_word(model_dir: Path) -> None:
    async def scene() -> None:
        client, other = await started(model_dir)
        os.kill(other, signal.SIGKILL)
        async with asyncio.timeout(WAIT):
            while not isinstance(event := await client.events.get(), Fatal):
                pass
        assert "rank 1 has died: signal 9" in event.message
        assert client.state == "dead" and client.returncode == 1
        await client.stop()

    asyncio.run(scene())


@pytest.mark.late
def test_no_rank_outlives_the_first_one(model_dir: Path) -> None:
    async def scene() -> None:
        client, other = await started(model_dir)
        ended = os.pidfd_open(other)
        try:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            ready, _, _ = await asyncio.to_thread(select.select, [ended], [], [], WAIT)
            assert ready
        finally:
            os.close(ended)
        await client.stop()

    asyncio.run(scene())


@pytest.mark.late
def test_a_process_has_one_engine_of_several_ranks(
    sides: tuple[Side, Side], model_dir: Path
) -> None:
    assert sides[1].core.crew is not None
    with pytest.raises(ConfigError, match="tensor_parallel = 2: this process has one already"):
        Engine(EngineConfig(model=str(model_dir), tensor_parallel=2, **SETTINGS))


@pytest.mark.slow
def test_what_all_ranks_find_wrong_the_first_one_says(model_dir: Path, tmp_path: Path) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")

    async def scene() -> None:
        client = EngineClient()
        await client.start(EngineConfig(model=str(tmp_path), tensor_parallel=2, **SETTINGS))
        async with asyncio.timeout(WAIT):
            with pytest.raises(EngineError, match=r"lacks the tensor norm\.weight") as refused:
                await client.wait_ready()
        assert refused.value.code == "model_unsupported"
        await client.stop()

    asyncio.run(scene())
