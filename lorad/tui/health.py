"""Screen 7: is everything as it should be, what do machines do, which settings are in effect.

Goes in: the board's checks and figures; the configuration, as the daemon tells it when it is asked.
Comes out: checks with what to try, the last reload's error, figures, a table of settings with where
each is from.  What is not as it should be comes first.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from textual.app import ComposeResult

from lorad.tui.draw import Glyphs, age, clock, duration, percent, rate, size, size_of, sparkline
from lorad.tui.drawer import Detail
from lorad.tui.facts import CheckFact, SettingFact
from lorad.tui.grid import Column, Grid
from lorad.tui.model import Listing
from lorad.tui.office import Answer, Client
from lorad.tui.panel import Line, Panel, Span
from lorad.tui.prose import fields
from lorad.tui.view import View
from lorad.wire_operate import RunningConfig
from lorad.wire_stream import Board, Check, Spread

#: Settings change at a reload: this often they are asked for.
CONFIG_SECONDS = 10.0
_LEVELS = {"error": ("bad", 0), "warn": ("warn", 1), "ok": ("good", 2)}
_MACHINE_ROWS = 7
_SIDE_BY_SIDE = 100


class HealthView(View):
    """Checks, machine, settings."""

    key, view_name, about = "7", "Health", ""

    def compose(self) -> ComposeResult:
        yield ChecksPanel()
        yield MachinePanel()
        yield SettingsPanel()

    def show(self) -> None:
        width, height = self.size
        checks, machine = self.query_one(ChecksPanel), self.query_one(MachinePanel)
        settings = self.query_one(SettingsPanel)
        machine.display = height >= 18
        rest = height - (_MACHINE_ROWS if machine.display else 0)
        wanted = checks.num_lines(width) + 2
        checks.styles.height = max(3, min(wanted, rest // 2))
        machine.styles.height = _MACHINE_ROWS
        settings.styles.height = "1fr"
        checks.show()
        machine.repaint()
        settings.show()

    @property
    def target(self) -> str:
        """No adapter is meant here."""
        return ""

    def detail(self) -> Detail | None:
        grid = self.grid
        row = grid.listing.row if grid is not None else None
        if isinstance(row, Check):
            return CheckFact(row.name, row)
        return SettingFact(row.key, row) if isinstance(row, Setting) else None


# ----------------------------------------------------------------- checks
class ChecksPanel(Grid[Check]):
    """What is wrong first; a reload that was refused is one of them."""

    def __init__(self) -> None:
        super().__init__(Listing(_check_fields, _CHECK_SORTS, "is"), _CHECK_COLUMNS, id="checks")
        self.title_first = True

    def num_lines(self, width: int) -> int:
        return 1 + max(1, len(self.rows()))

    def rows(self) -> dict[str, Check]:
        board = self.top.shown
        if board is None:
            return {}
        rows = {check.name: check for check in board.health.checks}
        if board.health.reload_error:
            message = f"refused: {board.health.reload_error}"
            hint = "loractl reload"
            rows["reload"] = Check(name="reload", level="error", message=message, hint=hint)
        return rows

    def show(self) -> None:
        self.listing.show(self.rows())
        self.repaint()

    def title(self) -> Line:
        rows = self.listing.rows.values()
        wrong = sum(check.level != "ok" for check in rows)
        said = f"  {wrong} not as it should be" if wrong else "  all well" if rows else ""
        return (("CHECKS", "title"), (said, "warn" if wrong else "good"))

    def note(self) -> Line:
        board = self.top.shown
        if board is None or not board.health.reloaded_at:
            return ()
        return (("configuration read ", "faint"), (clock(board.health.reloaded_at), ""))

    def empty(self) -> str:
        return "waiting for the first data" if self.top.shown is None else "nothing is checked"


def _check_fields(key: str, row: Check) -> Mapping[str, str]:
    return {"level": row.level}


_CHECK_SORTS: Mapping[str, Callable[[str, Check], object]] = {
    "is": lambda key, row: (_LEVELS.get(row.level, ("", 1))[1], key),
    "name": lambda key, row: key,
}


def _level(key: str, row: Check, glyphs: Glyphs) -> Line:
    return ((row.level, _LEVELS.get(row.level, ("", 1))[0]),)


def _message(key: str, row: Check, glyphs: Glyphs) -> Line:
    hint = f"  try: {row.hint}" if row.hint and row.level != "ok" else ""
    return ((row.message, ""), (hint, "strong"))


_CHECK_COLUMNS: tuple[Column[Check], ...] = (
    Column("is", "IS", 5, _level),
    Column("name", "CHECK", 16, lambda k, r, g: ((k, "name"),)),
    Column("said", "WHAT", 20, _message, grow=True),
)


# ----------------------------------------------------------------- machine
class MachinePanel(Panel):
    """Figures of the GPU, the processes and the host; percentiles of a minute."""

    def __init__(self) -> None:
        super().__init__(id="machine")
        self.corners = "├┤"

    def title(self) -> Line:
        return (("MACHINE", "title"), ("  60 s", "faint"))

    def note(self) -> Line:
        board = self.top.shown
        restarts = board.status.engine_restarts if board is not None else 0
        return ((f"{restarts} engine restarts", "warn"),) if restarts else ()

    def body(self, width: int, height: int) -> list[Line]:
        board = self.top.shown
        if board is None:
            return [(("waiting for the first data", "faint"),)]
        return fields(_figures(board, width, self.glyphs), width)[:height]


def _figures(board: Board, width: int, glyphs: Glyphs) -> list[tuple[str, str, str]]:
    m, s, load = board.machine, board.status, board.load
    gpu = f"{percent(m.gpu_busy)} busy, {size_of(m.gpu_used_bytes, m.gpu_total_bytes)} used"
    gpu = "it tells no figures" if m.gpu_busy is None and m.gpu_total_bytes is None else gpu
    daemon = f"{percent(m.daemon_cpu)} of a core, {size(m.daemon_rss_bytes)}, pid {s.pid}"
    engine = f"{percent(m.engine_cpu)} of a core, {size(m.engine_rss_bytes)}"
    engine += f", pid {s.engine_pid}" if s.engine_pid is not None else ""
    host = f"{size_of(m.host_used_bytes, m.host_total_bytes)} used"
    cached = f"adapters in host memory {size_of(s.ram_used_bytes, s.ram_limit_bytes)}"
    times = f"first token {_spread(load.first_token)}  between {_spread(load.inter_token)}"
    times += f"  queued {_spread(load.queue)}" if width >= _SIDE_BY_SIDE else ""
    room = max(10, min(60, width - 40))
    history = sparkline(load.tokens_history, room, glyphs)
    pace = f"{history} {rate(load.tokens_per_second)} tok/s"
    refused = f"  {rate(load.refused_per_second)} refused/s" if load.refused_per_second else ""
    return [
        ("gpu", f"{s.device_name or s.device}  {gpu}", ""),
        ("daemon", f"{daemon}  up {age(s.uptime_seconds)}", ""),
        ("engine", f"{engine}  {s.preemptions} preemptions", ""),
        ("host", f"{host}  {cached}", ""),
        ("times", times, ""),
        ("output", pace + refused, ""),
    ]


def _spread(spread: Spread) -> str:
    return f"{duration(spread.p50)}/{duration(spread.p90)}/{duration(spread.p99)}"


# ----------------------------------------------------------------- settings
class Setting(Struct, frozen=True):
    """One key; `waits` is what a reload found and a start will take."""

    key: str
    value: str
    origin: str
    waits: str | None = None


class SettingsPanel(Grid[Setting]):
    """What is in effect, and where it is from."""

    def __init__(self) -> None:
        super().__init__(Listing(_fields, _SORTS, "from"), _COLUMNS, id="settings")
        self.title_first = True
        self.corners, self.bottom = "├┤", True
        self._answer: Answer[RunningConfig] | None = None
        self._asked_at = float("-inf")
        self._seen = ""  # reload and instance that the answer is of

    def show(self) -> None:
        board, office = self.top.shown, self.top.office
        if board is not None and office is not None and self.top.model.live:
            of = f"{board.status.instance_id} {board.health.reloaded_at}"
            now = self.top.model.now()
            if of != self._seen or now - self._asked_at >= CONFIG_SECONDS:
                self._seen, self._asked_at = of, now
                office.ask("config", _ask_config, self._take)
        self.repaint()

    def _take(self, answer: Answer[RunningConfig]) -> None:
        self._answer = answer
        if answer.value is not None:
            self.listing.show({row.key: row for row in settings_of(answer.value)})
        self.repaint()

    def title(self) -> Line:
        said: list[Span] = [("SETTINGS", "title")]
        rows = self.listing.rows.values()
        own = sum(row.origin != DEFAULT for row in rows)
        if rows:
            said.append((f"  {own} of {len(rows)} set", ""))
        waits = sum(row.waits is not None for row in rows)
        if waits:
            said.append((f"  {waits} wait for a restart", "warn"))
        if self._answer is not None and self._answer.error:
            gateway = self._answer.code == NO_CONFIG
            why = "each member has its own" if gateway else self._answer.error
            said.append((f"  {why}", "" if gateway else "bad"))
        return tuple(said)

    def empty(self) -> str:
        if self.top.office is None:
            return "a recording has no settings"
        if self._answer is not None and self._answer.error:
            return OF_MEMBERS if self._answer.code == NO_CONFIG else self._answer.error
        if self.listing.filter_text and self.listing.rows:
            return f"none of {len(self.listing.rows)} matches the filter; esc clears it"
        return "asking the daemon"

    def ink_of(self, key: str, row: Setting) -> str:
        return "faint" if row.origin == DEFAULT else ""


DEFAULT = "default"
#: What a gateway answers: it has no settings, and a daemon always has.
NO_CONFIG = "not_found"
OF_MEMBERS = "settings are each member's: ask a daemon for its own"


def _ask_config(client: Client) -> RunningConfig:
    return client.config()


def settings_of(config: RunningConfig) -> list[Setting]:
    """A row a key; lists and tables are told in one line."""
    rows: list[Setting] = []
    for section, keys in config.settings.items():
        pairs = keys.items() if isinstance(keys, dict) else [("", keys)]
        for key, value in pairs:
            name = f"{section}.{key}" if key else section
            origin = config.origins.get(name, DEFAULT)
            waits = config.needs_restart.get(name)
            rows.append(Setting(name, told(value), origin, None if waits is None else told(waits)))
    return rows


def told(value: Any) -> str:
    """As a person would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(told(each) for each in value) or "none"
    if isinstance(value, dict):
        return "  ".join(f"{key} {told(each)}" for key, each in value.items()) or "none"
    return "none" if value is None or value == "" else str(value)


def _fields(key: str, row: Setting) -> Mapping[str, str]:
    return {"from": row.origin, "value": row.value}


_SORTS: Mapping[str, Callable[[str, Setting], object]] = {
    "from": lambda key, row: (row.waits is None, row.origin == DEFAULT, key),
    "key": lambda key, row: key,
    "value": lambda key, row: row.value,
}


def _value(key: str, row: Setting, glyphs: Glyphs) -> Line:
    waits = "" if row.waits is None else f" {glyphs.to} {row.waits} at the next start"
    return ((row.value, ""), (waits, "warn"))


_COLUMNS: tuple[Column[Setting], ...] = (
    Column("key", "SETTING", 30, lambda k, r, g: ((k, ""),)),
    Column("value", "VALUE", 14, _value, grow=True),
    Column("from", "FROM", 34, lambda k, r, g: ((r.origin, ""),), drop=1),
)
