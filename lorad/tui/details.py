"""What the drawer tells about an adapter: is it served, what it is, what happened to it.

Goes in: a name; the board, and the daemon's answers to `show` and `explain`.  Comes out: lines.
What was not answered yet, or could not be, is said where it would stand.
"""

from collections.abc import Callable

import msgspec

from lorad import wire, wire_explain
from lorad.spelling import split_digest
from lorad.tui.acts import Subject
from lorad.tui.draw import Glyphs, age, clock, duration, here, percent, rate, ratio, size
from lorad.tui.keys import KEYS
from lorad.tui.office import Answer, Client, Office
from lorad.tui.panel import Line
from lorad.tui.prose import LABEL, field, fields, heading, wrapped
from lorad.tui.slots import STATE_INKS
from lorad.tui.stage import Stage
from lorad.wire_stream import Board, Slot

_LEVEL_INKS = {"warn": "warn", "error": "bad"}
_MAX_EVENTS = 12


class AdapterDetail:
    """`name` may be that of a replaced revision, `acme/sql@9f31c2`."""

    tall = True

    def __init__(self, name: str, *, read_only: bool = False, asks: bool = True) -> None:
        self.name = name
        self.target = split_digest(name)[0]
        self._read_only, self._asks = read_only, asks
        self.shown: Answer[wire.AdapterDetail] | None = None
        self.explained: Answer[wire_explain.Explained] | None = None

    # ------------------------------------------------------------- asking
    def ask(self, office: Office, then: Callable[[], None]) -> None:
        def call(client: Client) -> tuple[wire.AdapterDetail, wire_explain.Explained]:
            return client.adapter(self.target), client.explain(self.target)

        def take(answer: Answer[tuple[wire.AdapterDetail, wire_explain.Explained]]) -> None:
            if answer.value is not None:
                self.shown = Answer(answer.value[0])
                self.explained = Answer(answer.value[1])
            else:
                self.shown = Answer(error=answer.error, hint=answer.hint)
            then()

        office.ask("detail", call, take)

    def as_json(self) -> str:
        value = self.shown.value if self.shown is not None else None
        return "" if value is None else msgspec.json.encode(value).decode()

    def subject(self) -> Subject | None:
        """What actions ask about; None before it is known."""
        shown = self.shown.value if self.shown is not None else None
        return None if shown is None else subject_of(shown.adapter)

    # ------------------------------------------------------------- telling
    def title(self) -> Line:
        return ((self.name, "title"),)

    def told(self, board: Board | None, width: int, glyphs: Glyphs) -> list[Line]:
        row = board.slots.get(self.name) if board is not None else None
        shown = self.shown.value if self.shown is not None else None
        adapter = shown.adapter if shown is not None else None
        out = self._head(row, adapter, width)
        if self.shown is not None and self.shown.error:
            out += field("asked", self.shown.error, width, "bad")
            out += field("try", self.shown.hint, width) if self.shown.hint else []
        elif self.shown is None:
            said = "asking the daemon" if self._asks else "a recording has no more than this"
            out.append(((said, "faint"),))
        if self.explained is not None and self.explained.value is not None:
            out += [(), heading("SERVED", width, glyphs), *_served(self.explained.value, width)]
        if row is not None:
            out += [(), heading("ON THE GPU", width, glyphs), *_slot(row, width, glyphs)]
        if shown is not None:
            out += self._content(shown, width, glyphs)
        if self.target and not self._read_only:
            out += [(), heading("ACTIONS", width, glyphs), *_actions(width)]
        return out

    def _head(self, row: Slot | None, adapter: wire.Adapter | None, width: int) -> list[Line]:
        known = row or adapter
        if known is None:
            return []
        pinned = "pinned  " if known.pinned else ""
        line: Line = (
            (known.state, STATE_INKS.get(known.state, "") or "strong"),
            (f"  {pinned}priority {known.priority}", ""),
            (f"  tenant {known.tenant}" if known.tenant else "", ""),
        )
        return [line]

    def _content(self, shown: wire.AdapterDetail, width: int, glyphs: Glyphs) -> list[Line]:
        out: list[Line] = []
        adapter = shown.adapter
        problems = _problems(shown, width)
        if problems:
            out += [(), heading("PROBLEMS", width, glyphs), *problems]
        for word, revision in (("SERVES", shown.serving), ("COMES NEXT", shown.candidate)):
            if revision is not None:
                out += [(), heading(word, width, glyphs), *_revision(revision, width)]
        out += [(), heading("SOURCE", width, glyphs)]
        labels = "  ".join(f"{key}={value}" for key, value in sorted(adapter.labels.items()))
        out += fields(
            [
                ("from", adapter.source, ""),
                ("called", adapter.display_name or "", ""),
                ("labels", labels, ""),
                ("since", clock_and_day(adapter.created_at), ""),
                ("used", clock_and_day(adapter.last_used_at), ""),
            ],
            width,
        )
        if shown.history:
            out += [(), heading(f"BEFORE  {len(shown.history)} revisions", width, glyphs)]
            short = "  ".join(rev[:12] for rev in shown.history)
            out += [((line, "faint"),) for line in wrapped(short, width)]
        if shown.events:
            out += [(), heading("EVENTS", width, glyphs)]
            for event in shown.events[: -_MAX_EVENTS - 1 : -1]:
                out += event_lines(event, width)
        return out


