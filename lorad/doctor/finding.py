"""A finding: what was looked at, how it is, and what to do about it."""

from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

DOCTOR_SCHEMA = "lorad/doctor.v1"


class Finding(Struct, frozen=True, kw_only=True):
    """`fix` is the next step; "" where nothing is to be done."""

    check: str
    status: Literal["ok", "warn", "fail"]
    message: str
    fix: str = ""


class Findings(Struct, frozen=True, kw_only=True):
    """`loractl doctor --json`.  `ok`: nothing failed."""

    schema: str = DOCTOR_SCHEMA
    ok: bool
    items: tuple[Finding, ...]


Look = Callable[[], Iterator[Finding]]


def ok(check: str, message: str) -> Finding:
    return Finding(check=check, status="ok", message=message)


def warn(check: str, message: str, fix: str = "") -> Finding:
    """It works, but not as well as it might, or not for long."""
    return Finding(check=check, status="warn", message=message, fix=fix)


def fail(check: str, message: str, fix: str = "") -> Finding:
    """Something will be refused because of it."""
    return Finding(check=check, status="fail", message=message, fix=fix)
