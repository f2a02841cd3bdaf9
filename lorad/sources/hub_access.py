"""Access to a hub: where it is, what it is sent, whether it may be asked, what its refusals mean.

Goes in: settings, a token for one call, the environment that huggingface-hub reads.  Comes out: an
endpoint, headers, and FetchError for a status.  The token goes into headers alone, never into a
message.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from lorad import __version__
from lorad.config import Settings
from lorad.sources import transfer
from lorad.sources.errors import FetchError
from lorad.sources.fetch import Reference
from lorad.sources.patience import Again
from lorad.sources.transfer import Refused

#: Bytes of a token file; tokens have some forty.
_MAX_TOKEN = 4096
_TOKEN_HINT = "and set `[hf] token_file` or HF_TOKEN to a token that may read it"


class Hub:
    """One hub and one account.  `given` goes before the settings' token and the environment's."""

    def __init__(self, settings: Settings, given: str = "") -> None:
        self._settings, self._given = settings, given
        self.endpoint = endpoint_of(settings)

    def token(self) -> str:
        """The token that is sent; "" = none."""
        name = self._settings.hf.token_file
        if self._given or not name:
            return _sound(self._given or get_token() or "", "what was given as the hub's token")
        try:
            with Path(name).expanduser().open(encoding="ascii") as file:
                token = file.read(_MAX_TOKEN).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no text"
            raise FetchError(
                "source_denied",
                f"the hub's token cannot be read from {name}: {why}",
                hint="make `[hf] token_file` a file that lorad may read, or unset it",
            ) from None
        return _sound(token or " ", name)

    def headers(self) -> Mapping[str, str]:
        headers = build_hf_headers(
            token=self.token() or False, library_name="lorad", library_version=__version__
        )
        return {str(name): str(value) for name, value in headers.items()}

    def refused(self, reference: Reference, refused: Refused) -> FetchError:
        error = self.refusal(reference, refused.status, refused.headers)
        return error.error if isinstance(error, Again) else error

    def refusal(
        self, reference: Reference, status: int, headers: Mapping[str, str]
    ) -> FetchError | Again:
        """What the hub says of a repository, in our words."""
        what, page = f"hf:{reference.repo}", f"{self.endpoint}/{reference.repo}"
        code = headers.get("X-Error-Code", "")
        again = transfer.passing(status, headers, self.endpoint)
        if again:
            return again
        if code == "GatedRepo":
            return FetchError(
                "source_denied",
                f"{what} is gated: its owner decides who may download it",
                hint=f"accept its terms at {page}, {_TOKEN_HINT}",
            )
        if status == 401:
            who = "does not accept the token" if self.token() else "wants a token"
            return FetchError(
                "source_denied",
                f"{self.endpoint} {who} for {what}: it is private, or there is none",
                hint=f"look whether {page} is there, {_TOKEN_HINT}",
            )
        if status == 403:
            return FetchError(
                "source_denied",
                f"{self.endpoint} does not let this account read {what}",
                hint=f"ask the owner of {page} for access, {_TOKEN_HINT}",
            )
        if code == "RevisionNotFound":
            return FetchError(
                "source_not_found",
                f"{what} has no revision {reference.revision or 'main'}",
                hint=f"choose one of {page}/commits",
            )
        if status in (404, 410):
            return FetchError(
                "source_not_found",
                f"{what} is not at {self.endpoint}, or is private",
                hint=f"look at the spelling, or {_TOKEN_HINT}",
            )
        return transfer.unreachable(self.endpoint, f"it answers {status}")

    def no_hub(self) -> FetchError:
        return FetchError(
            "source_unreachable",
            f"what answers at {self.endpoint} is no hub",
            hint="look at `[hf] endpoint`, HF_ENDPOINT, and proxies that want a login",
        )


def _sound(token: str, where: str) -> str:
    """A token that can be sent in a header."""
    if token.isascii() and (token.isprintable() and " " not in token):
        return token
    raise FetchError(
        "source_denied",
        f"{where} holds no token",
        hint="put the token there, alone: `hf_` and letters and digits",
    )


def why_offline(settings: Settings, *, asked: bool = False) -> str:
    """What keeps lorad from asking a hub; "" if nothing does."""
    if asked:
        return "--offline"
    if settings.hf.offline:
        return "`[hf] offline`"
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return name
    # read by huggingface-hub when it was imported, and obeyed by it ever since
    return "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else ""


def endpoint_of(settings: Settings) -> str:
    """Where the hub is."""
    given = settings.hf.endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    return given.rstrip("/")
