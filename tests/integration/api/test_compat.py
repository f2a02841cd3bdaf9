"""vLLM's routes for adapters at run time: its lines of text, our errors."""

import pytest

from lorad.errors import LoradError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASK = {"lora_name": "acme/sql", "lora_path": "/srv/adapters/sql"}


def test_a_folder_is_loaded_and_the_answer_is_vllms(api, call):
    answer = call(api.admin, "POST", LOAD, ASK | {"lora_int_id": 7})
    assert answer.status == 200
    assert answer.body == b"Success: LoRA adapter 'acme/sql' added successfully."
    assert answer.headers["content-type"].startswith("text/plain")
    assert api.adapters.calls == [("add_folder", "acme/sql", "/srv/adapters/sql", False)]


def test_load_inplace_may_replace(api, call):
    call(api.admin, "POST", LOAD, ASK | {"load_inplace": True})
    assert api.adapters.calls[0][-1] is True


def test_an_adapter_is_unloaded(api, call):
    answer = call(api.admin, "POST", UNLOAD, {"lora_name": "acme/sql", "lora_int_id": None})
    assert answer.body == b"Success: LoRA adapter 'acme/sql' removed successfully."
    assert api.adapters.calls == [("remove", "acme/sql", False)]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("name_taken", 409),
        ("model_not_found", 404),
        ("permission_denied", 403),
        ("adapter_invalid", 422),
        ("no_room", 503),
        ("insufficient_storage", 507),
    ],
)
def test_a_refusal_is_in_the_envelope(api, call, code, status):
    api.adapters.answer = LoradError(code, "no")
    for path, body in ((LOAD, ASK), (UNLOAD, {"lora_name": "acme/sql"})):
        answer = call(api.admin, "POST", path, body)
        assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "lora_name"), ({"lora_name": "x"}, "lora_path"), (ASK | {"lora_path": 3}, "lora_path")],
)
def test_what_is_missing_is_named(api, call, body, param):
    answer = call(api.admin, "POST", LOAD, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_applications_are_told_where_adapters_are_managed(api, call, path):
    answer = call(api.inference, "POST", path, ASK)
    assert (answer.status, answer.code) == (404, "not_found")
    assert "admin socket" in answer.json["error"]["message"]
    assert not api.adapters.calls


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/resp_1", "/v1/threads/t/runs"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_another_api_is_a_404_that_names_this_one(api, call, path, method):
    answer = call(api.inference, method, path, {})
    assert (answer.status, answer.code) == (404, "not_found")
    assert "/v1/chat/completions" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "says"), [("/v1/responses", "not served"), ("/metrics", "on the admin socket")]
)
def test_what_is_not_here_says_so(api, call, path, says):
    answer = call(api.inference, "GET", path)
    assert (answer.status, answer.code) == (404, "not_found")
    assert says in answer.json["error"]["message"]


def test_a_path_that_only_begins_alike_is_just_unknown(api, call):
    answer = call(api.inference, "POST", "/v1/responsesx", {})
    assert "Responses" not in answer.json["error"]["message"]
