"""What the client says before it asks, and of what it was answered."""

import json
import ssl

import pytest

from lorad.caller import Caller, _api_error
from lorad.client import ApiError, LoradClient


def test_a_name_that_no_address_can_hold_is_refused_and_not_a_fault(tmp_path):
    with (
        LoradClient(f"unix://{tmp_path}/none.sock") as client,
        pytest.raises(ApiError, match="cannot be asked for") as caught,
    ):
        client.adapter("x" * 100_000)
    assert caught.value.code == "invalid_value"


def test_who_has_no_key_is_told_of_the_variable_that_this_client_reads():
    details = {"hint": "authorization: Bearer KEY"}
    error = {"message": "no", "type": "t", "code": "invalid_api_key", "details": details}
    refused = _api_error(401, json.dumps({"error": error}).encode())
    assert refused.hint == "LORAD_API_KEY=KEY"


@pytest.mark.parametrize("host", ["unix:///nowhere.sock", "http://127.0.0.1:1"])
def test_where_nothing_is_encrypted_no_certificates_are_read(monkeypatch, host):
    """They take longer to read than everything else that a command does."""
    monkeypatch.setattr(ssl, "create_default_context", None)
    Caller(host, 1.0).close()
    with pytest.raises(TypeError):
        Caller("https://127.0.0.1:1", 1.0)
