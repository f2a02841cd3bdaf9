"""What a gateway says by itself, in the words of the daemon's own routes."""

from lorad.api.respond import failure
from lorad.errors import LoradError
from lorad.fleet.members import Answer, Head


def said(error: LoradError, by: str = "gateway") -> Answer:
    """An error as the answer that the daemon would give."""
    response = failure(error)
    headers = tuple((k.decode(), v.decode()) for k, v in response.raw_headers)
    kept = tuple(pair for pair in headers if pair[0] != "content-length")
    return Answer(Head(by, response.status_code, kept), bytes(response.body))
