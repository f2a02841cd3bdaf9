"""What was meant by a name that nothing bears, and what is the matter with one that cannot answer.

Goes in: the name, after a failure.  Comes out: the failure with a better next step.  Asks the admin
socket; where that is of no help, the failure stays as it was.
"""

from contextlib import suppress
from difflib import get_close_matches

import msgspec

from lorad import wire
from lorad.caller import ApiError, Unreachable
from lorad.cli.session import Failed, Session

#: Of names that share a half with the wrong one: what is looked through.
_LOOKED_AT = 200


def hint_for(s: Session, name: str) -> str:
    """`did you mean ...?`; "" if no name is near.  One typo leaves one half of a name as it was."""
    half = len(name) // 2
    found: set[str] = set()
    with suppress(ApiError, Unreachable, msgspec.MsgspecError):
        for part in filter(None, dict.fromkeys((name, name[:half], name[half:]))):
            found |= {a.name for a in s.client.adapters(q=part, limit=_LOOKED_AT).items}
    same = sorted(other for other in found if other.endswith(f"/{name}"))
    near = same[:3] or get_close_matches(name, sorted(found), 1, 0.7)
    return f"did you mean {' or '.join(near)}?  loractl ls" if near else ""


def improved(s: Session, result: wire.ItemResult) -> wire.ItemResult:
    """The refusal of one name, with a name that was perhaps meant, if there is no better hint."""
    if result.code != "model_not_found" or result.hint not in ("", "loractl ls"):
        return result
    return msgspec.structs.replace(result, hint=hint_for(s, result.name) or result.hint)


def unfound(s: Session, name: str, error: ApiError) -> Exception:
    """The same for a call that fails as a whole."""
    if error.code != "model_not_found":
        return error
    return Failed(
        improved(
            s,
            wire.ItemResult(
                name=name,
                ok=False,
                code=error.code,
                message=error.message,
                hint=error.hint,
                details=error.details,
            ),
        )
    )


def unanswered(s: Session, name: str, error: ApiError) -> Exception:
    """Why `name` is 404 on the inference socket, which tells tenants nothing more."""
    if error.code != "model_not_found":
        return error
    plain = name.partition("@")[0]
    with suppress(ApiError, Unreachable, msgspec.MsgspecError):
        adapter = s.client.adapter(plain).adapter
        if adapter.reason is None or adapter.rev is not None:
            return error
        return Failed(
            wire.ItemResult(
                name=name,
                ok=False,
                code="adapter_invalid",
                message=f"{plain!r} is {adapter.state}: {adapter.reason_message or ''}",
                hint=f"loractl show {plain}",
                details={"reason": adapter.reason},
            )
        )
    return unfound(s, name, error)
