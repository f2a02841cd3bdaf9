"""How many bytes of a card are taken, by what: measured on it before the arena is made.

Goes in: a model that is loaded.  Comes out: a `Use`.  Runs the largest steps over a small arena and
captures a few graphs; what they took goes back to the card.  Knows nothing of requests.
"""

import gc
from dataclasses import dataclass

import torch

from engine.assembly import Progress, make_draft_model, make_planner, make_runner
from engine.compile_ahead import compile_ahead
from engine.config import EngineConfig
from engine.ladder import LATE_GRAPHS
from engine.layout import BlockLayout
from engine.memory.arena import Arena
from engine.messages import PackedManifest
from engine.models.decoder import Decoder
from engine.rehearsal import rehearse, rehearse_drafts
from engine.runner import Runner

#: What the driver keeps for a graph, at the least.
LEAST_GRAPH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes of a card, measured."""

    total: int
    room: int  # what the arena may take
    other: int
    steps: int
    graphs: int
    num_graphs: int


def measure(
    config: EngineConfig,
    layout: BlockLayout,
    model: Decoder,
    draft: Decoder | None,
    vocab_size: int,
    progress: Progress,
) -> Use:
    """Run the largest steps over a small arena, and capture a few graphs, for what all will take.

    What the steps needed goes back to the card, and is asked for again by `warm_up`.
    """
    device, spec = torch.device(config.device), model.spec
    rows = config.max_batch_tokens
    before, total = used_bytes(device), torch.cuda.mem_get_info(device)[1]
    blocks = -(-rows // config.block_size) + config.max_num_seqs
    arena = Arena(
        spec,
        layout,
        block_size=config.block_size,
        num_blocks=blocks,
        device=device,
        draft=draft.spec if draft is not None else None,
    )
    planner = make_planner(config, arena, {}, _no_manifest, model.room)
    runner = make_runner(config, model, arena, planner, vocab_size, lookahead=True)
    drafts = make_draft_model(config, draft, arena, runner) if draft is not None else None
    progress("kernels", 0.8)
    if model.ranks is not None and model.ranks.rank:
        model.ranks.least(0)  # the first compiles for all: they share the compiler's cache
    compile_ahead(model, planner, runner.ladder)
    if model.ranks is not None and not model.ranks.rank:
        model.ranks.least(0)
    progress("memory", 0.82)
    made = used_bytes(device)
    graphs, num_graphs = _measure_graphs(runner, device)
    if drafts is not None:  # few, and all of them are captured
        before_drafts = used_bytes(device)
        drafts.capture()
        graphs += used_bytes(device) - before_drafts
        num_graphs += len(drafts.ladder.all) if drafts.ladder else 0
    captured = used_bytes(device)
    longest = config.max_model_len or spec.default_length
    if runner.graphs is not None:
        runner.graphs.use_graphs = False  # eager steps need the most
    rehearse(runner, config, layout, max_len=longest, num_blocks=blocks)
    if drafts is not None:
        rehearse_drafts(drafts, config, max_len=longest, num_blocks=blocks)
    free, _ = torch.cuda.mem_get_info(device)
    peak = total - free - (captured - made) - arena.bytes.numel()
    del planner, runner, drafts, arena
    used_bytes(device)
    room = int(total * config.gpu_memory_utilization) - peak - graphs
    return Use(
        total=total,
        room=room,
        other=max(before - weight_bytes(model) - weight_bytes(draft), 0),
        steps=max(peak - before, 0),
        graphs=graphs,
        num_graphs=num_graphs,
    )


@torch.inference_mode()
def _measure_graphs(runner: Runner, device: torch.device) -> tuple[int, int]:
    """Bytes of all graphs, and how many there may be.

    Three are captured, of the most rows: the first two tell what all of them share and what their
    kernels take when they are loaded, the third what each has of its own.  Where there are some
    with adapters, it is one of those: no others have more kernels.
    """
    usual = runner.usual()
    if not usual:
        return 0, 0
    largest = [n for n, (rung, _) in enumerate(usual) if rung == usual[0][0]]
    picked = list(dict.fromkeys((0, *largest[:0:-1], *range(1, len(usual)))))[:3]
    steps = [used_bytes(device)]
    for rung, plan in (usual[n] for n in picked):
        runner.capture_one(rung, plan)
        steps.append(used_bytes(device))
    each = max(steps[-1] - steps[-2], LEAST_GRAPH_BYTES)
    count = len(usual) + LATE_GRAPHS
    return steps[-1] - steps[0] + each * (count - len(picked)), count


def used_bytes(device: torch.device) -> int:
    """Bytes of the card in use, torch's cache not counted."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _no_manifest(rev: str) -> PackedManifest:
    raise AssertionError(f"{rev}: no adapter is used in a rehearsal")


def weight_bytes(model: Decoder | None) -> int:
    """With what is stored beside them; shared tensors count once; no model has none."""
    if model is None:
        return 0
    whole = (t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
    return sum({s.data_ptr(): s.nbytes() for s in whole}.values())
