"""Every route of both tables, and what is answered where none is."""

import pytest

from lorad.api.app import ADMIN, HEALTH, INFERENCE
from lorad.api.protocol import Peer
from lorad.errors import LoradError

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
PATHS = {
    **{"id": "acme/sql", "name": "acme/sql"},
    **{"upload_id": "u", "file": "f", "operation_id": "0", "request_id": "0"},
}


def table(routes):
    """(path with its parameters filled in, methods) of each route."""
    out = []
    for route in routes:
        path = route.path
        for name, value in PATHS.items():
            path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
        out.append((path, route.methods))
    return out


OPEN = [path for path, _ in table(HEALTH)]
SHARED = [*OPEN, "/openapi.json"]  # on both, about the socket's own routes
MANAGING = [
    (path, method)
    for path, methods in table(ADMIN)
    if path not in SHARED
    for method in sorted(methods - {"HEAD"})
]
BOTH = [("inference", *row) for row in table(INFERENCE)] + [("admin", *r) for r in table(ADMIN)]


@pytest.mark.parametrize(("socket", "path", "methods"), BOTH)
def test_other_methods_are_405_in_the_envelope(api, call, socket, path, methods):
    for method in METHODS:
        if method not in methods:
            answer = call(getattr(api, socket), method, path)
            assert (answer.status, answer.code) == (405, "method_not_allowed")
            assert set(answer.headers["allow"].upper().split(", ")) == methods
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/embedding", "/livez/", "//livez", "/v2/x", "/%00"]
)
def test_unknown_routes_are_404_in_the_envelope(api, call, path):
    # TEI's clients post to the root of what serves models: there it is a route.
    for socket in (api.inference, api.admin)[path == "/" :]:
        answer = call(socket, "GET", path)
        assert (answer.status, answer.code) == (404, "not_found")
        assert answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_line_break_behind_a_name_is_not_that_name(api, call, method):
    """Patterns of routes end ahead of it: `rm` of one would have been that of the other."""
    answer = call(api.admin, method, "/admin/v1/adapters/bible%0A")
    assert (answer.status, answer.code) == (404, "not_found")
    assert not api.adapters.calls
    assert call(api.inference, "GET", "/v1/models/tiny%0A").status == 404
    for socket in (api.inference, api.admin):
        assert call(socket, "GET", "/livez%0A").status == 404


@pytest.mark.parametrize(("path", "method"), MANAGING)
def test_nothing_that_manages_exists_on_the_inference_socket(api, call, path, method):
    answer = call(api.inference, method, path, {})
    assert (answer.status, answer.code) == (404, "not_found")
    assert not api.adapters.calls


@pytest.mark.parametrize("path", [p for p, ms in table(INFERENCE) if "POST" in ms])
def test_nothing_that_generates_exists_on_the_admin_socket(api, call, path):
    assert call(api.admin, "POST", path, {}).status == 404


def test_strangers_get_nothing_on_the_admin_socket_but_health(api, call, monkeypatch):
    monkeypatch.setattr("lorad.api.protocol.peer_of", lambda _: Peer(1, 54321, 1))
    for path, methods in table(ADMIN):
        for method in sorted(methods - {"HEAD"}):
            answer = call(api.admin, method, path, {})
            if path in OPEN:
                assert answer.status == 200
            else:
                assert (answer.status, answer.code) == (403, "permission_denied")
    assert not api.adapters.calls
    assert call(api.inference, "GET", "/v1/models").status == 200


def test_a_client_without_an_identity_is_a_stranger(api, call, monkeypatch):
    monkeypatch.setattr("lorad.api.protocol.peer_of", lambda _: None)
    assert call(api.admin, "GET", "/admin/v1/status").status == 403


def test_the_peer_of_a_connection_is_its_process(api, call, monkeypatch):
    seen = []
    from lorad.api import protocol

    true = protocol.peer_of
    monkeypatch.setattr(protocol, "peer_of", lambda s: seen.append(true(s)) or seen[-1])
    call(api.inference, "GET", "/livez")
    import os

    assert seen == [Peer(os.getpid(), os.getuid(), os.getgid())]


