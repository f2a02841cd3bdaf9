"""Nested: folders of the inbox that look like adapters and lie in an adapter's folder.

Goes in: folders as they are taken and lost.  Comes out: an event for each change, and in
`Names.inbox_nested` a line with the next step while it is so.  `mv new inbox/sql` onto a folder
that is there puts `new` into it, without a word: the operator thinks that it serves.
"""

import shlex
from collections.abc import Mapping

from lorad.service.events import EventRing
from lorad.service.names import Names
from lorad.watch.inbox import MAX_NESTED, InboxFolder


class Nested:
    """`said`: what an earlier run told of, by name."""

    def __init__(self, names: Names, events: EventRing, said: Mapping[str, str]) -> None:
        self._said, self._events = names.inbox_nested, events
        self._said.update(said)

    def see(self, name: str, folder: InboxFolder, *, told: bool) -> str:
        """What is said of `folder`, which is filed as `name`; an event unless it was `told`."""
        line = line_of(folder)
        if not line:
            self.forget(name)
            return ""
        self._said[name] = line
        if not told:
            self._events.publish("adapter.nested", level="warn", name=name, message=line)
        return line

    def forget(self, name: str) -> None:
        self._said.pop(name, None)


def line_of(folder: InboxFolder) -> str:
    """What is wrong and what to do; "" if nothing is."""
    if not folder.nested:
        return ""
    first, *others = folder.nested
    least = "at least " if len(folder.nested) == MAX_NESTED else ""  # of more no more is known
    more = f" and {least}{len(others)} more" if others else ""
    here = folder.path.name
    out, away, back = (
        f"mv -T {shlex.quote(source)} {shlex.quote(target)}"
        for source, target in ((f"{here}/{first}", ".new"), (here, ".old"), (".new", here))
    )
    are = "are" if others else "is"
    cd = f"cd {shlex.quote(str(folder.path.parent))}"
    return (
        f"{first}{more} in its folder {are} not served: mv puts a folder into one that is there,"
        f" and PEFT further adapters of one model; if {first} is to replace {here}:"
        f" {cd} && {out} && {away} && {back}"
    )
