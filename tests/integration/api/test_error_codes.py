"""Every code that clients are promised: its status, and whether and when to try again.

The table is what was agreed with clients, not what the program says.
"""

import pytest

from lorad.errors import LoradError

#: code -> (status, x-should-retry, whether Retry-After is sent)
PROMISED = {
    **dict.fromkeys(
        ("invalid_json", "invalid_value", "unsupported_parameter", "context_length_exceeded"),
        (400, None, False),
    ),
    "invalid_api_key": (401, None, False),
    "model_not_found": (404, None, False),
    "request_timeout": (408, "true", False),
    **dict.fromkeys(("conflict", "pinned", "in_use"), (409, "false", False)),
    "payload_too_large": (413, None, False),
    "unsupported_media_type": (415, None, False),
    "adapter_invalid": (422, None, False),
    **dict.fromkeys(("queue_full", "tenant_rate_limited"), (429, "true", True)),
    "headers_too_large": (431, None, False),
    "internal_error": (500, "false", False),
    **dict.fromkeys(
        ("loading_base", "engine_restarting", "draining", "engine_stalled"), (503, "true", True)
    ),
    "no_room": (503, "false", True),
    "deadline_exceeded": (504, "false", False),
    "insufficient_storage": (507, "false", False),
}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("code", PROMISED)
def test_a_code_has_its_status_and_says_whether_to_try_again(api, call, code):
    error = LoradError(code, "why", param="here", details={"reason": "E_X"}, hint="do this")
    api.engine.not_ready = api.adapters.answer = error
    answers = [
        call(api.inference, "POST", "/v1/chat/completions", CHAT),
        call(api.inference, "POST", "/v1/chat/completions", CHAT | {"stream": True}),
        call(api.admin, "POST", "/admin/v1/load", {"names": ["a"]}),
        call(api.admin, "POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    ]
    for answer in answers:
        retry, waits = answer.headers.get("x-should-retry"), "retry-after" in answer.headers
        assert (answer.status, retry, waits) == PROMISED[code]
        assert answer.headers["x-request-id"]
        told = answer.json["error"]
        assert told.pop("type").endswith("_error")
        assert told == {
            "message": "why",
            "param": "here",
            "code": code,
            "details": {"reason": "E_X", "hint": "do this"},
        }
