"""Operators' routes of a gateway follow the daemon's, each by a decision that somebody took."""

import pytest

from lorad.api import app
from lorad.api.app import ADMIN, OPEN, Route
from lorad.fleet import admin_routes
from lorad.fleet.admin_routes import DECISIONS, MEMBERS_OWN, methods_of, routes, undecided
from lorad.fleet.asking import V1

DAEMONS = {route.path: route for route in ADMIN}
HERE = {route.path: route for route in routes({})}


def test_every_route_of_a_daemon_has_a_decision() -> None:
    assert undecided() == [], "say in DECISIONS what a gateway does with it"


def test_there_is_no_decision_on_a_route_that_no_daemon_has() -> None:
    assert set(DECISIONS) <= set(DAEMONS) - OPEN
    words = {path.removeprefix(f"{V1}/").partition("/")[0] for path in DAEMONS}
    assert set(MEMBERS_OWN) <= words


@pytest.mark.parametrize("path", [path for path, what in DECISIONS.items() if what != "elsewhere"])
def test_what_was_decided_is_what_answers_by_the_daemons_own_methods(path) -> None:
    what = DECISIONS[path]
    assert methods_of(HERE[path]) == methods_of(DAEMONS[path])
    if what == "as there":
        assert HERE[path].endpoint is DAEMONS[path].endpoint
    elif callable(what):
        assert HERE[path].endpoint is what is not DAEMONS[path].endpoint


def test_nothing_else_is_here_than_rollbacks_and_what_is_each_members_own() -> None:
    more = {path for path in HERE if path not in DECISIONS}
    own = {f"{V1}/{word}{rest}" for word in MEMBERS_OWN for rest in ("", "/{rest:path}")}
    assert more == {f"{V1}/rollback"} | own
    assert "/openapi.json" not in HERE


def test_a_new_route_of_the_daemons_is_told_and_not_served_before_somebody_decides(
    monkeypatch,
) -> None:
    new = Route(f"{V1}/shuffle", app.ADMIN[0].endpoint, methods=["POST"])
    near = Route(f"{V1}/gcs", new.endpoint)  # is not of `gc`
    monkeypatch.setattr(admin_routes, "ADMIN", [*ADMIN, new, near])
    assert undecided() == [new.path, near.path]
    assert not {new.path, near.path} & {route.path for route in routes({})}


def test_a_handler_that_stands_in_is_asked_instead() -> None:
    async def mine(request): ...

    (found,) = (r for r in routes({f"{V1}/uploads": mine}) if r.path == f"{V1}/uploads")
    assert found.endpoint is mine and methods_of(found) == ["POST"]
