"""What an operator may do next about an error of the daemon that says nothing of it itself.

Goes in: its code.  Comes out: a line.  There is one for every code of `lorad.errors.TABLE`.
"""

from collections.abc import Mapping

_HELP = "{command} --help"
_LOGS = "loractl logs says what went before it"
_LATER = "the same again in a moment"
_ROOM = "loractl ps says who has the room; loractl evict or unpin gives some back"
_SOURCE = "loractl show NAME says where it comes from; loractl logs what its source said"
#: Where the daemon gives no next step of its own: one for each code.
HINTS: Mapping[str, str] = {
    **dict.fromkeys(("invalid_json", "invalid_value", "unsupported_parameter"), _HELP),
    **dict.fromkeys(("bad_reference", "payload_too_large", "unsupported_media_type"), _HELP),
    **dict.fromkeys(("method_not_allowed", "headers_too_large"), "loractl version"),
    "context_length_exceeded": "fewer tokens: loractl status says how many fit",
    "invocation_missing": "loractl show NAME says what the prompt must have in it",
    **dict.fromkeys(("invalid_config", "model_unsupported"), "lorad --check"),
    "invalid_api_key": "loractl tenant ls says whose keys there are",
    "permission_denied": "as a user whom the daemon's socket is for: loractl doctor",
    "model_not_found": "loractl ls",
    "not_found": "is this the admin socket?  loractl -H unix:///path/admin.sock",
    **dict.fromkeys(("request_timeout", "deadline_exceeded"), "--timeout waits longer"),
    **dict.fromkeys(("conflict", "in_use"), "loractl ls and loractl op ls say what goes on"),
    "pinned": "loractl unpin NAME, or --force",
    "name_taken": "another name; loractl show NAME says whose it is",
    "adapter_invalid": "loractl show NAME; docs/reference/reason-codes.md explains each reason",
    "insufficient_storage": "free some space, or loractl gc",
    **dict.fromkeys(("source_denied", "source_not_found", "source_too_big"), _SOURCE),
    **dict.fromkeys(("source_corrupt", "source_unreachable", "source_offline"), _SOURCE),
    **dict.fromkeys(("source_busy", "queue_full", "tenant_rate_limited", "registry_busy"), _LATER),
    **dict.fromkeys(("internal_error", "load_failed"), _LOGS),
    "adapter_damaged": "loractl verify NAME says what is damaged",
    "loading_base": "loractl ping says when it is ready",
    **dict.fromkeys(("engine_restarting", "engine_stalled"), "loractl status"),
    "draining": "loractl status says why: it stops, or loractl resume ends it",
    "no_room": _ROOM,
}


def next_step(code: str, command: str) -> str:
    """`command` is what was asked, as `loractl ls`; "" for a code that is not the daemon's."""
    return HINTS.get(code, "").format(command=command)
