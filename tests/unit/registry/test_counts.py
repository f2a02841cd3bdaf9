"""Transactions of the registry are counted and timed, and its troubles told apart."""

import errno
import sqlite3

import pytest
from sqlalchemy.exc import OperationalError

from lorad.errors import LoradError
from lorad.registry.counts import Counts, kind_of
from lorad.registry.registry import Registry


def sqlite_error(code):
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (sqlite_error(sqlite3.SQLITE_BUSY), "busy"),
        (sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT), "busy"),
        (sqlite_error(sqlite3.SQLITE_FULL), "full"),
        (sqlite_error(sqlite3.SQLITE_IOERR_WRITE), "full"),
        (sqlite_error(sqlite3.SQLITE_IOERR_FSYNC), "io"),
        (sqlite_error(sqlite3.SQLITE_CANTOPEN), "io"),
        (sqlite_error(sqlite3.SQLITE_NOTADB), "corrupt"),
        (OperationalError("select", {}, sqlite_error(sqlite3.SQLITE_CORRUPT)), "corrupt"),
        (OSError(errno.ENOSPC, "full"), "full"),
        (OSError(errno.EIO, "io"), "io"),
        (LoradError("conflict", "somebody was refused"), None),
        (KeyError("ours"), None),
    ],
)
def test_errors_are_told_apart(error, kind):
    assert kind_of(error) == kind
    counts = Counts()
    with pytest.raises(type(error)), counts.transaction("write"):
        raise error
    assert counts.number == {"write": 1}
    assert dict(counts.errors) == ({("write", kind): 1} if kind else {})


def test_a_registry_counts_its_reads_and_writes(tmp_path):
    registry = Registry.open(tmp_path)
    try:
        before = registry.transactions.number.copy()
        registry.get("nobody")
        registry.audit("test", actor="me").result()
        grown = registry.transactions.number - before
        assert grown["read"] == 1 and grown["write"] >= 1
        assert sum(registry.transactions.seconds["read"].counts) >= 1
        assert registry.file_bytes() > 4096
        assert registry.quarantined() == {}
        assert registry.backed_up_at() > 0 or not registry.transactions.errors
        registry.quarantine("bad", "inbox", "E_NAN", "NaN").result()
        assert registry.quarantined() == {"E_NAN": 1}
    finally:
        registry.close()
