"""What the dashboard does about an adapter or a request: its drawer, the question, what came of it.

Goes in: keys and commands, as the app hands them on.  Comes out: an open drawer, dialog or palette;
one line of what an action came to.  Nothing is changed with --read-only, nor without a link.
"""

from lorad.spelling import split_digest
from lorad.tui.acts import OF_DAEMON, VERBS, Act, Choice, Subject, act, end
from lorad.tui.details import AdapterDetail, of_adapter
from lorad.tui.dialog import Dialog
from lorad.tui.draw import inert
from lorad.tui.drawer import Detail, Drawer
from lorad.tui.facts import RequestFact
from lorad.tui.office import Answer, Call
from lorad.tui.shell import Shell
from lorad.wire_stream import RequestRow

#: The type of an event of the dashboard's own.
FAILED = "action.failed"
TOLD_SECONDS, REFUSED_SECONDS = 6.0, 15.0


class Desk:
    """Of one app."""

    def __init__(self, app: Shell) -> None:
        self._app = app
        self.num_running = 0  # actions whose answers are still to come

    @property
    def drawer(self) -> Drawer | None:
        """The one that is open, if any."""
        stack = self._app.screen_stack
        return next((sheet for sheet in reversed(stack) if isinstance(sheet, Drawer)), None)

    # ------------------------------------------------------------- detail
    def open(self, detail: Detail | None) -> None:
        if detail is None:
            self._app.say("nothing is selected")
        else:
            if self.drawer is not None and self._app.screen is self.drawer:
                self._app.pop_screen()
            self._app.push_screen(Drawer(detail))

    def adapter(self, name: str) -> Detail:
        return of_adapter(self._app, name)

    @property
    def target(self) -> str:
        """The adapter that keys are about: the drawer's, else the screen's selected."""
        if self.drawer is not None:
            return self.drawer.detail.target
        return self._app.view.target if self._app.view is not None else ""

    @property
    def request(self) -> RequestRow | None:
        """The one that `x` is about: of the drawer, else of the screen; None: it is an adapter."""
        if self.drawer is not None:
            detail = self.drawer.detail
            return detail.last if isinstance(detail, RequestFact) else None
        return self._app.view.request if self._app.view is not None else None

    def row_json(self) -> str:
        """The drawer's, else the selected row."""
        if self.drawer is not None:
            return self.drawer.detail.as_json()
        return self._app.view.row_json() if self._app.view is not None else ""

    # ------------------------------------------------------------- actions
    def refusal(self) -> str:
        """Why nothing can be changed now; "" if something can."""
        app = self._app
        if app.read_only:
            return "read-only: nothing is changed from here"
        if app.office is None:
            return "this is no daemon: there is nothing to change"
        if not app.model.link.up:
            return "not connected: nothing can be changed until the link is back"
        return ""

    def act(self, verb: str, name: str | None = None, number: int | None = None) -> None:
        """Ask, then do it; `name` None is the selected, "" the daemon.  `cancel` is the end of what
        is selected: of a request, else of the adapter's drain."""
        refusal = self.refusal()
        if refusal:
            self._app.say(refusal)
            return
        if verb == "cancel":
            if name is None and (request := self.request) is not None:
                self._end(request)
                return
            verb = "resume"
        meant = self.target if name is None else name
        if name is None and not meant:
            self._app.say("no adapter is selected")
            return
        meant = split_digest(meant)[0]
        try:
            wanted = act(verb, self.about(meant), number)
        except ValueError as error:
            self._app.say(str(error))
            return
        dialog = Dialog(wanted, lambda: self.about(meant))
        self._app.push_screen(dialog, lambda choice: self._do(wanted, meant, choice))

    def command(self, word: str, rest: str) -> bool:
        """`evict acme/sql`, `priority 80 acme/sql`, `drain daemon`; False: it is none of these."""
        verb = {"undrain": "resume", "go": "adapter"}.get(word, word)
        if verb == "adapter":
            name = rest or self.target
            self.open(self.adapter(name) if name else None)
        elif verb == "priority":
            number, _, name = rest.partition(" ")
            wanted = int(number) if number.isdecimal() and len(number) < 4 else None
            self.act(verb, name.strip() or None, wanted)
        elif verb == "reload":
            self.act(verb, "")
        elif verb in VERBS:
            self.act(verb, "" if rest == "daemon" and verb in OF_DAEMON else rest or None)
        else:
            return False
        return True

    def about(self, name: str) -> Subject:
        """What is known of it by now."""
        board, view = self._app.shown, self._app.view
        if not name and board is not None:
            status = board.status
            return Subject("", status.state, running=status.running, waiting=status.waiting)
        if board is not None and (row := board.slots.get(name)) is not None:
            state, pinned, priority = row.state, row.pinned, row.priority
            return Subject(name, state, pinned, priority, row.running, row.waiting)
        known = view.subject(name) if view is not None else None
        detail = self.drawer.detail if self.drawer is not None else None
        if known is None and isinstance(detail, AdapterDetail) and detail.target == name:
            known = detail.subject()
        return known or Subject(name)

    def _end(self, row: RequestRow) -> None:
        """Whatever is selected by the time that somebody says yes, it is about this one."""
        wanted, name = end(row), split_digest(row.adapter)[0]
        self._app.push_screen(Dialog(wanted), lambda choice: self._do(wanted, name, choice))

    def _do(self, wanted: Act, name: str, choice: Choice | None) -> None:
        if choice is None:
            return
        refusal = self.refusal()
        if refusal or self._app.office is None:
            self._app.say(refusal)
            return
        self.num_running += 1
        self._app.say(f"{wanted.what}: asked the daemon")
        call: Call[str] = choice.call
        self._app.office.do(call, lambda answer: self._told(wanted, name, answer))

    def _told(self, wanted: Act, name: str, answer: Answer[str]) -> None:
        self.num_running -= 1
        if answer.error:
            hint = f"; try: {answer.hint}" if answer.hint else ""
            text = f"{wanted.what} failed: {answer.error}{hint}"
            self._app.say(inert(text), seconds=REFUSED_SECONDS)
            # The line may be too short for it, and it goes.
            said = f"{answer.error}{hint}"
            self._app.model.tell(FAILED, f"{wanted.what}: {said}", name=name, level="warn")
        else:
            self._app.say(inert(f"{wanted.what}: {answer.value}"), seconds=TOLD_SECONDS)
        self._app.paint()
