"""What the drawer tells about a row that is on the board as a whole: a request, an event, a tenant.

Goes in: the row's key.  Comes out: lines.  Nothing is asked for.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from lorad.event_types import TYPES
from lorad.spelling import split_digest
from lorad.tui.details import clock_and_day
from lorad.tui.draw import Glyphs, age, count, percent, rate, ratio
from lorad.tui.office import Office
from lorad.tui.panel import Line
from lorad.tui.prose import field, fields, heading
from lorad.wire import EventItem
from lorad.wire_stream import Board, Check, RequestRow, TenantRow


class Fact:
    """A subclass gives `row` and `rows`."""

    tall = False

    def __init__(self, name: str, last: Any) -> None:
        self.name = name
        self._last = last  # as it was seen last, for when it is gone

    @property
    def target(self) -> str:
        return ""

    def ask(self, office: Office, then: Callable[[], None]) -> None:
        """There is nothing to ask."""

    def as_json(self) -> str:
        return msgspec.json.encode(self._last).decode()

    def title(self) -> Line:
        return ((self.name, "title"),)

    def row(self, board: Board) -> Any:
        """None once it is gone."""
        return self._last

    def rows(self, row: Any, width: int, glyphs: Glyphs) -> list[Line]:
        raise NotImplementedError

    def told(self, board: Board | None, width: int, glyphs: Glyphs) -> list[Line]:
        now = self.row(board) if board is not None else None
        if now is not None:
            self._last = now
        gone: list[Line] = [] if now is not None else [(("it is gone; as it was last:", "warn"),)]
        return gone + self.rows(self._last, width, glyphs)


class RequestFact(Fact):
    @property
    def last(self) -> RequestRow:
        """As it was seen last."""
        row: RequestRow = self._last
        return row

    @property
    def target(self) -> str:
        return split_digest(self._last.adapter)[0]

    def title(self) -> Line:
        return (("REQUEST ", "title"), (self.name, ""))

    def row(self, board: Board) -> RequestRow | None:
        return board.requests.get(self.name)

    def rows(self, row: RequestRow, width: int, glyphs: Glyphs) -> list[Line]:
        share = percent(ratio(row.cached_tokens, row.prompt_tokens))
        most = "" if row.max_tokens is None else f" of {row.max_tokens} at most"
        return fields(
            [
                ("state", row.state, "warn" if row.state == "queued" else "good"),
                ("adapter", row.adapter or "the base model", "strong"),
                *([("model", row.model, "")] if row.model else []),
                ("rev", row.rev, ""),
                ("route", row.endpoint, ""),
                ("age", age(row.age_seconds), ""),
                ("prompt", f"{row.prompt_tokens} tokens", ""),
                ("cached", f"{row.cached_tokens} of them, {share}", ""),
                ("written", f"{row.generated_tokens} tokens{most}", ""),
                ("pace", f"{rate(row.tokens_per_second)} tokens a second", ""),
                ("priority", str(row.priority), ""),
                ("tenant", row.tenant, ""),
                ("client", row.client, ""),
            ],
            width,
        )


class EventFact(Fact):
    _last: EventItem

    @property
    def target(self) -> str:
        return split_digest(self._last.name)[0]

    def title(self) -> Line:
        return (("EVENT ", "title"), (self._last.type, ""))

    def rows(self, row: EventItem, width: int, glyphs: Glyphs) -> list[Line]:
        ink = {"warn": "warn", "error": "bad"}.get(row.level, "")
        out = fields(
            [
                ("time", clock_and_day(row.time), ""),
                ("level", row.level, ink),
                ("adapter", row.name, "strong"),
                ("rev", row.rev, ""),
                ("replica", row.replica, ""),
                ("cause", row.cause, ""),
                ("says", row.message, ""),
                ("means", TYPES.get(row.type, ""), "faint"),
                ("number", str(row.id) if row.id else "", "faint"),
            ],
            width,
        )
        if row.details:
            out += [(), heading("DETAILS", width, glyphs)]
            out += [line for key, value in row.details.items() for line in field(key, value, width)]
        return out


class TenantFact(Fact):
    def title(self) -> Line:
        return (("TENANT ", "title"), (self.name or "(none)", ""))

    def row(self, board: Board) -> TenantRow | None:
        return board.tenants.get(self.name)

    def rows(self, row: TenantRow, width: int, glyphs: Glyphs) -> list[Line]:
        return fields(
            [
                ("runs", f"{row.running} requests, {row.waiting} wait", ""),
                ("requests", _of_limit(row.requests_per_minute, row.rpm), ""),
                ("tokens", _of_limit(row.tokens_per_minute, row.tpm), ""),
                ("refused", f"{count(row.refused_per_minute)} a minute", ""),
                ("queue", f"{row.queue} at most" if row.queue else "no limit of its own", ""),
                ("weight", f"{row.weight:g}", ""),
                ("priority", f"{row.max_priority} at most", ""),
                ("may use", "  ".join(row.adapters) or "those that begin with its name", ""),
                ("keys", "  ".join(row.keys) or "none", ""),
                ("used", clock_and_day(row.last_used_at) or "never", ""),
            ],
            width,
        )


def _of_limit(number: float, limit: int) -> str:
    most = f" of {count(limit)}" if limit else ", no limit"
    return f"{count(number)} a minute{most}"


class CheckFact(Fact):
    _last: Check

    def title(self) -> Line:
        return (("CHECK ", "title"), (self.name, ""))

    def row(self, board: Board) -> Check | None:
        return next((check for check in board.health.checks if check.name == self.name), None)

    def rows(self, row: Check, width: int, glyphs: Glyphs) -> list[Line]:
        ink = {"warn": "warn", "error": "bad"}.get(row.level, "good")
        return fields(
            [("is", row.level, ink), ("says", row.message, ""), ("try", row.hint, "strong")], width
        )


class SettingFact(Fact):
    """One key of the configuration, its value and where that is from."""

    def title(self) -> Line:
        return (("SETTING ", "title"), (self.name, ""))

    def rows(self, row: Any, width: int, glyphs: Glyphs) -> list[Line]:
        waits = "" if row.waits is None else f"{row.waits} at the next start"
        return fields(
            [("value", row.value, "strong"), ("from", row.origin, ""), ("then", waits, "warn")],
            width,
        )