# ----------------------------------------------------------------- sections
def _served(told: wire_explain.Explained, width: int) -> list[Line]:
    """`loractl explain`, the answer first."""
    served = ("yes", "good") if told.served else ("no", "warn")
    ahead = f"; turn {told.queue_turn} of {told.queue_turns}" if told.queue_turn else ""
    then = f" (in {duration(told.next_seconds)})" if told.next_seconds else ""
    pairs = [
        ("now", f"{served[0]}: {told.why}", served[1]),
        ("next", told.next + then, ""),
        ("try", told.hint, "strong"),
        ("requests", f"{told.running} running, {told.waiting} waiting{ahead}", ""),
        ("tier", told.tier, ""),
        ("load", "" if told.tier == "gpu" else _from_here(told.load_seconds), ""),
    ]
    room, cost = told.room, told.cost
    if room is not None:
        free = f"{size(room.free_bytes)} free of {size(room.total_bytes)}"
        idle = f"{room.idle_adapters} idle adapters hold {size(room.idle_bytes)}"
        pairs.append(("room", f"{free}, {room.free_slots} slots; {idle}", ""))
        pairs.append(("kept for", room.reserved_for or "", "warn"))
        pairs += [("held by", _holder(holder), "") for holder in room.holders[:4]]
    if cost is not None:
        place = f"{cost.place} of {cost.victims}" if cost.place else "not in line"
        held = f", held for {age(cost.held_seconds)}" if cost.held_seconds else ""
        pairs.append(("makes way", f"{place}{held}", ""))
        pairs.append(_moves(cost))
    return fields(pairs, width)


def _moves(row: Slot | wire_explain.ExplainedCost) -> tuple[str, str, str]:
    said = f"loads {row.loads}, evictions {row.evictions}, thrashes {row.thrashes}"
    return ("moves", said, "warn" if row.thrashes else "")


def _from_here(seconds: float | None) -> str:
    return f"{duration(seconds)} from where it is" if seconds is not None else ""


def _holder(holder: wire_explain.Holder) -> str:
    words = [holder.name, size(holder.num_bytes)]
    words += ["pinned"] if holder.pinned else []
    words += ["draining"] if holder.draining else []
    words += [f"{holder.running} running"] if holder.running else []
    return "  ".join(words)


def _slot(row: Slot, width: int, glyphs: Glyphs) -> list[Line]:
    recent, life = ratio(row.hit_tokens, row.query_tokens), ratio(
        row.life_hit_tokens, row.life_query_tokens
    )  # fmt: skip
    place = "" if row.slot is None else f"{row.slot}, {size(row.gpu_bytes)}"
    hits = f"{percent(recent)} of {row.query_tokens} tokens in 60 s, {percent(life)} in its life"
    return fields(
        [
            ("slot", place, ""),
            ("runs", f"{row.running} running, {row.waiting} waiting", ""),
            ("cached", hits, ""),
            ("guessed", _guessed(row), ""),
            _moves(row),
            ("idle", "" if row.running else age(row.idle_seconds), ""),
        ],
        width,
    )


