"""plan: what fits on a card, and what adapters cost, before anything is bought or started.

Goes in: a model's folder, or none for the running daemon's base; ranks, requests, a size of memory.
Comes out: a table, or `lorad/plan.v1`.  Reads config.json here; the rest is `lorad.capacity`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorad.cli.output import print_document
from lorad.cli.plan_table import show
from lorad.cli.session import Session, Usage, session
from lorad.wire_status import ModelStatus, PoolPicture, Status

if TYPE_CHECKING:
    from engine.client import ModelSpec
    from engine.layout import BlockLayout
    from lorad.capacity_speed import Machine
    from lorad.wire_plan import PlannedArena, Source

AUTO = "auto"


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("plan")(plan)


def _module(incomplete: str) -> list[str]:
    """The last of several words with commas between."""
    from engine.layout import MODULES, PAIRED_ENDS
    from lorad.capacity import TARGETS

    before, comma, word = incomplete.rpartition(",")
    known = (*TARGETS, *MODULES, *PAIRED_ENDS)
    return [f"{before}{comma}{one}" for one in known if one.startswith(word)]


def _dtype(incomplete: str) -> list[str]:
    from engine.layout import ITEMSIZE

    return [one for one in ITEMSIZE if one.startswith(incomplete)]


def plan(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="With config.json; without it the daemon's base."),
    ] = None,
    rank: Annotated[
        str, typer.Option(metavar="RANK:COUNT,...", help="Adapters, such as 16:100,64:20.")
    ] = "16:100",
    targets: Annotated[
        str,
        typer.Option(
            metavar="MODULES",
            help="all, attention, mlp, or names of modules.",
            autocompletion=_module,
        ),
    ] = "all",
    requests: Annotated[
        int, typer.Option(metavar="N", min=0, max=65536, help="That run at once.")
    ] = 64,
    tokens: Annotated[
        int, typer.Option(metavar="L", min=1, help="Of each request, prompt and answer.")
    ] = 1024,
    shared_prompt: Annotated[
        int, typer.Option(metavar="P", min=0, help="Tokens that all requests begin with.")
    ] = 0,
    tenants: Annotated[
        int,
        typer.Option(metavar="T", min=0, help="That share it, each with its own adapter; 0: all."),
    ] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the card: 80GiB; auto asks this machine's.")
    ] = AUTO,
    utilization: Annotated[
        float, typer.Option(metavar="SHARE", min=0.05, max=0.98, help="That lorad may take.")
    ] = 0.9,
    blocks: Annotated[
        int, typer.Option(metavar="N", min=0, help="Of the arena, where they are known.")
    ] = 0,
    block_size: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="8, 16, 32 or 64; usually 16.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.", autocompletion=_dtype),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of adapters at once; the daemon's, or 1024."),
    ] = None,
    extra_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            max=65536,
            help="Token ids that adapters may bring; the daemon's, or 256.",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes a second of the card: 3.35TB; an H200's is known."
        ),
    ] = None,
) -> None:
    """Say how many adapters fit on a card, and what a step costs."""
    from engine.errors import EngineError
    from lorad import capacity

    s = session(context)
    try:
        ranks, modules = capacity.parse_ranks(rank), capacity.parse_targets(targets)
        speed = _machine(bandwidth)
    except ValueError as error:
        raise Usage(str(error)) from None
    try:
        base = _base(s, model, memory, utilization, blocks, block_size, dtype, extra_vocab)
        if tokens > base.spec.max_position:
            raise Usage(f"--tokens {tokens} is above the model's {base.spec.max_position}")
        wish = capacity.Wish(
            ranks=ranks,
            targets=modules,
            requests=requests,
            tokens=tokens,
            shared_prompt=shared_prompt,
            tenants=tenants or sum(count for _, count in ranks),
            slots=slots or base.slots,
        )
        done = capacity.plan(base.spec, base.layout, base.arena, wish, speed)
    except EngineError as error:
        raise Usage(error.message, hint=error.hint) from None
    if s.options.machine:
        print_document(done, s.options)
    else:
        show(done, s.options)


@dataclass(frozen=True, slots=True)
class _Base:
    spec: "ModelSpec"
    layout: "BlockLayout"
    arena: "PlannedArena"
    slots: int = 1024


def _generates(one: Status | ModelStatus) -> bool:
    """By its tasks: one whose engine is away says nothing of pooling."""
    return "generate" in one.tasks or (not one.tasks and one.pooling is None)


def _generating(status: Status) -> Status | ModelStatus:
    """The model that is planned for: of several the first one that generates."""
    each: Sequence[Status | ModelStatus] = status.models or (status,)
    found = next((o for o in each if _generates(o)), None)
    if found is None:
        raise Usage("a plan is of KV, and a pooling model has none")
    return found


def _one_engine(
    status: Status | ModelStatus,
) -> tuple[PoolPicture, int]:
    """The pool and the slots of one card; those of replicas are alike."""
    replicas = status.replicas if isinstance(status, ModelStatus) else ()
    one = next((each for each in replicas if each.pool is not None), status)
    return one.pool or PoolPicture(), one.slots_total


def _base(
    s: Session,
    model: Path | None,
    memory: str,
    utilization: float,
    blocks: int,
    block_size: int | None,
    dtype: str | None,
    extra_vocab: int | None,
) -> _Base:
    from engine.client import read_spec
    from engine.layout import ITEMSIZE
    from lorad import capacity
    from lorad.config_sections import Lora

    length, held, slots, held_bytes = 0, blocks, 1024, 0
    if model is None:
        status = _generating(s.client.status())
        pool, slots = _one_engine(status)
        model, length = Path(status.base), status.max_model_len
        if not (dtype or block_size or blocks or memory != AUTO):
            held = pool.total  # measured at its start, for its dtype and block size
            held_bytes = pool.block_bytes
        dtype, block_size = dtype or status.dtype, block_size or pool.block_size
        extra_vocab = status.extra_vocab if extra_vocab is None else extra_vocab
        if not block_size:
            raise Usage("the daemon's engine is not ready", hint="name the model's folder")
    spec = read_spec(model, extra_vocab=Lora().extra_vocab if extra_vocab is None else extra_vocab)
    dtype, block_size = dtype or spec.dtype, block_size or 16
    if dtype not in ITEMSIZE:
        raise Usage(f"unknown --dtype {dtype}: one of {', '.join(ITEMSIZE)}")
    if block_size not in (8, 16, 32, 64):
        raise Usage("--block-size is 8, 16, 32 or 64")
    layout = spec.block_layout(block_size=block_size, dtype=dtype)
    if 0 < held_bytes < layout.block_bytes:
        raise Usage(
            "the daemon's model is shared by several GPUs, and a plan is of one",
            hint=f"for what one GPU would hold: loractl plan {model} --memory 80GiB",
        )
    if held_bytes > layout.block_bytes:  # a model that drafts has a share of each
        beside = held_bytes - layout.block_bytes
        layout = spec.block_layout(block_size=block_size, dtype=dtype, draft_bytes=beside)
    if held:
        source: Source = "blocks" if blocks else "daemon"
        arena = capacity.known_arena(spec, layout, block_size, held, source, max_model_len=length)
        return _Base(spec, layout, arena, slots)
    try:
        arena = capacity.estimated_arena(spec, layout, block_size, _memory(memory), utilization)
    except ValueError as error:
        raise Usage(str(error)) from None
    return _Base(spec, layout, arena, slots)


def _memory(text: str) -> int:
    """Bytes; `auto` is the first card of this machine."""
    from lorad.cli.card import cards
    from lorad.config_values import parse_size

    if text != AUTO:
        try:
            return parse_size(text)
        except ValueError as error:
            raise ValueError(f"--memory {text}: expected {error}") from None
    found, why = cards()
    if not found:
        raise Usage(f"no card to ask for its memory: {why}", hint="--memory 80GiB, or --blocks N")
    return found[0].total_bytes


def _machine(bandwidth: str | None) -> "Machine":
    from lorad.capacity_speed import H200_BANDWIDTH, Machine
    from lorad.config_values import parse_size

    if bandwidth is None:
        return Machine(H200_BANDWIDTH)
    try:
        size = parse_size(bandwidth.removesuffix("/s"))
    except ValueError as error:
        raise ValueError(f"--bandwidth {bandwidth}: expected {error}") from None
    if size <= 0:
        raise ValueError("--bandwidth must be above 0")
    return Machine(size, measured=False)
