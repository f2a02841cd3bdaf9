"""Which name was probably meant."""

import time

import pytest

from lorad.spelling import nearest

MANY = [f"tenant-{i % 50}/adapter-{i:05d}" for i in range(10_000)]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("acme/sql-gne", "acme/sql-gen"),
        ("sql-gen", "acme/sql-gen"),
        ("cv", "international/cv"),
        ("acme/sqlgen", "acme/sql-gen"),
        ("bibel", "bible"),
        ("a", None),
        ("", None),
        ("nothing-like-it", None),
        ("x" * 100_000, None),
    ],
)
def test_the_nearest_name_is_one_that_could_be_meant(asked, meant):
    few = ["acme/sql-gen", "bible", "globex/legal", "international/cv"]
    assert nearest(asked, [*MANY, *few]) == meant


def test_among_ten_thousand_names_it_takes_no_time_that_a_stream_would_notice():
    best = min(_seconds(lambda: nearest("tenant-7/adaptr-00017", MANY)) for _ in range(3))
    assert best < 0.05  # difflib over all of them takes five times as long


def _seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began
