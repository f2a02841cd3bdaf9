"""Explaining: why an adapter is or is not served now, what happens next, and when.

Goes in: a name.  Comes out: `wire_explain.Explained`: sentences and the numbers behind them.  The
registry says what the name means, the engine how its revision stands; `tell` puts both into words,
and is a pure function of them.  Changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from engine.adapters.states import State
from engine.messages import Explain
from engine.status_messages import Explanation
from lorad import wire_explain
from lorad.errors import LoradError
from lorad.lifecycle import shown_state
from lorad.registry.records import AdapterRecord
from lorad.service.engine_link import EngineLink
from lorad.service.gate import STOPPING, Gate
from lorad.service.names import Names, model_of
from lorad.service.pins import pinning


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """`why` it stands as it does, and what is `next`; `seconds` None: it hangs on others."""

    why: str
    next: str
    served: bool = False  # a request now starts as soon as a step has room for it
    seconds: float | None = None
    hint: str = ""


class Shown(Protocol):
    """How a revision is called."""

    def __call__(self, rev: str) -> str: ...


EngineOf = Callable[[str | None], tuple[EngineLink, str]]


class Explaining:
    """`engines`: by a model's name, the engine that a revision of it is on or would come to, and
    what that is called among its replicas, "" where it has no other."""

    def __init__(
        self, names: Names, engines: Mapping[str, EngineOf], *, gate: Gate | None = None
    ) -> None:
        self._names, self._engines = names, engines
        self._gate = gate or Gate()

    async def explain(self, name: str) -> wire_explain.Explained:
        """Raises model_not_found for a name that nobody registered."""
        record = self._names.known(name)
        rev, catalog = record.serving_rev, self._names.catalog
        remote = rev is not None and rev in self._names.registry.store.remote
        engine_of = self._engines.get(model_of(record, self._names.models))
        link, replica = engine_of(rev) if engine_of is not None else (None, "")
        state, told = self._at_rest(record, link, remote=remote)
        facts: Explanation | None = None
        if told is None and link is not None and rev is not None and rev in link.known:
            facts = await _ask(link, rev)
        if facts is not None:
            others = [] if record.pinned else pinning(catalog, facts.rev)
            state, told = State(facts.state), tell(facts, catalog.label, others)
        elif rev in catalog.unfit and told is None:
            message, hint = catalog.unfit[rev]
            told = Told(
                why=f"its tokenizer files do not fit the base as it is now: {message}",
                next="its requests are refused, until a start finds otherwise",
                hint=hint or "loractl doctor",
            )
        elif rev in catalog.unpacked and (told is None or state is State.REMOTE):
            message, hint = catalog.unpacked[rev]
            told = Told(
                why=f"it could not be packed: {message}",
                next="the next request tries again",
                hint=hint or "loractl doctor",
            )
        elif told is None:
            told = Told(
                why="it has not been brought up since the engine started",
                next="a request, or loractl load, brings it up from the store",
            )
        serves = rev is not None and state not in (State.QUARANTINED, State.MISSING)
        if serves and self._gate.holds(name):
            told = _held_back(name, self._gate, facts)
        explained = self._explained(record, state, told, facts, link)
        return msgspec.structs.replace(explained, replica=replica)

    def _at_rest(
        self, record: AdapterRecord, link: EngineLink | None, *, remote: bool
    ) -> tuple[State, Told | None]:
        """What the registry alone decides, and what an engine that is away does."""
        state = shown_state(record, None, remote=remote)
        if state is State.QUARANTINED:
            return state, Told(
                why=f"it was refused: {record.reason}: {record.reason_message}",
                next="requests get 404 until a good version is added or its folder changes",
                hint=f"loractl show {record.name}",
            )
        if state is State.MISSING:
            return state, Told(
                why="its files are gone from the store",
                next="requests get 404 until it is added again",
                hint=f"loractl add DIR --name {record.name}",
            )
        if link is None:
            return state, Told(
                why=f"it is an adapter of {record.model}, which is not served here",
                next="requests get 404 until that model is served again",
                hint=f"loractl rm {record.name}, or a [[models]] with name = {record.model!r}",
            )
        if record.name in self._names.models:
            return state, Told(
                why="a base model has this name now",
                next="requests for it mean the base",
                hint=f"loractl rm {record.name}, or another name for the model",
            )
        if owner := self._names.elsewhere(record):
            return state, Told(
                why=f"its content is an adapter of {owner} by another name",
                next="requests get 404, as content is of one model at a time",
                hint=f"loractl rm {record.name}",
            )
        if record.serving_rev is None:
            return state, Told(
                why="its first version is not ready yet", next="it serves once it is packed"
            )
        if link.state != "ready":
            return state, Told(
                why=f"the engine is not ready: {link.progress}",
                next="requests are taken when it is",
                hint="loractl status",
            )
        if state is State.REMOTE:
            return state, Told(
                why=f"its files are not here, only where they came from ({record.source})",
                next="a request, or loractl load, fetches and packs them first",
            )
        return state, None

    def _explained(
        self,
        record: AdapterRecord,
        state: State,
        told: Told,
        facts: Explanation | None,
        link: EngineLink | None,
    ) -> wire_explain.Explained:
        return wire_explain.Explained(
            name=record.name,
            rev=record.serving_rev,
            state=state.value,
            tier=_tier(state, facts),
            served=told.served,
            why=told.why,
            next=told.next,
            next_seconds=told.seconds,
            hint=told.hint,
            reason=record.reason,
            running=facts.running if facts else 0,
            waiting=facts.waiting if facts else 0,
            queue_turn=facts.queue_turn or None if facts else None,
            queue_turns=facts.queue_turns if facts else 0,
            load_seconds=facts.load_seconds if facts else None,
            room=self._room(facts, link) if facts else None,
            cost=_cost(facts) if facts else None,
        )

    def _room(self, facts: Explanation, link: EngineLink | None) -> wire_explain.ExplainedRoom:
        info, room = link.info if link else None, facts.room
        block = info.block_bytes if info else 0
        label = self._names.catalog.label
        return wire_explain.ExplainedRoom(
            total_bytes=room.total * block,
            free_bytes=room.free * block,
            kv_active_bytes=room.kv_active * block,
            kv_cached_bytes=room.kv_cached * block,
            kv_floor_bytes=room.kv_floor * block,
            idle_bytes=room.idle * block,
            idle_adapters=room.num_idle,
            free_slots=room.free_slots,
            reserved_for=label(room.reserved_for) if room.reserved_for else None,
            holders=tuple(
                wire_explain.Holder(
                    name=label(h.rev),
                    num_bytes=h.blocks * block,
                    running=h.running,
                    pinned=h.pinned,
                    draining=h.draining,
                    tokens_left=h.tokens_left,
                )
                for h in room.holders
            ),
            more_holders=room.num_holders - len(room.holders),
        )


async def _ask(link: EngineLink, rev: str) -> Explanation | None:
    """None: the engine has just forgotten it."""
    try:
        answer = await link.call(Explain(link.next_id(), rev))
    except LoradError as error:
        if error.code != "model_not_found":
            raise
        return None
    return answer.explanation


# ----------------------------------------------------------------- words
def tell(facts: Explanation, label: Shown, pinned_as: Sequence[str] = ()) -> Told:
    """What the engine's numbers mean; `label` names revisions.  `pinned_as`: other names of the
    same content whose pins keep it."""
    match State(facts.state):
        case State.ACTIVE | State.IDLE:
            return _on_gpu(facts, pinned_as)
        case State.DRAINING:
            return _draining(facts, label)
        case State.LOADING:
            return _loading(facts)
    if facts.hopeless:
        return Told(
            why=f"it cannot have room: {facts.hopeless}",
            next="requests end with no_room",
            hint="loractl ps --wide shows what is pinned",
        )
    if facts.wanted_seconds is None:
        return _unwanted(facts)
    return _wanted(facts, label)


def _held_back(name: str, gate: Gate, facts: Explanation | None) -> Told:
    """By an operator, or since the daemon ends: whatever else could be said of it."""
    left = facts.running + facts.waiting if facts is not None else 0
    ends = f"{left} requests of it end" if left else "none of its requests is left"
    if gate.closed:
        return Told(
            why=gate.closed,
            next=f"{ends}; new ones get 503",
            hint="" if gate.closed == STOPPING else "loractl resume",
        )
    return Told(
        why="an operator drains it: it takes no new requests",
        next=f"{ends}; new ones get 503 until it is resumed",
        hint=f"loractl resume {name}",
    )


def _on_gpu(facts: Explanation, pinned_as: Sequence[str]) -> Told:
    why = "it is on the GPU"
    if facts.waiting:
        turn = f"its turn is {facts.queue_turn} of {facts.queue_turns}"
        return Told(
            why=f"{why}, and {facts.waiting} of its requests wait for a seat or memory",
            next=f"they start as others end; {turn}",
            served=True,
        )
    return Told(why=why, next=_leaving(facts, pinned_as), served=True, seconds=0.0)


def _leaving(facts: Explanation, pinned_as: Sequence[str]) -> str:
    cost = facts.cost
    if cost.pinned and pinned_as:
        have, are = ("has", "is") if len(pinned_as) == 1 else ("have", "are")
        return f"it stays: {', '.join(pinned_as)} {have} the same content, and {are} pinned"
    if cost.pinned:
        return "it is pinned and stays"
    if not cost.place:
        return "it stays while requests run on it"
    return f"it makes way as number {cost.place} of {cost.victims} when room is short"


def _draining(facts: Explanation, label: Shown) -> Told:
    left = f"its requests have {facts.tokens_left} tokens to go at most"
    if facts.drain_for:
        return Told(
            why=f"it makes room for {label(facts.drain_for)}, which has waited too long",
            next=f"it leaves the GPU when its requests end or give way; {left}",
        )
    return Told(
        why=f"it was told to leave the GPU ({facts.drain_cause}), and ends what runs",
        next=f"what still runs then is aborted; {left}",
        seconds=facts.drain_seconds,
    )


def _loading(facts: Explanation) -> Told:
    how = "read from the store" if facts.reading else "copied to the GPU"
    waiting = f", and {facts.waiting} of its requests wait for it" if facts.waiting else ""
    return Told(why=f"it is being {how}{waiting}", next="it is up", seconds=facts.eta_seconds)


def _unwanted(facts: Explanation) -> Told:
    where = "in host memory" if facts.in_ram else "on disk"
    why = f"nobody asks for it; it is {where}"
    if facts.error:
        why += f"; its last load failed: {facts.error}"
    if _finds_room(facts):
        return Told(why=why, next="a request brings it up", seconds=facts.load_seconds)
    return Told(
        why=why,
        next=f"a request waits for room: {_held(facts)}",
        seconds=None,
    )


def _wanted(facts: Explanation, label: Shown) -> Told:
    asked = f"{facts.waiting} of its requests wait" if facts.waiting else "it is to be loaded"
    if facts.blocked_seconds is None:
        return Told(
            why=f"{asked}, and other loads are under way", next="its load begins as those end"
        )
    why = f"{asked}, and there is no room for it: {_held(facts)}"
    if facts.victim:
        left = f"{facts.victim_tokens} tokens to go at most"
        return Told(
            why=why,
            next=f"{label(facts.victim)} drains for it: {left}, or it gives way",
        )
    if facts.starving:
        return Told(why=why, next="all room that comes free is kept for it")
    if facts.room.reserved_for:
        ahead = label(facts.room.reserved_for)
        return Told(why=why, next=f"{ahead} has waited longer, and is helped first")
    waited = facts.wanted_seconds or 0.0
    return Told(
        why=why,
        next="if nothing comes free before, others make way for it",
        seconds=max(facts.starve_after - waited, 0.0),
    )


def _finds_room(facts: Explanation) -> bool:
    room = facts.room
    slot = room.free_slots or room.num_idle
    return bool(slot) and room.free + room.kv_cached + room.idle >= facts.cost.blocks


def _held(facts: Explanation) -> str:
    """Who has the room, in one clause."""
    room = facts.room
    pinned = sum(h.pinned for h in room.holders)
    used = f"{room.num_holders} adapters in use" + (f" ({pinned} pinned)" if pinned else "")
    return f"{used} and the KV of running requests hold it"


def _tier(state: State, facts: Explanation | None) -> str:
    if state in (State.ACTIVE, State.IDLE, State.DRAINING):
        return "gpu"
    if facts is not None and facts.in_ram:
        return "ram"
    if state in (State.QUARANTINED, State.MISSING):
        return "-"
    return "remote" if state is State.REMOTE else "disk"


def _cost(facts: Explanation) -> wire_explain.ExplainedCost:
    cost = facts.cost
    return wire_explain.ExplainedCost(
        policy=cost.policy,
        pinned=cost.pinned,
        priority=cost.priority,
        uses=cost.uses,
        uses_a_minute=60.0 * cost.uses_a_second,
        reuse_chance=cost.reuse_chance,
        return_seconds=cost.return_seconds,
        num_bytes=cost.num_bytes,
        saved_seconds=3600.0 * (1 << 30) * cost.saved,
        place=cost.place or None,
        victims=cost.victims,
        loads=cost.loads,
        evictions=cost.evictions,
        thrashes=cost.thrashes,
        held_seconds=cost.held_seconds,
    )
