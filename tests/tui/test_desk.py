"""What is done from the dashboard: asked first, off the screen's thread, told in one line."""

import threading

import msgspec
import pytest
from textual.widgets import Input

from lorad import wire
from lorad.caller import Unreachable
from lorad.tui.app import Settings
from lorad.tui.drawer import Drawer
from lorad.tui.messages import Lost, Whole

NAME = "acme/sql-gen"
SIZE = (80, 24)


@pytest.fixture
def daemon(fakes, boards):
    """It has the adapters of the small board, and some more."""
    rows = [
        fakes.adapter(
            7, name=row.name.partition("@")[0], pinned=row.pinned, state=row.state, slot=row.slot
        )
        for row in boards.small().slots.values()
    ]
    return fakes.FakeDaemon(*rows, *(fakes.adapter(i) for i in range(300)))


@pytest.fixture
def play(play):
    """With the rows by slot, so that `NAME` is the first and the selected one."""

    def run(act, *args, **options):
        async def by_slot(stage):
            stage.app.query_one("#slots").sort_by("slot")
            await act(stage)

        play(by_slot, *args, **options)

    return run


async def answered(stage, verb):
    """Until an answer of the daemon was taken."""
    app = stage.app
    await stage.until(lambda: app.said.startswith(verb) and "asked the" not in app.said)


async def shows(stage, text):
    await stage.until(lambda: text in stage.text())


def test_an_action_asks_first_and_no_is_what_enter_says(play, boards, daemon):
    async def act(stage):
        await stage.press("e")
        assert "Evict acme/sql-gen?" in stage.text()
        assert "11 requests in flight." in stage.text()
        await stage.press("enter")
        assert "Evict acme/sql-gen?" not in stage.text()
        for no in ("n", "escape", "q"):
            await stage.press("e", no)
        await stage.press("e", "right", "left", "enter")
        assert not daemon.calls("evict")

    play(act, boards.small(), SIZE, daemon=daemon)


def test_every_action_is_done_by_the_daemon_and_told(play, boards, daemon):
    async def act(stage):
        for keys, verb, said in (
            (("p", "y"), "unpin", "unpin acme/sql-gen: done"),
            (("l", "y"), "load", "load acme/sql-gen: done, its state is idle"),
            (("e", "tab", "enter"), "evict", "evict acme/sql-gen: done, its state is ram"),
            (("e", "a"), "evict", "evict acme/sql-gen: done"),
            (("d", "y"), "drain", "drain acme/sql-gen: takes no new requests, 3"),
            (("x", "y"), "resume", "cancel the drain of acme/sql-gen: takes requests (it was so"),
        ):
            await stage.press(*keys)
            await answered(stage, said[:8])
            assert stage.app.said.startswith(said), (stage.app.said, said)
            assert daemon.calls(verb)
            stage.app.said = ""
        evicted = daemon.calls("evict")
        assert [call.get("now", False) for call in evicted] == [False, True]
        assert evicted[0]["force"]  # it is pinned, and the dialog said so
        assert daemon.calls("drain") == [{"name": NAME, "wait": False}]
        assert threading.get_ident() not in daemon.threads

    play(act, boards.small(), SIZE, daemon=daemon)


def test_commands_act_on_names_and_on_the_daemon(play, boards, daemon):
    async def act(stage):
        for text, question, verb in (
            ("priority 80 wayne/alfred", "Set the priority of wayne/alfred?", "patch"),
            ("pin wayne/alfred", "Pin wayne/alfred?", "pin"),
            ("drain daemon", "Drain the daemon?", "drain"),
            ("resume daemon", "Cancel the drain of the daemon?", "resume"),
            ("reload", "Reload the configuration?", "reload"),
        ):
            await stage.app.command(text)
            await stage.pilot.pause()
            assert question in stage.text()
            stage.app.said = ""
            await stage.press("y")
            await answered(stage, question[:3].lower())
            assert len(daemon.calls(verb)) == 1
        assert daemon.calls("patch") == [{"name": "wayne/alfred", "priority": 80}]
        assert daemon.calls("drain")[0]["name"] is None
        for wrong in ("priority", "priority 300", "priority x wayne/alfred"):
            await stage.app.command(wrong)
            assert stage.app.said == "a priority is 0 to 100"

    play(act, boards.small(), SIZE, daemon=daemon)