def _guessed(row: Slot) -> str:
    """How tokens ahead are guessed; nothing where none ever were."""
    if not row.life_draft_tokens:
        return ""
    recent = percent(ratio(row.accepted_tokens, row.draft_tokens))
    life = percent(ratio(row.life_accepted_tokens, row.life_draft_tokens))
    draw = f", {rate(row.tokens_per_draw)} tokens a draw" if row.draft_tokens else ""
    return f"{recent} of {row.draft_tokens} tokens right in 60 s{draw}, {life} in its life"


def _problems(shown: wire.AdapterDetail, width: int) -> list[Line]:
    adapter, out = shown.adapter, list[Line]()
    if adapter.reason:
        out += field("why", f"{adapter.reason}: {adapter.reason_message or ''}", width, "bad")
    for revision in (shown.serving, shown.candidate):
        for warning in revision.warnings if revision is not None else ():
            out += field("warning", warning, width, "warn")
    for event in reversed(shown.events):
        if event.level != "info" and len(out) < 8:
            out += event_lines(event, width)
    return out


def tokens(revision: wire.Revision) -> str:
    """How many ids it knows, "" for as many as the base."""
    told = f"{revision.num_tokens:,}" if revision.num_tokens else ""
    return f"{told}, {revision.extra_tokens:,} behind the base's" if revision.extra_tokens else told


def _revision(revision: wire.Revision, width: int) -> list[Line]:
    ranks = "  ".join(f"{module} {rank}" for module, rank in revision.ranks.items())
    scalings = ", ".join(f"{number:.3g}" for number in revision.scalings)
    own = revision.changes_kv and revision.keeps_kv
    blocks = f", {size(revision.packed_bytes)} packed in {revision.num_blocks} blocks"
    return fields(
        [
            ("digest", revision.rev, ""),
            ("kind", "  ".join(revision.kinds), ""),
            ("tokens", tokens(revision), ""),
            ("targets", ranks or "  ".join(revision.targets), ""),
            ("rank", f"{revision.rank} at most, in {revision.num_layers} layers", ""),
            ("scaled", scalings, ""),
            ("bytes", f"{size(revision.file_bytes)} {revision.dtype}{blocks}", ""),
            ("KV", "its own: it changes keys or values" if own else "", ""),
            ("since", clock_and_day(revision.created_at), ""),
        ],
        width,
    )


def _actions(width: int) -> list[Line]:
    """Keys that change it; `esc` leads back."""
    keys = [(key.shown, key.does) for key in KEYS if key.changes]
    return [((f"{shown:<{LABEL}}", "key"), (does, "")) for shown, does in [*keys, ("esc", "close")]]


# ----------------------------------------------------------------- shared
def subject_of(row: wire.Adapter) -> Subject:
    return Subject(row.name, row.state, row.pinned, row.priority, row.running, row.waiting)


def event_lines(event: wire.EventItem, width: int) -> list[Line]:
    """Time and type, and what it says below where it does not fit beside."""
    ink = _LEVEL_INKS.get(event.level, "")
    level = f"{event.level.upper()} " if ink else ""
    cause = f"({event.cause})" if event.cause else ""
    where = f"replica {event.replica}" if event.replica else ""
    said = " ".join(part for part in (event.rev[:6], where, event.message, cause) if part)
    head = f"{clock(event.time)} {level}{event.type}"
    room = width - len(head) - 1
    if len(said) <= room:
        return [((head, ink or "faint"), (f" {said}", ""))]
    below: list[Line] = [(("  ", ""), (line, "")) for line in wrapped(said, width - 2)]
    return [((head, ink or "faint"),), *below]


def clock_and_day(time: str | None) -> str:
    """`2026-03-01 16:32:07`, or "" for none."""
    return here(time, "%Y-%m-%d %H:%M:%S")


def of_adapter(stage: Stage, name: str) -> AdapterDetail:
    """What the drawer tells of it there."""
    return AdapterDetail(name, read_only=stage.read_only, asks=stage.office is not None)
