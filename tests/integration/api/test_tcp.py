"""The planes over TCP: every route asks for a key, and no web page gets in by a name of its own."""

import hashlib
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from lorad.api.app import ADMIN, HEALTH, INFERENCE, admin_tcp_app, inference_tcp_app
from lorad.api.server import HttpServer, bind_tcp
from lorad.api.tcp import TcpKeys
from lorad.config_sections import Tcp
from lorad.key_file import NONE, Keys
from lorad.registry.records import KeyRecord, TenantRecord
from lorad.service import keys as tenant_keys

USER, BOSS, WRONG = "user" * 10, "boss" * 10, "none" * 10
TENANT = tenant_keys.new_key()
VALUES = {
    "id": "bible",
    "name": "bible",
    "upload_id": "u",
    "file": "f",
    "operation_id": "0",
    "request_id": "0",
}
VALUES |= {"tenant": "acme", "operation_id": "0", "request_id": "0"}
OPEN = {route.path for route in HEALTH}


def keys_of(*texts):
    return Keys({hashlib.sha256(text.encode()).hexdigest(): text[:4] for text in texts})


def rows(routes):
    for route in routes:
        path = route.path
        for name, value in VALUES.items():
            path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
        for method in sorted(route.methods - {"HEAD"}):
            yield pytest.param(method, path, id=f"{method} {route.path}")


MANAGING = [row for row in rows(ADMIN) if row.values[1] not in OPEN]
ASKING = [row for row in rows(INFERENCE) if row.values[1] not in OPEN]


@pytest.fixture(scope="module")
def tcp(small_api):
    """Both planes on free ports, beside the sockets of the same services."""
    keys = TcpKeys(keys_of(USER), keys_of(BOSS))
    found = SimpleNamespace(api=small_api, keys=keys, urls={}, servers=[])

    async def start():
        for name, make in (("inference", inference_tcp_app), ("admin", admin_tcp_app)):
            listener = bind_tcp("127.0.0.1:0")
            server = HttpServer(make(small_api.deps, keys), listener)
            await server.start()
            found.servers.append(server)
            found.urls[name] = f"http://127.0.0.1:{listener.getsockname()[1]}"

    small_api.run(start)
    yield found
    for server in found.servers:
        small_api.run(server.stop)


@pytest.fixture
def ask(tcp):
    """ask(plane, method, path, key, **headers) -> the response"""

    def ask(plane, method, path, key="", **headers):
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=tcp.urls[plane], timeout=10, trust_env=False) as http:
            body = {} if method in ("POST", "PATCH") else None
            return http.request(method, path, json=body, headers=headers)

    yield ask
    tcp.keys.inference, tcp.keys.admin, tcp.keys.open = keys_of(USER), keys_of(BOSS), False
    tcp.api.run(lambda: tcp.api.callers.replace(()))
    tcp.api.reset()