@pytest.mark.parametrize(
    "code", ["loading_base", "engine_restarting", "engine_stalled", "draining"]
)
def test_an_engine_that_is_not_ready_is_503_with_a_time_and_a_reason(api, call, code):
    api.engine.not_ready = LoradError(code, "not now")
    api.listing.not_ready = code
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    posts = ["/v1/chat/completions", "/v1/completions"]
    answers = [call(api.inference, "POST", path, ask) for path in posts]
    answers += [call(api.inference, "GET", path) for path in ("/v1/models", "/readyz", "/health")]
    answers += [call(api.admin, "GET", "/readyz")]
    for answer in answers:
        assert (answer.status, answer.code) == (503, code)
        assert int(answer.headers["retry-after"]) >= 1
    assert call(api.inference, "GET", "/livez").status == 200
    assert call(api.inference, "GET", "/startupz").status == 200
    assert call(api.admin, "GET", "/admin/v1/status").status == 200


def test_an_adapter_of_a_bases_name_is_not_listed_beside_the_base(api, call, monkeypatch):
    monkeypatch.setitem(api.adapters.revs, "tiny", "ab" * 32)
    cards = call(api.inference, "GET", "/v1/models").json["data"]
    assert [card["root"] for card in cards if card["id"] == "tiny"] == ["base"]


def test_readiness_of_a_base_that_nobody_serves_says_which_there_are(api, call):
    assert call(api.inference, "GET", "/readyz?model=tiny").status == 200
    answer = call(api.inference, "GET", "/readyz?model=nobody")
    assert (answer.status, answer.code) == (404, "model_not_found")
    assert "there is tiny" in answer.body.decode()


def test_startup_is_not_over_before_the_engine_is_known(make_api, call):
    api = make_api()
    api.engine.info = None
    assert call(api.inference, "GET", "/startupz").status == 503
    answer = call(api.inference, "POST", "/v1/completions", {"model": "tiny", "prompt": "x"})
    assert (answer.status, answer.code) == (503, "loading_base")


def test_a_request_keeps_the_id_that_its_client_gave(api, call):
    kept = call(api.inference, "GET", "/livez", headers="x-request-id: job-7.1\r\n")
    assert kept.headers["x-request-id"] == "job-7.1"
    odd = call(api.inference, "GET", "/livez", headers='x-request-id: <"evil">\r\n')
    assert odd.headers["x-request-id"].startswith("req_")


def test_head_answers_where_get_does(api, call):
    answer = call(api.inference, "HEAD", "/livez")
    assert (answer.status, answer.body) == (200, b"")


def test_conflicts_are_not_to_be_repeated(api, call):
    for code in ("conflict", "pinned", "in_use", "name_taken"):
        api.adapters.answer = LoradError(code, "no", hint="loractl unpin x")
        answer = call(api.admin, "POST", "/admin/v1/evict", {"names": ["x"]})
        assert (answer.status, answer.code) == (409, code)
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json["error"]["details"]["hint"] == "loractl unpin x"


def test_tokens_are_counted_and_read_back(api, call):
    asked = {"model": "tiny", "prompt": "héy"}
    answer = call(api.inference, "POST", "/tokenize", asked).json
    ids = list("héy".encode())
    assert answer == {"count": 4, "max_model_len": 512, "tokens": ids, "token_strs": None}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    assert call(api.inference, "POST", "/tokenize", chat).json["count"] == len(
        "<user>x\n<assistant>"
    )
    back = {"model": "tiny", "tokens": answer["tokens"]}
    assert call(api.inference, "POST", "/detokenize", back).json == {"prompt": "héy"}
    assert call(api.inference, "POST", "/tokenize", asked | chat).code == "invalid_value"
    for path, body in (("/tokenize", asked), ("/detokenize", back)):
        answer = call(api.inference, "POST", path, body | {"model": "nobody"})
        assert answer.code == "model_not_found"
