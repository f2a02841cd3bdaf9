"""Secrets that slipped into a text: keys of tenants and hubs, passwords in URLs, bearer tokens.

Goes in: a line that is about to be logged.  Comes out: the same, each secret as `***`.  The last
guard: nobody is meant to log one.
"""

import re

_SECRETS = (
    re.compile(r"(\blorad_[a-z2-7]{8}_)[A-Za-z0-9_-]{16,}"),
    re.compile(r"(\bhf_)[A-Za-z0-9]{16,}"),
    re.compile(r"(\bsk-)[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?i)(\bbearer\s+)[^\s\"',]+"),
    re.compile(r"(://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"(?i)([?&](?:x-amz-signature|x-amz-security-token|signature|token)=)[^&\s\"']+"),
)


def redact(text: str) -> str:
    """What is no secret stays as it is."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text
