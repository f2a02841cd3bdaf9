"""The writing thread: in order, one transaction each, and nobody waits but who asks to."""

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from sqlalchemy import Connection

from lorad.errors import RegistryUnusable
from lorad.registry.writer import Writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    connection = sqlite3.connect(tmp_path / "x.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE numbers (n INTEGER)")
    connection.close()
    return tmp_path / "x.db"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.close()


def _insert(connection: Connection, number: int) -> int:
    connection.exec_driver_sql(f"INSERT INTO numbers VALUES ({number})")
    return number


def _numbers(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [n for (n,) in connection.execute("SELECT n FROM numbers ORDER BY rowid")]
    finally:
        connection.close()


def test_jobs_run_in_the_order_of_their_submission(writer: Writer, path: Path) -> None:
    futures = [writer.submit(lambda c, n=n: _insert(c, n)) for n in range(50)]
    assert [f.result() for f in futures] == list(range(50))
    assert _numbers(path) == list(range(50))


def test_a_result_is_told_only_after_the_commit(writer: Writer, path: Path) -> None:
    order: list[object] = []
    future = writer.submit(lambda c: _insert(c, 1), lambda n: order.append((n, _numbers(path))))
    future.add_done_callback(lambda _: order.append("told"))
    future.result()
    writer.close()
    assert order == [(1, [1]), "told"]


def test_a_job_that_raises_leaves_nothing_and_the_next_one_runs(writer: Writer, path: Path) -> None:
    def half(connection: Connection) -> None:
        _insert(connection, 1)
        raise KeyError("half way")

    with pytest.raises(KeyError):
        writer.submit(half).result()
    assert writer.submit(lambda c: _insert(c, 2)).result() == 2
    assert _numbers(path) == [2]


def test_an_error_in_what_follows_is_logged_and_the_result_stands(
    writer: Writer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert writer.submit(lambda c: _insert(c, 1), lambda n: [][n]).result() == 1
    assert _numbers(path) == [1] and "the write itself stands" in caplog.text


def test_submitting_does_not_wait_for_the_writer(writer: Writer) -> None:
    hold, begun = threading.Event(), threading.Event()

    def slow(_: Connection) -> None:
        begun.set()
        hold.wait(10)

    first = writer.submit(slow)
    assert begun.wait(10)
    second = writer.submit(lambda c: _insert(c, 1))  # returns while the first still runs
    assert not first.done() and not second.done()
    hold.set()
    assert second.result(10) == 1


def test_a_cancelled_job_is_not_begun(writer: Writer, path: Path) -> None:
    hold = threading.Event()
    first = writer.submit(lambda _: hold.wait(10))
    second = writer.submit(lambda c: _insert(c, 1))
    assert second.cancel()
    hold.set()
    first.result(10)
    writer.submit(lambda c: _insert(c, 2)).result(10)
    assert _numbers(path) == [2]


def test_closing_ends_what_was_given_and_takes_no_more(writer: Writer, path: Path) -> None:
    futures = [writer.submit(lambda c, n=n: _insert(c, n)) for n in range(20)]
    writer.close()
    assert not wait(futures, timeout=0).not_done
    assert _numbers(path) == list(range(20))
    with pytest.raises(RegistryUnusable):
        writer.submit(lambda c: _insert(c, 99)).result()


def test_every_connection_keeps_the_promises_of_the_settings(writer: Writer) -> None:
    def ask(connection: Connection) -> list[int | str]:
        words = ("foreign_keys", "synchronous", "journal_mode", "busy_timeout")
        return [connection.exec_driver_sql(f"PRAGMA {w}").scalar_one() for w in words]

    assert writer.submit(ask).result() == [1, 2, "wal", 5000]


def test_a_directory_that_vanished_is_told_and_not_a_hang(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "nowhere" / "x.db")
    with pytest.raises(RegistryUnusable, match="cannot be used"):
        writer.submit(lambda c: _insert(c, 1)).result(10)
    writer.close()
