"""A gateway says what a name means to one request; the answer has the name that was asked for."""

import pytest

from tests.fakes.api_server import REVS

REV = REVS["acme/sql"]
BODIES = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
    ("/tokenize", {"prompt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_revision_that_a_gateway_has_for_a_name_is_served_or_nothing(api, call, path, body):
    body = {"model": "acme/sql", **body}
    answer = call(api.inference, "POST", path, body, f"x-lorad-rev: {REV}\r\n")
    assert answer.status == 200, answer.body
    if path != "/tokenize":
        assert answer.json["model"] == "acme/sql" and answer.headers["x-lorad-rev"] == REV
    refused = call(api.inference, "POST", path, body, f"x-lorad-rev: {'0' * 64}\r\n")
    assert (refused.status, refused.code) == (404, "model_not_found")
    unknown = call(api.inference, "POST", path, {**body, "model": "acme/sqm"})
    words = unknown.json["error"]["message"].replace("sqm", "sql")
    assert refused.json["error"]["message"] == words, "as of any name that there is not"


def test_one_model_is_shown_by_its_revision(api, call):
    for rev, status in ((REV, 200), ("0" * 64, 404)):
        answer = call(api.inference, "GET", "/v1/models/acme/sql", None, f"x-lorad-rev: {rev}\r\n")
        assert answer.status == status
