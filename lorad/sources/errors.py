"""How fetching fails: one error with a code of lorad.errors.TABLE, and being told to stop."""

from lorad.errors import LoradError

#: Codes of FetchError, beside insufficient_storage (no room for the files).
CODES = (
    "bad_reference",
    "source_busy",
    "source_corrupt",
    "source_denied",
    "source_not_found",
    "source_offline",
    "source_too_big",
    "source_unreachable",
)


class FetchError(LoradError):
    """Something that keeps an adapter from being fetched; the message holds no secret."""


class Cancelled(Exception):
    """`cancelled` said so.  What was downloaded until then stays and serves the next call."""
