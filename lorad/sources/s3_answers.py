"""boto3, if it is installed, and what it raises in our words.

Goes in: a call.  Comes out: its result; FetchError, or Again where the next attempt may succeed.
The sentences of stores and of boto3 may hold keys and whole URLs, and are not passed on.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lorad.sources import transfer
from lorad.sources.errors import FetchError
from lorad.sources.patience import Again, retry_after

try:
    import boto3
    import botocore
    import botocore.config
    import botocore.exceptions as failures
    import botocore.loaders
    import botocore.session
except ImportError as error:
    raise FetchError(
        "bad_reference",
        "s3:// can be pulled only where boto3 is installed",
        hint="pip install '.[s3]' in a checkout of lorad, and start lorad again",
    ) from error

__all__ = ["boto3", "botocore", "corrupt", "failures", "told"]

T = TypeVar("T")

_CREDENTIALS = (
    failures.NoCredentialsError,
    failures.PartialCredentialsError,
    failures.CredentialRetrievalError,
    failures.TokenRetrievalError,
    failures.UnauthorizedSSOTokenError,
    failures.ProfileNotFound,
)
#: Also of another write of the same object that is under way.
_BUSY = (
    *("SlowDown", "Throttling", "RequestLimitExceeded"),
    *("ConditionalRequestConflict", "OperationAborted"),
)
_SETTINGS = (
    failures.ParamValidationError,
    failures.NoRegionError,
    failures.InvalidRegionError,
)


def told(call: Callable[[], T], what: str, where: str = "s3") -> T:
    """The call's result; what boto3 raises as FetchError, or Again where it may pass."""
    try:
        return call()
    except failures.ClientError as error:
        raise _refusal(error.response, what, where) from None
    except _CREDENTIALS as error:
        raise FetchError(
            "source_denied",
            f"{what} needs credentials: {_line(error)}",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where lorad runs, or "
            "`[s3] unsigned` for a public bucket",
        ) from None
    except _SETTINGS as error:
        raise FetchError(
            "bad_reference",
            f"{what} cannot be asked for: {_line(error)}",
            hint="look at the name of the bucket, and at `[s3] endpoint` and `region`",
        ) from None
    except failures.BotoCoreError as error:
        raise Again(transfer.unreachable(where, _why(error))) from None


def _refusal(response: Mapping[str, Any], what: str, where: str) -> FetchError | Again:
    """What the store says, in our words.  Its own sentence may hold keys and is not passed on."""
    meta = response.get("ResponseMetadata", {})
    status, headers = int(meta.get("HTTPStatusCode", 0)), meta.get("HTTPHeaders", {})
    code = str(response.get("Error", {}).get("Code", ""))[:60]
    if status in (429, 503) or code in _BUSY:
        after = retry_after(headers.get("retry-after"))
        return Again(transfer.busy(where, after), after)
    if status >= 500 or code == "RequestTimeout":
        return Again(transfer.unreachable(where, f"it answers {status} {code}"))
    if code == "NoSuchBucket":
        return _not_found(f"there is no bucket for {what} at {where}")
    if status == 404:
        return _not_found(f"{what} is not at {where}")
    if status == 412:
        return FetchError(
            "conflict", f"{what} changed while it was being fetched", hint="pull it again"
        )
    if status in (401, 403) or code in ("InvalidAccessKeyId", "ExpiredToken", "InvalidToken"):
        return FetchError(
            "source_denied",
            f"{where} does not let this account read {what} ({code or status})",
            hint="it takes s3:ListBucket on the bucket and s3:GetObject on the objects",
        )
    return transfer.unreachable(where, f"it answers {status} {code}")


def _not_found(message: str) -> FetchError:
    return FetchError("source_not_found", message, hint="look at bucket, prefix and endpoint")


def corrupt(what: str) -> FetchError:
    return FetchError(
        "source_corrupt",
        f"{what} arrived with another checksum or size than the store's",
        hint="pull it again: it starts anew",
    )


def _why(error: Exception) -> str:
    """In a few words: botocore's sentences hold whole URLs."""
    if isinstance(error, failures.ConnectTimeoutError | failures.ReadTimeoutError):
        return "it did not answer in time (`[pull] timeout`)"
    if isinstance(error, failures.EndpointConnectionError):
        return "no connection"
    return type(error).__name__


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