def test_a_refusal_is_told_with_what_to_try_and_nothing_breaks(play, boards, daemon, fakes):
    async def act(stage):
        refused = wire.ItemResult(
            name=NAME,
            ok=False,
            code="in_use",
            message="11 requests run",
            hint="evict --now",
        )
        for refusal, said in (
            (refused, "in_use: 11 requests run; try: evict --now"),
            (fakes.refused(409, "pinned", "it is pinned", hint="unpin"), "pinned: it is pinned;"),
            (Unreachable("unix:///x", "stale"), "cannot reach lorad at unix:///x"),
            (KeyError("\x1b[31mred"), "KeyError: "),
        ):
            daemon.refuses["evict"] = refusal
            stage.app.said = ""
            await stage.press("e", "y")
            await answered(stage, "evict")
            assert stage.app.said.startswith(f"evict {NAME} failed: {said}"), stage.app.said
            assert "\x1b" not in stage.app.said
            event = stage.app.model.events[-1]
            assert (event.type, event.name, event.level) == ("action.failed", NAME, "warn")
        assert stage.app.desk.num_running == 0

    play(act, boards.small(), SIZE, daemon=daemon)


def test_a_daemon_that_answers_slowly_keeps_nobody_waiting(play, boards, daemon):
    async def act(stage):
        daemon.hold()
        await stage.press("l", "y")
        assert stage.app.said == f"load {NAME}: asked the daemon"
        await stage.press("j", "j", "p", "y", "2", "3", "1", "j")
        assert stage.app.view.target == "globex/summarise"
        assert stage.app.desk.num_running == 2
        daemon.let_go()
        await stage.until(lambda: not stage.app.desk.num_running)

    play(act, boards.small(), SIZE, daemon=daemon)


def test_nothing_is_changed_when_read_only_or_cut_off(play, boards, daemon):
    async def cut_off(stage):
        await stage.press("e")  # the dialog is open when the link breaks
        await stage.tell(Lost("ECONNREFUSED", 4.0))
        await stage.press("y")
        assert stage.app.said.startswith("not connected")
        await stage.press("p")
        assert "Unpin" not in stage.text() and stage.app.said.startswith("not connected")
        await stage.tell(Whole(boards.small()))
        await stage.press("p")
        assert "Unpin acme/sql-gen?" in stage.text()

    async def read_only(stage):
        await stage.press("e", "p", "l", "d", "x")
        await stage.app.command("evict acme/sql-gen")
        assert "?" not in stage.app.said and stage.app.said.startswith("read-only")
        await stage.press("enter")
        assert "ACTIONS" not in stage.text()

    play(cut_off, boards.small(), SIZE, daemon=daemon)
    play(read_only, boards.small(), SIZE, Settings(read_only=True), daemon=daemon)
    assert not [verb for verb, _ in daemon.asked if verb not in ("adapter", "explain", "adapters")]