def refused(answer):
    return (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(("method", "path"), MANAGING)
def test_each_admin_route_wants_an_operators_key(tcp, ask, method, path):
    for key in ("", WRONG, USER, TENANT.text):
        assert refused(ask("admin", method, path, key)), key
    assert not tcp.api.adapters.calls and not tcp.api.operator.asked
    if not any(word in path for word in ("events", "logs", "stream")):  # which may not end
        assert ask("admin", method, path, BOSS).status_code not in (401, 403)


@pytest.mark.parametrize(("method", "path"), ASKING)
def test_each_inference_route_wants_a_key(ask, method, path):
    for key in ("", WRONG, BOSS, TENANT.text):
        assert refused(ask("inference", method, path, key)), key
    assert ask("inference", method, path, USER).status_code not in (401, 403)


def test_who_did_what_over_tcp_is_called_by_its_keys_name(tcp, ask, monkeypatch):
    noted = []

    class Notes:
        def note(self, actor, action, name, result, **more):
            noted.append((actor, action, result))

    monkeypatch.setattr(tcp.api.deps, "audit", Notes())
    assert ask("admin", "POST", "/admin/v1/drain", BOSS).status_code == 200
    assert refused(ask("admin", "POST", "/admin/v1/drain", WRONG))
    assert refused(ask("inference", "POST", "/v1/completions", WRONG))
    assert noted == [
        ("tcp key boss", "drain", "ok"),
        ("unknown peer", "drain", "invalid_api_key"),
        ("unknown peer", "request", "invalid_api_key"),
    ]


def test_health_is_open_and_the_planes_do_not_mix(ask):
    for plane in ("inference", "admin"):
        for path in sorted(OPEN):
            assert ask(plane, "GET", path).status_code == 200
    assert ask("inference", "GET", "/admin/v1/status", USER).status_code == 404
    assert ask("admin", "GET", "/v1/models", BOSS).status_code == 404


def test_a_tenants_key_counts_and_shows_what_is_the_tenants(tcp, ask):
    record = TenantRecord(
        name="acme", adapters=("acme/*",), keys=(KeyRecord(id=TENANT.id, digest=TENANT.digest),)
    )
    tcp.api.run(lambda: tcp.api.callers.replace((record,)))
    seen = {m["id"] for m in ask("inference", "GET", "/v1/models", TENANT.text).json()["data"]}
    every = {m["id"] for m in ask("inference", "GET", "/v1/models", USER).json()["data"]}
    assert (seen, every) == ({"tiny", "acme/sql"}, {"tiny", "acme/sql", "bible"})
    assert refused(ask("inference", "GET", "/v1/models"))
    assert refused(ask("admin", "GET", "/admin/v1/status", TENANT.text))


def test_without_keys_and_tenants_loopback_is_open_to_the_machine_and_to_nobody_else(tcp, ask):
    tcp.keys.inference, tcp.keys.open = NONE, True
    assert ask("inference", "GET", "/v1/models").status_code == 200
    tcp.keys.open = False  # bound to an address that others reach
    assert refused(ask("inference", "GET", "/v1/models"))
    tcp.keys.open = True
    tcp.api.run(lambda: tcp.api.callers.replace((TenantRecord(name="acme", adapters=()),)))
    assert refused(ask("inference", "GET", "/v1/models"))


@pytest.mark.parametrize("plane", ["inference", "admin"])
@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/admin/v1/status"])
def test_a_name_that_is_not_ours_is_refused_on_every_route(ask, plane, path):
    for host in ("evil.example", "evil.example:8411", "localhost.evil.example", "", "[::1"):
        answer = ask(plane, "GET", path, USER if plane == "inference" else BOSS, host=host)
        assert answer.status_code in (400, 403, 404) and answer.status_code != 200, host
        assert "evil" not in answer.text
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9", "[::1]:9", "10.1.2.3"):
        assert ask(plane, "GET", "/livez", host=host).status_code == 200, host


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://10.0.0.1", 403),
        ("http://[", 403),
        ("http://localhost:3000", 200),
    ],
)
def test_a_web_page_of_elsewhere_is_refused_whatever_its_key(ask, origin, status):
    assert ask("inference", "GET", "/v1/models", USER, origin=origin).status_code == status
    assert ask("admin", "GET", "/admin/v1/status", BOSS, origin=origin).status_code == status


def test_a_name_may_be_allowed_and_the_sockets_ask_for_none(tcp, ask):
    deps = tcp.api.deps
    before = deps.settings
    deps.settings = msgspec.structs.replace(before, tcp=Tcp(allow_hosts=("gpu.example",)))
    try:
        assert ask("inference", "GET", "/livez", host="GPU.example:8411").status_code == 200
        assert ask("inference", "GET", "/livez", host="localhost").status_code == 403
    finally:
        deps.settings = before
    transport = httpx.HTTPTransport(uds=str(tcp.api.inference), verify=False)
    with httpx.Client(transport=transport, base_url="http://evil.example") as http:
        assert http.get("/v1/models").status_code == 200
