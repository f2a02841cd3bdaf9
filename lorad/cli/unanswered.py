"""What is the matter with a name that cannot answer.

Goes in: the name, and its 404 on the inference socket, which tells tenants nothing more.  Comes
out: the failure as the admin socket tells it to the operator; as it was, where that is of no help.
"""

from contextlib import suppress

import msgspec

from lorad import wire
from lorad.caller import ApiError, Unreachable
from lorad.cli.session import Failed, Session
from lorad.spelling import split_digest


def unanswered(s: Session, name: str, error: ApiError) -> Exception:
    """The failure to raise in place of `error`."""
    if error.code == "invalid_api_key" and s.client.host.startswith("http"):
        error.hint = "LORAD_API_KEY=KEY, one of tcp.api_keys_file: an operator's is another one"
    if error.code != "model_not_found":
        return error
    plain = split_digest(name)[0]
    with suppress(Unreachable, msgspec.MsgspecError):
        try:
            adapter = s.client.adapter(plain).adapter
        except ApiError as told:
            return told if told.code == error.code else error
        if adapter.state == "quarantined":  # damaged ones still have a revision
            return Failed(
                wire.ItemResult(
                    name=name,
                    ok=False,
                    code="adapter_invalid",
                    message=f"{plain!r} is {adapter.state}: {adapter.reason_message or ''}",
                    hint=f"loractl show {plain}",
                    details={"reason": adapter.reason or ""},
                )
            )
    return error
