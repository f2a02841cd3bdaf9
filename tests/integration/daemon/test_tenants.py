"""A running daemon with tenants: theirs after kill -9, reloads and a lost database, and apart."""

import os
import signal

import pytest

from lorad import client_tenants as calls
from lorad.wire_tenants import TenantStart

PREFIX = "the same words for everybody, again and again and again and once more. " * 4
ME = f"uid {os.getuid()} pid "


class House:
    def __init__(self, daemon):
        self.daemon, self.keys = daemon, {}

    def add(self, name, **fields):
        with self.daemon.client() as client:
            made = calls.add(client, TenantStart(name=name, **fields))
        self.keys[name] = made.key

    def post(self, tenant, model, **more):
        """(status, cached tokens) of a request with the tenant's key."""
        body = self.daemon.body(model, 4, prompt=PREFIX, **more)
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        with self.daemon.http() as http:
            answer = http.post("/v1/completions", json=body, headers=headers)
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]["code"]
        return 200, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def audit(self, **filters):
        wanted = {"limit": 1000, "seconds": 0, "actor": "", "action": "", "name": ""} | filters
        with self.daemon.client() as client:
            items = calls.audit(client, **wanted).items
        return [(item.actor, item.action, item.name, item.result) for item in items]


@pytest.fixture(scope="module")
def house(make_daemon):
    daemon = make_daemon()
    daemon.configure('\n[inference]\nauth = "key"\n[log]\nlevel = "debug"\n')
    daemon.start()
    house = House(daemon)
    daemon.upload("acme/sql", 1)
    house.add("acme")
    house.add("rival")
    yield house
    assert daemon.stop() == 0, daemon.tail()
    log = daemon.log.read_text(errors="replace")
    assert "tenant.added tenant:acme: ok" in log
    assert all(key[-43:] not in log for key in house.keys.values())


def test_no_tenant_finds_what_another_has_cached(house):
    """Of the base model, whose blocks would be the same for all."""
    assert house.post("acme", "tiny") == (200, 0)
    status, cached = house.post("acme", "tiny")
    assert (status, cached > 0) == (200, True)
    assert house.post("rival", "tiny") == (200, 0)
    assert house.post("rival", "tiny") == (200, cached)
    assert house.post("rival", "tiny", cache_salt="acme/") == (200, 0)


def test_the_audit_says_who_added_and_who_was_refused(house, poll):
    assert house.post("rival", "acme/sql") == (404, "model_not_found")
    assert house.post("acme", "acme/sql")[0] == 200
    [(actor, *added)] = house.audit(action="register", name="acme/sql")
    assert (actor.startswith(ME), added) == (True, ["register", "acme/sql", "ok"])
    refused = poll(lambda: house.audit(action="request"), lambda: "the refusal in the audit")
    key = house.keys["rival"].split("_")[1]
    assert [(row[0].endswith(f" key {key}"), *row[1:]) for row in refused] == [
        (True, "request", "acme/sql", "forbidden")
    ]


def test_reloads_in_a_row_leave_tenants_and_keys_alone(house, poll):
    for _ in range(20):
        house.daemon.process.send_signal(signal.SIGHUP)
        assert house.post("acme", "tiny")[0] == 200
        assert house.post("rival", "acme/sql")[0] == 404


@pytest.mark.slow
def test_tenants_and_keys_are_there_after_kill_9_and_after_the_database_is_lost(house):
    daemon = house.daemon
    daemon.kill()
    daemon.start()
    assert house.post("acme", "acme/sql")[0] == 200
    daemon.kill()
    state = daemon.root / "state"
    for file in (*state.glob("registry.db*"), *state.glob("backups/*")):
        file.unlink()
    daemon.start()
    assert house.post("acme", "acme/sql")[0] == 200
    assert house.post("rival", "acme/sql")[0] == 404
    with daemon.http() as http:
        assert http.get("/v1/models").status_code == 401
    told = [e.message for e in daemon.events() if e.type == "registry.recovered"]
    assert "the tenants and their keys were restored beside the database" in told


def test_times_of_last_use_are_there_after_a_stop(house):
    house.post("acme", "tiny")
    assert house.daemon.stop() == 0
    house.daemon.start()
    with house.daemon.client() as client:
        acme = calls.every(client).items[0]
    assert acme.last_used_at and acme.keys[0].last_used_at