def test_the_drawer_tells_all_about_an_adapter_and_acts_on_it(play, boards, daemon):
    async def act(stage):
        await stage.press("j", "enter")
        await shows(stage, "SERVED")
        text = stage.text()
        for said in ("acme/support-de", "yes: it is on the GPU", "PROBLEMS", "E_TRUNCATED",
                     "q_proj 16", "36 layers"):  # fmt: skip
            assert said in text, said
        line = next(line for line in stage.lines() if "SERVED" in line)
        assert line.endswith("│") and line.index("SERVED") > 40  # at the right
        await stage.press("G")
        assert "ACTIONS" in stage.text() and "BEFORE  2 revisions" in stage.text()
        asked = len(daemon.calls("adapter"))
        stage.clock.now += 5
        stage.app.paint()
        await stage.until(lambda: len(daemon.calls("adapter")) > asked)
        await stage.press("p")
        assert "Unpin acme/support-de?" in stage.text()
        await stage.press("n", "y")
        assert stage.app.clipboard == "acme/support-de"
        await stage.press("Y")
        assert '"name":"acme/support-de"' in stage.app.clipboard
        await stage.press("escape")
        assert not isinstance(stage.app.screen, Drawer)
        await stage.press("enter", "3")  # another screen closes it
        assert not isinstance(stage.app.screen, Drawer) and stage.app.view.key == "3"
        assert stage.app.focused is stage.app.view.grid

    play(act, boards.small(), daemon=daemon)


def test_a_drawer_without_an_answer_says_why(play, boards, daemon):
    async def act(stage):
        daemon.hold()
        await stage.press("enter")
        assert "asking the daemon" in stage.text()
        daemon.adapters.clear()
        daemon.let_go()
        await shows(stage, "model_not_found: no adapter acme/sql-gen")
        assert "loractl ls" in stage.text()

    play(act, boards.small(), SIZE, daemon=daemon)


def test_the_palette_finds_adapters_by_name_and_opens_them(play, boards, daemon):
    async def act(stage):
        await stage.press("ctrl+p")
        stage.app.screen.query_one(Input).value = "alfred"
        await stage.pilot.pause()
        assert "wayne/alfred" in stage.text()
        await stage.press("enter")
        await shows(stage, "SERVED")
        assert stage.app.desk.target == "wayne/alfred"
        await stage.press("escape", "ctrl+p")
        stage.app.screen.query_one(Input).value = "adapter 00123"  # it is not on the GPU
        await shows(stage, "tenant04/adapter-00123")
        await stage.press("enter")
        await shows(stage, "SERVED")
        assert stage.app.desk.target == "tenant04/adapter-00123"

    play(act, boards.small(), SIZE, daemon=daemon)


def test_x_on_the_requests_screen_cancels_the_selected_request(play, boards, daemon):
    async def act(stage):
        await stage.press("3", "j")
        id = stage.app.view.request.id
        await stage.press("x")
        assert f"Cancel request {id}?" in stage.text()
        assert "Its client gets an error" in stage.text()
        await stage.press("enter")  # that is No
        assert not daemon.calls("cancel_request")
        await stage.press("enter", "x")  # from its drawer as well
        board = boards.small()
        await stage.tell(Whole(msgspec.structs.replace(board, requests={}, num_requests=0)))
        await stage.press("y")  # it is about the one that was asked about, gone or not
        await answered(stage, "cancel request")
        assert daemon.calls("cancel_request") == [{"id": id}] and not daemon.calls("resume")
        assert stage.app.said == f"cancel request {id}: its client is told; 7 tokens were written"

    play(act, boards.small(), SIZE, daemon=daemon)


def test_resume_by_name_is_about_the_drain_whatever_is_selected(play, boards, daemon, fakes):
    async def act(stage):
        await stage.press("3")
        name = stage.app.view.target
        await stage.type(":resume", "enter", "y")
        await answered(stage, "cancel the drain")
        assert daemon.calls("resume") == [{"name": name}] and not daemon.calls("cancel_request")
        daemon.refuses["cancel_request"] = fakes.refused(404, "not_found", "no request runs")
        await stage.press("x", "y")
        await answered(stage, "cancel request")
        assert "failed: not_found: no request runs" in stage.app.said

    play(act, boards.small(), SIZE, daemon=daemon)


def test_a_picture_that_is_due_while_a_sheet_is_being_made_leaves_it_alone(play, boards):
    async def act(stage):
        stage.app.action_detail()
        stage.app.paint()  # news came before the drawer was there
        await stage.pilot.pause()
        assert isinstance(stage.app.screen, Drawer)

    play(act, boards.small(), SIZE)
