"""Two tenants through the real sockets: what is one's is unknown to the other."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from lorad.api.app import ADMIN, INFERENCE, METRICS, OPEN
from lorad.api.protocol import Peer
from lorad.registry.registry import Registry
from lorad.service import keys

ACME, RIVAL, STRANGER = 1001, 1002, 54321
FILLED = {
    **{"id": "acme/sql", "name": "acme/sql", "tenant": "acme"},
    **{"upload_id": "u", "file": "f", "operation_id": "0", "request_id": "0"},
}


class House:
    """A server with tenants; `peer` is the uid that the next connections come from."""

    def __init__(self, api, call, monkeypatch) -> None:
        self.api, self._call = api, call
        self.uid = os.getuid()
        monkeypatch.setattr(
            "lorad.api.protocol.peer_of",
            lambda _: None if self.uid is None else Peer(77, self.uid, 1),
        )

    def admin(self, method, path, body=None):
        before, self.uid = self.uid, os.getuid()
        answer = self._call(self.api.admin, method, f"/admin/v1/{path}", body)
        self.uid = before
        return answer

    def add(self, name, **fields) -> str:
        """Its key."""
        answer = self.admin("POST", "tenants", {"name": name, **fields})
        assert answer.status == 201, answer.body
        return answer.json["key"]

    def call(self, method, path, body=None, *, uid=None, key="", headers=""):
        self.uid = os.getuid() if uid is None else uid
        bearer = f"authorization: Bearer {key}\r\n" if key else ""
        return self._call(
            self.api.inference, method, path, body, f"x-request-id: r\r\n{bearer}{headers}"
        )

    def ask(self, model, uid=None, key="", **fields):
        body = {"model": model, "prompt": "hi", **fields}
        return self.call("POST", "/v1/completions", body, uid=uid, key=key)

    def models(self, uid=None, key=""):
        answer = self.call("GET", "/v1/models", uid=uid, key=key)
        assert answer.status == 200
        return [card["id"] for card in answer.json["data"]]


@pytest.fixture
def registry() -> Iterator[Registry]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        opened = Registry.open(Path(folder))
        yield opened
        opened.close()


@pytest.fixture
def house(make_api, call, monkeypatch, registry):
    def make(auth="peer") -> House:
        made = House(make_api(auth=auth, registry=registry), call, monkeypatch)
        made.add("acme", uids=[ACME], key=False)
        made.add("rival", uids=[RIVAL], adapters=["rival/*", "bible"], base=False, key=False)
        return made

    return make


def test_a_tenant_sees_and_uses_what_is_its_own(house):
    h = house()
    assert h.models(ACME) == ["tiny", "acme/sql"]
    assert h.models(RIVAL) == ["bible"]
    assert h.models() == ["tiny", "acme/sql", "bible"]  # an operator
    assert [h.ask(m, ACME).status for m in ("acme/sql", "tiny", "bible")] == [200, 200, 404]
    assert [h.ask(m, RIVAL).status for m in ("acme/sql", "tiny", "bible")] == [404, 404, 200]


PATHS = [
    *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models"),
    *("/v1/embeddings", "/v1/rerank", "/rerank", "/embed", "/similarity", "/"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["acme/sql", "tiny"])
def test_the_forbidden_answers_byte_for_byte_as_the_unknown(house, path, model):
    """With everything but the name itself the same."""
    h = house()

    def answer(name):
        if path == "/v1/models":
            return h.call("GET", f"{path}/{name}", uid=RIVAL)
        body = {"model": name, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        if "chat" not in path:
            del body["messages"]
        body |= {"tokens": [1]} if path == "/detokenize" else {}
        body |= {"prompt": "x"} if path in ("/tokenize", "/v1/completions") else {}
        body |= {"input": "x"} if path == "/v1/embeddings" else {}
        body |= {"query": "x", "documents": ["y"]} if path == "/v1/rerank" else {}
        body |= {"query": "x", "texts": ["y"]} if path == "/rerank" else {}
        body |= {"inputs": "x"} if path in ("/embed", "/") else {}
        if path == "/similarity":
            body["inputs"] = {"source_sentence": "x", "sentences": ["y"]}
        return h.call("POST", path, body, uid=RIVAL)

    unknown = "z" * len(model)
    forbidden, absent = answer(model), answer(unknown)
    assert forbidden.status == 404
    plain = forbidden.raw.replace(model.encode(), b"?"), absent.raw.replace(unknown.encode(), b"?")
    dated = [
        b"\r\n".join(line for line in raw.split(b"\r\n") if not line.startswith(b"date:"))
        for raw in plain
    ]
    assert dated[0] == dated[1]
    assert not h.api.engine.submits


def test_what_is_forbidden_is_decided_before_anybody_looks_whether_it_exists(house):
    """So no time can tell: the adapters are not even asked."""
    h, looked = house(), []
    known = h.api.adapters.resolve
    h.api.adapters.resolve = lambda model: looked.append(model) or known(model)
    for model in ("acme/sql", "acme/none", "acme/sql@a1a1a1a1", "tiny"):
        assert h.ask(model, RIVAL).code == "model_not_found"
    assert looked == []
    assert h.ask("rival/none", RIVAL).code == "model_not_found"
    assert looked == ["rival/none"]


def test_the_times_of_forbidden_and_unknown_are_of_one_class(house):
    h = house()
    times: dict[str, list[float]] = {"acme/sql": [], "acme/zzz": []}
    for _ in range(60):
        for model, taken in times.items():
            start = time.perf_counter()
            h.ask(model, RIVAL)
            taken.append(time.perf_counter() - start)
    there, absent = map(min, times.values())  # what a busy machine adds is in the others
    assert 1 / 3 < there / absent < 3


def test_the_base_does_not_answer_for_an_adapter_where_it_is_not_served(house):
    h = house()
    answer = h.ask("bible", RIVAL, alora_fallback="base")
    assert (answer.status, answer.json["error"]["param"]) == (400, "alora_fallback")
    assert h.ask("acme/sql", ACME, alora_fallback="base").status == 200


def test_the_engine_hears_whose_request_it_is(house):
    h = house()
    h.admin("PATCH", "tenants/acme", {"weight": 2.5, "max_priority": 20})
    h.ask("acme/sql", ACME, cache_salt="mine", priority=90)
    h.ask("bible", RIVAL)
    h.ask("acme/sql")
    told = [(s.tenant, s.weight, s.priority, s.cache_salt) for s in h.api.engine.submits]
    assert told == [
        ("acme", 2.5, 20, "acme/mine"),
        ("rival", 1.0, 50, "rival/"),
        ("", 1.0, 50, "/"),
    ]
    accounts = h.api.requests.meter.tenants
    used = {name: (c.sequences, c.prompt_tokens) for name, c in accounts.items()}
    assert used == {"acme": (1, 2), "rival": (1, 2)}, "an operator's requests are nobody's"


def test_without_tenants_everything_is_as_it_was(make_api, call, monkeypatch, registry):
    h = House(make_api(registry=registry), call, monkeypatch)
    assert h.models(STRANGER) == ["tiny", "acme/sql", "bible"]
    assert h.ask("acme/sql", STRANGER, cache_salt="s", key="anything").status == 200
    [submit] = h.api.engine.submits
    assert (submit.tenant, submit.cache_salt) == ("acme", "s")


def test_the_last_tenant_that_goes_opens_the_house_again(house):
    h = house()
    assert h.ask("tiny", STRANGER).status == 403
    assert h.admin("DELETE", "tenants/acme").json["left"] == 1
    assert h.ask("acme/sql", ACME).status == 403
    assert h.admin("DELETE", "tenants/rival").json["left"] == 0
    assert h.ask("tiny", STRANGER).status == 200


def test_keys_are_shown_once_and_work_at_once(house, registry):
    h = house("key")
    key = h.add("ci", adapters=["bible"])
    assert h.models(STRANGER, key) == ["tiny", "bible"]
    shown = h.admin("GET", "tenants/ci")
    assert shown.json["keys"][0]["id"] == keys.id_of(key)
    secret = key[-43:].encode()
    assert secret not in shown.body + h.admin("GET", "tenants").body
    stored = b"".join(p.read_bytes() for p in registry.path.parent.rglob("*") if p.is_file())
    assert b"ci" in stored and secret not in stored


def test_a_rotated_key_is_refused_and_one_with_grace_is_not(house):
    h = house("key")
    first = h.add("ci")
    second = h.admin("POST", "tenants/ci/key", {"grace_seconds": 600}).json["key"]
    assert [h.ask("tiny", key=k).status for k in (first, second)] == [200, 200]
    third = h.admin("POST", "tenants/ci/key", {}).json["key"]
    assert [h.ask("tiny", key=k).status for k in (first, second, third)] == [401, 401, 200]


def test_a_refused_key_has_the_shape_that_openais_clients_know(house):
    h = house("key")
    for answer in (h.ask("tiny", key="sk-wrong"), h.ask("tiny")):
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert answer.json["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "bearer"
        assert "sk-wrong" not in str(answer.json)
    assert h.call("GET", "/v1/models", headers="authorization: Basic eDp5\r\n").status == 401


def test_a_running_request_ends_as_it_began_when_its_tenant_goes(house, connect):
    h = house()
    h.uid = ACME
    gate = h.api.hold_engine(2)
    body = b'{"model": "acme/sql", "prompt": "x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    raw = connect(h.api.inference).send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    h.api.until(lambda: h.api.engine.submits)
    assert h.admin("DELETE", "tenants/acme").status == 200
    h.api.run(gate.set)
    assert raw.answer().status == 200


# ----------------------------------------------------------------- limits
def test_requests_a_minute_are_the_tenants_own_and_say_when_to_come_back(house):
    h = house()
    h.admin("PATCH", "tenants/acme", {"rpm": 3})
    answers = [h.ask("acme/sql", ACME) for _ in range(4)]
    assert [a.status for a in answers] == [200, 200, 200, 429]
    refused = answers[-1]
    assert refused.code == "tenant_rate_limited" and 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-should-retry"] == "true"
    assert h.ask("bible", RIVAL).status == 200
    h.admin("PATCH", "tenants/acme", {"rpm": 0})
    assert h.ask("acme/sql", ACME).status == 200


def test_what_was_not_let_in_is_not_counted(house):
    h = house()
    h.admin("PATCH", "tenants/acme", {"rpm": 2})
    for _ in range(5):
        assert h.ask("rival/x", ACME).status == 404
        assert h.ask("acme/sql", ACME, max_tokens=-1).status == 400
    assert h.ask("acme/sql", ACME).status == 200


def test_tokens_a_minute_count_prompts_and_answers(house):
    h = house()
    h.admin("PATCH", "tenants/acme", {"tokens_per_minute": 14})
    used = [h.ask("acme/sql", ACME).json["usage"]["total_tokens"]]
    assert used == [14]
    answer = h.ask("acme/sql", ACME)
    assert (answer.status, answer.code) == (429, "tenant_rate_limited")
    assert "14 tokens" in answer.json["error"]["message"]


def test_a_tenants_queue_is_its_own(house, connect):
    h = house()
    h.admin("PATCH", "tenants/acme", {"queue": 2})
    gate = h.api.hold_engine()
    h.uid = ACME
    body = b'{"model": "acme/sql", "prompt": "x", "n": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    raw = connect(h.api.inference).send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    h.api.until(lambda: len(h.api.engine.submits) == 2)
    refused = h.ask("acme/sql", ACME)
    assert (refused.status, refused.code) == (429, "tenant_rate_limited")
    never = h.ask("acme/sql", ACME, n=3)
    assert (never.status, never.json["error"]["param"]) == (400, "n")
    h.api.run(gate.set)
    assert raw.answer().status == 200


# ----------------------------------------------------------------- the admin routes
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": "A"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "\x1b]0;x"}, "name"),
        ({"name": "x", "rpm": -1}, "rpm"),
        ({"name": "x", "tokens_per_minute": 1 << 40}, "tokens_per_minute"),
        ({"name": "x", "max_priority": 101}, "max_priority"),
        ({"name": "x", "weight": 0}, "weight"),
        ({"name": "x", "weight": 1e9}, "weight"),
        ({"name": "x", "uids": [-1]}, "uids"),
        ({"name": "x", "adapters": [""]}, "adapters"),
        ({"name": "x", "adapters": ["a\x1b"]}, "adapters"),
        ({"name": "x", "adapters": ["a"] * 65}, "adapters"),
    ],
)
def test_what_no_tenant_can_have_is_refused(house, fields, param):
    answer = house().admin("POST", "tenants", fields)
    assert (answer.status, answer.code) == (400, "invalid_value")
    assert answer.json["error"]["param"] == param


def test_refusals_of_the_admin_routes_have_their_codes(house):
    h = house()
    assert h.admin("POST", "tenants", {"name": "acme"}).code == "name_taken"
    assert h.admin("POST", "tenants", {"name": "x", "uids": [ACME]}).code == "conflict"
    for method, path in (("GET", "x"), ("PATCH", "x"), ("DELETE", "x"), ("POST", "x/key")):
        assert h.admin(method, f"tenants/{path}", {}).code == "not_found"
    assert h.admin("POST", "tenants/acme/key", {"grace_seconds": -1}).code == "invalid_value"
    assert h.admin("POST", "tenants/acme/key", {}).headers["cache-control"] == "no-store"


def test_vectors_and_scores_are_counted_by_the_same_rates(house):
    h = house("key")
    key = h.add("ci", tokens_per_minute=8)

    def ask(path, **body):
        return h.call("POST", path, {"model": "tiny"} | body, uid=STRANGER, key=key)

    assert ask("/v1/embeddings", input=["abc", "d"]).status == 200  # 8 tokens, marks and all
    answer = ask("/v1/rerank", query="x", documents=["y"])
    assert (answer.status, answer.code) == (429, "tenant_rate_limited")
    assert "8 tokens within a minute" in answer.json["error"]["message"]
    assert h.api.requests.crowd.of("ci").tokens == 8


# ----------------------------------------------------------------- every route, every credential
def table(routes):
    for route in routes:
        path = route.path
        for name, value in FILLED.items():
            path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
        for method in sorted(route.methods - {"HEAD"}):
            yield path, method


ROUTES = [("inference", *row) for row in table(INFERENCE)] + [("admin", *r) for r in table(ADMIN)]
#: credential -> what a closed inference route says by mode, and what a closed admin route says.
LET_IN = None
MATRIX = {
    "no key": {"peer": 403, "key": 401, "peer+key": 401, "admin": 403},
    "bad key": {"peer": 403, "key": 401, "peer+key": 401, "admin": 403},
    "tenant": {"peer": LET_IN, "key": 401, "peer+key": LET_IN, "admin": 403},
    "tenant key": {"peer": 403, "key": LET_IN, "peer+key": LET_IN, "admin": 403},
    "admin": {"peer": LET_IN, "key": 401, "peer+key": LET_IN, "admin": LET_IN},
    "no peer": {"peer": 403, "key": 401, "peer+key": 401, "admin": 403},
}


#: Whoever adds a route to one of these decides so here: health is open to everybody, applications
#: reach the second, and metrics on TCP are read by whoever gets there.  All else is an operator's.
EVERYBODYS = {"/livez", "/readyz", "/health", "/startupz", "/version"}
APPLICATIONS = {
    *("/v1/models", "/v1/models/{id:path}", "/v1/chat/completions", "/v1/completions"),
    *("/tokenize", "/detokenize", "/openapi.json"),
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/classify"),
    *("/pooling", "/embed", "/similarity", "/"),
}


def test_whose_a_route_is_has_been_decided():
    assert OPEN == EVERYBODYS
    assert {route.path for route in INFERENCE} - EVERYBODYS == APPLICATIONS
    assert {route.path for route in METRICS} == {"/livez", "/metrics"}
    assert all("{" not in path for _, path, _ in ROUTES), "FILLED lacks a part of a path"


@pytest.mark.parametrize("auth", ["peer", "key", "peer+key"])
def test_every_route_is_closed_to_every_credential_but_the_right_ones(house, call, auth):
    """Default deny: a route that somebody adds is in here by itself."""
    h = house(auth)
    key = h.add("ci")
    credentials = {
        "no key": (STRANGER, ""),
        "bad key": (STRANGER, "lorad_aaaaaaaa_" + "A" * 43),
        "tenant": (ACME, ""),
        "tenant key": (STRANGER, key),
        "admin": (os.getuid(), ""),
        "no peer": (None, ""),
    }
    for socket, path, method in ROUTES:
        for credential, (uid, given) in credentials.items():
            if credential == "admin" and (socket, method) == ("admin", "DELETE"):
                continue  # let in, and it would take the tenants away
            if credential == "admin" and path == "/admin/v1/stream":
                continue  # let in, and it would not end
            h.uid = uid
            bearer = f"authorization: Bearer {given}\r\n" if given else ""
            answer = call(getattr(h.api, socket), method, path, {"all": "no"}, bearer)
            expected = MATRIX[credential]["admin" if socket == "admin" else auth]
            where = (socket, method, path, credential)
            if path in OPEN:
                assert answer.status == 200, where
            elif expected is LET_IN:
                assert answer.status not in (401, 403), where
            else:
                assert answer.status == expected, where
                assert set(answer.json) == {"error"}, where
    h.uid = STRANGER
    assert call(h.api.inference, "GET", "/v1/none").status in (401, 403)


# ----------------------------------------------------------------- the audit
def audited(house, **query):
    house.api.run(house.api.audit.flush)
    asked = urlencode(query)
    page = house.admin("GET", f"audit?{asked}").json
    assert page["schema"] == "lorad/audit.v1"
    return [(i["actor"], i["action"], i["name"], i["result"]) for i in page["items"]]


def test_the_audit_knows_the_true_reason_of_a_404_and_whose_it_was(house):
    h = house("peer+key")
    key = h.add("ci", adapters=["ci/*"])
    h.ask("acme/sql", RIVAL)
    h.ask("bible", STRANGER, key=key)
    h.ask("rival/none", RIVAL)  # unknown, and no secret
    assert audited(h, action="request") == [
        (f"uid {RIVAL} pid 77", "request", "acme/sql", "forbidden"),
        (f"uid {STRANGER} pid 77 key {keys.id_of(key)}", "request", "bible", "forbidden"),
    ]


def test_strangers_and_wrong_keys_are_in_the_audit_and_their_keys_are_not(house, registry):
    h = house("key")
    h.ask("tiny", STRANGER, key="lorad_aaaaaaaa_" + "S" * 43)
    h.uid = STRANGER
    h._call(h.api.admin, "DELETE", "/admin/v1/adapters/bible")
    me = f"uid {STRANGER} pid 77"
    assert audited(h, actor=me) == [
        (me, "request", "/v1/completions", "invalid_api_key"),
        (me, "remove", "", "permission_denied"),
    ]
    stored = b"".join(p.read_bytes() for p in registry.path.parent.rglob("*") if p.is_file())
    assert b"SSSS" not in stored


def test_what_operators_do_and_may_not_do_is_in_the_audit_with_who(house):
    h = house()
    h.admin("POST", "load", {"names": ["acme/sql", "bible"]})
    h.admin("POST", "load", {"names": ["bible"], "dry_run": True})
    h.admin("POST", "gc", {})
    h.admin("PATCH", "tenants/rival", {"rpm": 5})
    h.admin("DELETE", "tenants/nobody")
    h.admin("POST", "tenants/acme/key", {"grace_seconds": -1})
    me = f"uid {os.getuid()} pid 77"
    assert sorted(row[1:] for row in audited(h, actor=me)) == sorted(
        [
            ("tenant.added", "tenant:acme", "ok"),
            ("tenant.added", "tenant:rival", "ok"),
            ("load", "acme/sql", "ok"),
            ("load", "bible", "ok"),
            ("gc", "", "ok"),
            ("tenant.set", "tenant:rival", "ok"),
            ("tenant.removed", "tenant:nobody", "not_found"),
            ("tenant.key_rotated", "tenant:acme", "invalid_value"),
        ]
    )


def test_a_page_of_the_audit_is_the_newest_that_fit_oldest_first(house):
    h = house()
    for name in ("acme/sql", "bible", "acme/sql"):
        h.admin("POST", "evict", {"names": [name]})
    assert [row[2] for row in audited(h, action="evict", limit=2)] == ["bible", "acme/sql"]
    assert len(audited(h, name="acme/sql")) == 2
    assert len(audited(h, action="evict", seconds=600)) == 3
    assert h.admin("GET", "audit?limit=0").code == "invalid_value"
