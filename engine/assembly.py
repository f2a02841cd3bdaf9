"""What runs the steps, put together for a device: planner, batcher, graphs, sampler, runner.

Goes in: a configuration without `auto` values, the model and the arena.  Comes out: a `Runner`, and
after `warm_up` everything that it will ever allocate, allocated, and every kernel compiled.  Knows
nothing of requests.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from engine.adapters.device_plan import DevicePlanner
from engine.adapters.device_slots import DeviceSlots
from engine.adapters.plan import StepPlanner
from engine.adapters.slots import SlotRow
from engine.batch import Batcher
from engine.config import EngineConfig
from engine.draft_model import DraftModel
from engine.drafting import pass_rows
from engine.ladder import Ladder
from engine.layout import BlockLayout
from engine.memory.arena import Arena
from engine.messages import PackedManifest
from engine.models.decoder import Decoder
from engine.rehearsal import pretended, ranks_of, rehearse, rehearse_drafts
from engine.runner import Runner
from engine.sampler import Sampler, SamplerLimits
from engine.speculation import ROWS, draft_rows
from engine.verifier import Verifier

Progress = Callable[[str, float], None]


def is_card(device: torch.device) -> bool:
    """Whether steps go through the kernels, and are laid out for them."""
    return device.type == "cuda"


class PlannerLimits(Protocol):
    """Of a configuration: how many slots there are, and what the largest step is."""

    @property
    def slots(self) -> int: ...
    @property
    def max_rank(self) -> int: ...
    @property
    def max_batch_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...


def make_planner(
    config: PlannerLimits,
    arena: Arena,
    rows: Mapping[int, SlotRow],
    manifest_of: Callable[[str], PackedManifest],
    room: int = 0,
) -> StepPlanner:
    """The step planner, with all that it will ever allocate.  `rows` is the slot table's own,
    `room` the model's."""
    if not is_card(arena.device):
        return StepPlanner(arena, rows, manifest_of)
    slots = DeviceSlots(
        arena.layout, num_slots=config.slots, max_rank=config.max_rank, device=arena.device
    )
    device = DevicePlanner(
        arena,
        slots,
        max_rows=config.max_batch_tokens,
        max_seqs=config.max_num_seqs,
        max_rank=config.max_rank,
        deterministic=config.deterministic,
        room=room,
    )
    return StepPlanner(arena, rows, manifest_of, device)


def make_runner(
    config: EngineConfig,
    model: Decoder,
    arena: Arena,
    planner: StepPlanner,
    vocab_size: int,
    *,
    lookahead: bool,
) -> Runner:
    """A runner for steps within `config`, with all that it will ever allocate but its graphs."""
    draws = config.max_num_seqs + draft_rows(config.max_num_seqs, config.draft_tokens)
    ladder = None
    if is_card(arena.device) and not config.deterministic:
        ladder = Ladder(
            max_seqs=config.max_num_seqs,
            mixed_rows=min(config.graph_tokens, config.max_batch_tokens),
            often=config.mixed_tokens,
            max_draws=draws,
        )
    batcher = Batcher(
        max_rows=config.max_batch_tokens,
        max_seqs=config.max_num_seqs,
        max_draws=draws,
        max_blocks=-(-(config.max_model_len or model.spec.default_length) // config.block_size),
        block_size=config.block_size,
        device=arena.device,
        ladder=ladder,
        lookahead=lookahead,
        plan_words=planner.plan_words,
    )
    limits = SamplerLimits(vocab_size, model.spec.eos_token_ids, model.spec.num_ids)
    sampler = Sampler(limits, device=arena.device, max_rows=draws)
    return Runner(model, arena, batcher, planner, sampler)


def make_draft_model(
    config: EngineConfig, model: Decoder, arena: Arena, runner: Runner
) -> DraftModel:
    """What drafts for the sequences of `runner`, with all that it will allocate but its graphs."""
    rows = pass_rows(min(config.mixed_tokens, config.max_batch_tokens))
    seqs = min(config.max_num_seqs, ROWS // 2)  # of a draft of one token each; see `Speculation`
    ladder = None
    if is_card(arena.device) and not config.deterministic:
        ladder = Ladder(max_seqs=seqs, mixed_rows=min(config.graph_tokens, rows), often=rows)
    batcher = Batcher(
        max_rows=rows,
        max_seqs=seqs,
        max_blocks=-(-(config.max_model_len or model.spec.default_length) // config.block_size),
        block_size=config.block_size,
        device=arena.device,
        ladder=ladder,
        lookahead=True,
    )
    return DraftModel(
        model,
        [arena.draft_kv(layer) for layer in range(model.spec.num_layers)],
        batcher,
        runner.sampler,
        longest=config.draft_tokens,
        max_seqs=seqs,
        vocab_size=runner.vocab_size,
    )


def warm_up(
    runner: Runner,
    drafts: DraftModel | None,
    verifier: Verifier,
    config: EngineConfig,
    layout: BlockLayout,
    progress: Progress,
) -> None:
    """Capture the graphs, then run the largest steps once: nothing is allocated after it.

    Only a card has any of this to do.
    """
    warm_up_steps(runner, drafts, config, layout, progress)
    if config.device == "cuda":
        for rank in ranks_of(config):
            verifier.rehearse(*pretended(config, layout, rank, config.num_blocks))


def warm_up_steps(
    runner: Runner,
    drafts: DraftModel | None,
    config: EngineConfig,
    layout: BlockLayout,
    progress: Progress,
) -> None:
    """The part of it that all ranks of a model do together."""
    if config.device != "cuda":
        return
    runner.capture(lambda fraction: progress("graphs", 0.85 + 0.1 * fraction))
    if drafts is not None:
        drafts.capture()
    progress("warming up", 0.95)
    blocks, longest = config.num_blocks, config.max_model_len
    rehearse(runner, config, layout, max_len=longest, num_blocks=blocks)
    if drafts is not None:
        rehearse_drafts(drafts, config, max_len=longest, num_blocks=blocks)
