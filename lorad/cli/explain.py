"""explain: why an adapter is or is not served now, what happens next, and when.

Goes in: a name.  Comes out: the answer in two lines, then the numbers behind it.  Knows the wire
and nothing behind it.
"""

from typing import Annotated

import typer

from lorad import wire_explain
from lorad.cli.complete import any_name
from lorad.cli.listing import checked_name, short
from lorad.cli.output import (
    UNKNOWN,
    human_age,
    human_bytes,
    plain,
    print_document,
    print_line,
    print_pairs,
)
from lorad.cli.session import session


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("explain")(explain)


def explain(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", autocompletion=any_name, show_default=False)
    ],
) -> None:
    """Say whether and why an adapter is served, and what comes next."""
    s = session(context)
    told = s.client.explain(checked_name(name))
    if s.options.machine:
        print_document(told, s.options)
        return
    if s.options.output == "name":
        print_line(plain(told.name))
        return
    print_pairs(
        [
            ("name", f"{told.name}  {short(told.rev)}"),
            ("state", f"{told.state}, tier {told.tier}"),
            *([("replica", told.replica)] if told.replica else []),
            ("served", "yes" if told.served else "no"),
            ("why", told.why),
            ("next", told.next + _when(told.next_seconds)),
            *([("try", told.hint)] if told.hint else []),
            *_refused(told),
            ("requests", f"{told.running} running, {told.waiting} waiting{_turn(told)}"),
            *(
                [("load", f"{_seconds(told.load_seconds)} from where it is")]
                if told.load_seconds
                else []
            ),
        ]
    )
    if told.room is not None:
        print_line("room")
        print_pairs(_room(told.room))
    if told.cost is not None:
        print_line("cost")
        print_pairs(_cost(told.cost))


def _room(room: wire_explain.ExplainedRoom) -> list[tuple[str, str]]:
    pairs = [
        ("  free", f"{human_bytes(room.free_bytes)} of {human_bytes(room.total_bytes)}"),
        ("  slots", f"{room.free_slots} free"),
        (
            "  would go",
            f"{_many(room.idle_adapters, 'idle adapter')} with {human_bytes(room.idle_bytes)}, "
            f"and {human_bytes(room.kv_cached_bytes)} of cached KV",
        ),
        (
            "  kv",
            f"{human_bytes(room.kv_active_bytes)} in use; "
            f"{human_bytes(room.kv_floor_bytes)} of the room are for it alone",
        ),
    ]
    if room.reserved_for:
        pairs.append(("  kept for", room.reserved_for))
    pairs += [("  held by", _holder(holder)) for holder in room.holders]
    if room.more_holders:
        pairs.append(("  held by", f"{room.more_holders} more"))
    return pairs


def _holder(holder: wire_explain.Holder) -> str:
    words = [holder.name, human_bytes(holder.num_bytes)]
    if holder.pinned:
        words.append("pinned")
    if holder.draining:
        words.append("draining")
    if holder.running:
        words.append(f"{holder.running} running, {holder.tokens_left} tokens to go at most")
    return "  ".join(words)


def _cost(cost: wire_explain.ExplainedCost) -> list[tuple[str, str]]:
    place = f"as number {cost.place} of {cost.victims}" if cost.place else "not as things are"
    held = f", held for {human_age(cost.held_seconds)}" if cost.held_seconds else ""
    return [
        ("  policy", cost.policy + (", pinned" if cost.pinned else "")),
        ("  priority", str(cost.priority)),
        (
            "  use",
            f"{cost.uses:.2f} requests of late, {cost.uses_a_minute:.2f} a minute; "
            f"{100 * cost.reuse_chance:.0f}% likely within the next minute",
        ),
        ("  return", f"{_seconds(cost.return_seconds)}, if it left the GPU now"),
        ("  size", human_bytes(cost.num_bytes)),
        ("  saves", f"{_seconds(cost.saved_seconds)} of loading in an hour, for each GiB"),
        ("  makes way", place + held),
        (
            "  moves",
            f"{_many(cost.loads, 'load')}, {_many(cost.evictions, 'eviction')}, "
            f"{_many(cost.thrashes, 'load')} soon after one",
        ),
    ]


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _refused(told: wire_explain.Explained) -> list[tuple[str, str]]:
    """Where earlier content is what serves, or would: why it is not the newest."""
    if not told.reason or told.state in ("quarantined", "missing"):
        return []
    return [("refused", f"its newest content, {told.reason}: loractl show {told.name} says more")]


def _turn(told: wire_explain.Explained) -> str:
    return f"; turn {told.queue_turn} of {told.queue_turns}" if told.queue_turn else ""


def _when(seconds: float | None) -> str:
    return f" (in {_seconds(seconds)})" if seconds else ""


def _seconds(seconds: float | None) -> str:
    """`1.6 ms`, `0.25 s`, `3m`."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 60:
        return human_age(seconds)
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"
