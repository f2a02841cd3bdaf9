"""What can be done from the dashboard: what is asked first, what is called, what is said of it.

Goes in: a verb, and what is known of the adapter.  Comes out: an `Act`: lines of a question, the
choices, and for each a call that returns one line.  Knows no widget.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lorad import wire
from lorad.spelling import still_running
from lorad.tui.office import Client, Failed
from lorad.wire_operate import DrainAsk
from lorad.wire_stream import RequestRow

#: Requests of an evicted adapter may run on for so long.
DRAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Subject:
    """What an action is about; None is not known here.  `name` "" is the daemon."""

    name: str
    state: str = ""
    pinned: bool | None = None
    priority: int | None = None
    running: int | None = None
    waiting: int | None = None

    def in_flight(self) -> str:
        """`11 requests run, 2 wait.`"""
        if self.running is None:
            return "How many requests are in flight is not known here."
        if not self.running and not self.waiting:
            return "No request is in flight."
        waiting = f", {self.waiting} wait" if self.waiting else ""
        one = self.running == 1
        return f"{self.running} request{'' if one else 's'} in flight{waiting}."


@dataclass(frozen=True, slots=True)
class Choice:
    """`key` chooses it at once; `call` returns what is said, and raises what went wrong."""

    key: str
    label: str
    call: Callable[[Client], str]


@dataclass(frozen=True, slots=True)
class Act:
    """A question that is answered by No unless somebody says otherwise."""

    what: str  # "evict acme/sql": begins what is said of it, too
    lines: tuple[str, ...]
    choices: tuple[Choice, ...]


#: Those that a daemon as a whole can be asked for.
OF_DAEMON = ("drain", "resume")
VERBS = ("pin", "unpin", "load", "evict", "drain", "resume", "cancel", "priority", "reload")


def act(verb: str, about: Subject, number: int | None = None) -> Act:
    """ValueError for a verb that there is none of; `number` is the priority's."""
    name = about.name
    if verb == "pin" and about.pinned:
        verb = "unpin"
    match verb:
        case "pin":
            return Act(
                f"pin {name}",
                ("It is loaded, and keeps its place on the GPU until it is unpinned.",),
                (Choice("y", "Pin", lambda c: one(c.pin(name))),),
            )
        case "unpin":
            return Act(
                f"unpin {name}",
                ("It stays where it is, and makes way when others need the room.",),
                (Choice("y", "Unpin", lambda c: one(c.unpin(name))),),
            )
        case "load":
            return Act(
                f"load {name}",
                ("It is brought onto the GPU; idle adapters make way if they have to.",),
                (Choice("y", "Load", lambda c: one(c.load(name))),),
            )
        case "evict":
            return _evict(about)
        case "drain":
            return _drain(name)
        case "resume":
            return _resume(name)
        case "priority":
            if number is None or not 0 <= number <= 100:
                raise ValueError("a priority is 0 to 100")
            before = "" if about.priority is None else f", {about.priority} before"
            return Act(
                f"set the priority of {name}",
                (f"It becomes {number}{before}; a higher one makes way later.",),
                (Choice("y", "Set", lambda c: _priority(c, name, number)),),
            )
        case "reload":
            said = "The daemon reads its configuration anew; what is wrong in it changes nothing."
            return Act("reload the configuration", (said,), (Choice("y", "Reload", _reload),))
    raise ValueError(f"there is no action {verb}")


def end(row: RequestRow) -> Act:
    """Of one request."""
    whose = f"{row.adapter or 'the base model'}, for {row.client or 'nobody who is known'}"
    written = f"{row.generated_tokens} tokens written"

    def call(client: Client) -> str:
        done = client.cancel_request(row.id)
        how = "" if done.changed else "it was over already; "
        return f"{how}its client is told; {done.generated_tokens} tokens were written"

    said = (f"{whose}: {row.state}, {written}.", "Its client gets an error; no other is touched.")
    return Act(f"cancel request {row.id}", said, (Choice("y", "Cancel it", call),))


def _evict(about: Subject) -> Act:
    name, force = about.name, bool(about.pinned)
    lines = [f"What runs goes on for {DRAIN_SECONDS:.0f} s at most; it stays in host memory."]
    if force:
        lines.append("It is pinned: it leaves the GPU all the same.")
    choices = [
        Choice(
            "y",
            "Evict",
            lambda c: one(c.evict(name, drain_timeout_s=DRAIN_SECONDS, force=force)),
        )
    ]
    if about.running:
        label = f"Now, abort {about.running}"
        choices.append(Choice("a", label, lambda c: one(c.evict(name, now=True, force=force))))
    return Act(f"evict {name}", tuple(lines), tuple(choices))


def _drain(name: str) -> Act:
    who = name or "the daemon"
    said = f"New requests for {who} are refused until it is resumed; what runs ends by itself."

    def call(client: Client) -> str:
        done = client.drain(DrainAsk(name=name or None, wait=False))
        left = still_running(done.running) if done.running else "nothing runs"
        return f"takes no new requests{_already(done.changed)}, {left}"

    return Act(f"drain {who}", (said,), (Choice("y", "Drain", call),))


def _resume(name: str) -> Act:
    who = name or "the daemon"

    def call(client: Client) -> str:
        done = client.resume(name or None)
        still = f"; still drained: {', '.join(done.still)}" if done.still else ""
        return f"takes requests{_already(done.changed)}{still}"

    said = f"New requests for {who} are taken again."
    return Act(f"cancel the drain of {who}", (said,), (Choice("y", "Resume", call),))


def _already(changed: bool) -> str:
    return "" if changed else " (it was so already)"


def _priority(client: Client, name: str, number: int) -> str:
    done = client.patch(name, wire.AdapterPatch(priority=number))
    return f"it is {done.adapter.priority}"


def _reload(client: Client) -> str:
    done = client.reload()
    waits = f"at the next start: {', '.join(done.needs_restart)}; " if done.needs_restart else ""
    nothing = "nothing else changed" if waits else "nothing changed"
    return waits + (f"changed: {', '.join(done.changed)}" if done.changed else nothing)


def one(results: wire.Results) -> str:
    """What became of the one name that was asked for."""
    if not results.items:
        return "done"
    item = results.items[0]
    if not item.ok:
        raise Failed(f"{item.code}: {item.message}" if item.code else item.message, item.hint)
    goes_on = f", goes on as operation {item.operation}" if item.operation else ""
    state = f"done, its state is {item.state}" if item.state else "done"
    return (item.message or state) + goes_on
