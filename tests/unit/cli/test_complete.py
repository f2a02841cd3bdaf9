"""Completion never hangs a shell and never prints into it."""

import socket
import threading
import time

import pytest

from lorad.cli import complete


class Context:
    """As much of a Typer context as completion looks at."""

    def __init__(self, host=None):
        self.params = {"host": host}

    def find_root(self):
        return self


@pytest.fixture
def silent(tmp_path):
    """A socket that takes calls and answers none."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        yield f"unix://{tmp_path / 's'}"


def test_a_daemon_that_does_not_answer_costs_no_more_than_the_patience(silent, capsys):
    complete.any_name(Context(silent), "")  # imports are not counted
    started = time.monotonic()
    assert complete.any_name(Context(silent), "") == []
    assert time.monotonic() - started < complete.PATIENCE + 1.0
    assert capsys.readouterr() == ("", "")


def test_a_daemon_that_drips_costs_no_more_either(silent, monkeypatch):
    """Each byte would start httpx's clock anew."""
    from lorad.client import LoradClient

    over = threading.Event()
    monkeypatch.setattr(LoradClient, "adapters", lambda self, **options: over.wait(30))
    started = time.monotonic()
    assert complete.any_name(Context(silent), "") == []
    assert time.monotonic() - started < 5
    over.set()


@pytest.mark.parametrize("host", ["unix:///nowhere/at/all.sock", "tcp://nonsense", "/etc/passwd"])
def test_no_daemon_is_no_names(host, capsys):
    assert complete.any_name(Context(host), "b") == []
    assert capsys.readouterr() == ("", "")


def test_the_environment_names_the_daemon(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAD_HOST", f"unix://{tmp_path}/none")
    assert complete.resident_name(Context(), "") == []
    assert complete.cold_name(Context(), "") == []


def test_modules_of_a_plan_complete_after_a_comma():
    from lorad.cli.plan import _dtype, _module

    assert _module("att") == ["attention"]
    assert _module("mlp,lm") == ["mlp,lm_head"]
    assert _dtype("b") == ["bfloat16"]


def test_what_a_list_is_sorted_by_completes_either_way_round():
    from lorad.cli.listing import _sort_words

    assert _sort_words("si") == ["size"]
    assert _sort_words("-si") == ["-size"]
