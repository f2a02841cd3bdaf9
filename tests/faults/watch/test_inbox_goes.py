"""The inbox, or what the store made of it, goes away under a running daemon: what serves goes on,
and all is well by itself when it is back."""

import os
import shutil
import sys

import pytest

UNTIL = sys.modules["daemons_of_watch"].until


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    text = daemon.config.read_text()
    more = 'settle = "100ms"\nrescan = "500ms"\non_delete = "remove"'
    daemon.config.write_text(text.replace('settle = "100ms"', more))
    daemon.start()
    for number, name in enumerate(("one", "acme/two")):
        daemon.drop(name, number)
        served(daemon, name)
    return daemon


def served(daemon, name):
    """Its row once it serves; before that it only waits to be packed."""

    def there():
        row = daemon.adapter(name)
        return row if row is not None and row.rev and not row.candidate_rev else None

    return UNTIL(there, lambda: f"{name} to serve:\n{daemon.tail()}")


def warnings(daemon):
    return sum(event.type == "watch.warning" for event in daemon.events())


def types(daemon, name):
    return [e.type for e in daemon.events() if e.name == name]


def test_an_inbox_that_is_moved_away_takes_no_adapter_along_and_is_followed_again(daemon, poll):
    before = daemon.text("one")
    away = daemon.root / "away"
    daemon.inbox.rename(away)
    poll(lambda: "adapter.source_gone" in types(daemon, "acme/two"), "the loss to be told")
    assert daemon.adapter("one").rev and daemon.text("one") == before
    assert warnings(daemon)
    away.rename(daemon.inbox)
    daemon.drop("three", 3)
    served(daemon, "three")
    assert types(daemon, "one").count("adapter.added") == 1


def test_an_inbox_that_is_deleted_and_made_anew_is_followed(daemon, poll):
    shutil.rmtree(daemon.inbox)
    poll(lambda: types(daemon, "one").count("adapter.source_gone") >= 2, "the loss to be told")
    daemon.inbox.mkdir()
    daemon.drop("four", 4)
    served(daemon, "four")
    assert daemon.adapter("one").rev


def test_a_folder_that_is_deleted_in_it_takes_its_adapter_along(daemon, poll):
    shutil.rmtree(daemon.inbox / "four")
    poll(lambda: daemon.adapter("four") is None, "the adapter to go with its folder")
    assert types(daemon, "four")[-1] == "adapter.removed"
    assert daemon.adapter("one").rev, "and no other"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_inbox_without_permission_loses_nothing_and_resumes(daemon, poll):
    daemon.drop("five", 5)
    served(daemon, "five")
    daemon.inbox.chmod(0)
    try:
        told = len([e for e in daemon.events() if e.type == "watch.warning"])
        poll(
            lambda: len([e for e in daemon.events() if e.type == "watch.warning"]) > told, "a word"
        )
        assert daemon.adapter("five").rev
    finally:
        daemon.inbox.chmod(0o770)
    daemon.drop("six", 6)
    served(daemon, "six")


def test_stored_files_that_vanish_are_brought_back_from_the_inbox(daemon, poll):
    """By the first request that misses them; nobody restarts anything."""
    daemon.drop("seven", 7)
    rev = served(daemon, "seven").rev
    before = daemon.text("seven")
    stored = daemon.root / "state" / "store" / rev
    shutil.rmtree(stored)
    assert daemon.text("seven") == before  # the copy on the GPU serves on
    with daemon.client() as client:
        client.evict("seven", to="disk")
    assert daemon.ask("seven").status_code in (404, 500)
    poll(lambda: "adapter.missing" in types(daemon, "seven"), "the loss to be told")

    def serves():
        answer = daemon.ask("seven")
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == before

    poll(serves, lambda: f"it to serve again:\n{daemon.tail()}")
    assert daemon.adapter("seven").rev == rev and stored.is_dir()


def test_stored_files_of_an_upload_stay_missing_until_it_is_added_again(daemon, poll):
    added = daemon.upload("eight", 8)
    stored = daemon.root / "state" / "store" / added.rev
    shutil.rmtree(stored)
    assert daemon.ask("eight").status_code in (404, 500)
    poll(lambda: daemon.adapter("eight").state == "missing", "it to be missing")
    assert daemon.ask("eight").status_code == 404
    daemon.upload("eight", 8)
    assert daemon.text("eight")
