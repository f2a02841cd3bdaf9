"""A name's pin, priority and labels, changed: in the registry, told, and told to the engine.

Goes in: what somebody wants of a name whose lock he holds.  Comes out: rows, an event for each that
differs, and what the engine says to the pin.
"""

from collections.abc import Mapping

from lorad.errors import LoradError
from lorad.service.events import EventRing
from lorad.service.model_revisions import PinStanding
from lorad.service.names import Names
from lorad.spelling import MAX_LABELS, is_label


class NameSettings:
    """One a daemon."""

    def __init__(self, names: Names, standing: PinStanding, events: EventRing) -> None:
        self._names, self._standing, self._events = names, standing, events

    async def set(
        self,
        name: str,
        pin: bool | None,
        priority: int | None,
        labels: Mapping[str, str] | None,
    ) -> None:
        """Change what differs; None leaves it.  no_room for a pin, which is then taken back."""
        before, registry = self._names.known(name), self._names.registry
        if pin is not None and pin != before.pinned:
            await self._names.write(name, registry.set_pin(name, pin))
            self._events.publish("pin.set" if pin else "pin.cleared", name=name)
        if priority is not None and priority != before.priority:
            await self._names.write(name, registry.set_priority(name, priority))
            words = f"{before.priority} -> {priority}"
            self._events.publish("priority.set", name=name, message=words)
        if labels is not None and dict(labels) != dict(before.labels):
            await self._names.write(name, registry.set_labels(name, labels))
            self._events.publish("labels.set", name=name)
        entry = self._names.catalog.get(name)
        if entry is None or entry.rev is None:
            return
        if not pin:
            await self._standing.follow(entry.rev)
            return
        try:
            await self._standing.apply(entry.rev)
        except LoradError as error:
            if error.code == "no_room" and not before.pinned:  # the engine counts more exactly
                await self._names.write(name, registry.set_pin(name, False))
                self._events.publish("pin.cleared", name=name, cause="no_room")
            raise


def in_range(priority: int | None) -> int | None:
    """`priority`; raises invalid_value."""
    if priority is not None and not 0 <= priority <= 100:
        raise LoradError("invalid_value", "priority must be 0 to 100", param="priority")
    return priority


def labelled(labels: Mapping[str, str] | None, beside: int = 0) -> None:
    """Raise invalid_value unless all of them may stand on an adapter, of `beside` in all."""
    for key, value in (labels or {}).items():
        if not is_label(key, value):
            rule = "a key of A-Z a-z 0-9 . _ / -, 63 at most, and 256 printable characters"
            raise LoradError("invalid_value", f"label {key[:63]!r}: {rule}", param="labels")
    if labels and max(len(labels), beside) > MAX_LABELS:
        raise LoradError("invalid_value", f"{MAX_LABELS} labels at most", param="labels")
