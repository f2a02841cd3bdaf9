"""One answer of a request: token ids as the engine sends them → pieces of text.

Goes in: SequenceDeltas of one sequence, in order.  Comes out: `Piece`s, how many tokens count, and
whether the sequence must be aborted because a stop string was completed.  Knows no other answer
and nobody to send to.
"""

from engine.messages import SequenceDelta
from lorad.errors import LoradError
from lorad.service.ask import Piece
from lorad.service.seams import Decoder


class Choice:
    """`silent`: ids that end a sequence and are not part of its text."""

    def __init__(
        self,
        index: int,
        request_id: str,
        decoder: Decoder,
        *,
        silent: frozenset[int],
        keep: bool = True,
        echo_ids: tuple[int, ...] = (),
        echo_text: str = "",
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0  # that count as completion tokens
        self.cached_tokens = 0
        self.started = False  # the engine has answered, or need not any more
        self.settled = False  # nothing is left to abort: the last delta came, or the abort is sent
        self.ended = False  # the last piece is out
        self._decoder = decoder
        self._silent = silent
        self._echoed = False
        self._keep = keep  # False: the generated token is only the price of scoring the prompt
        self._echo_ids, self._echo_text = echo_ids, echo_text

    def take(self, delta: SequenceDelta) -> Piece | None:
        """The piece that `delta` completes, if any.  Raises LoradError for a failed sequence."""
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if self.ended:
            return None
        if delta.finish_reason in ("abort", "error"):
            self.ended = True
            code = delta.code or "internal_error"
            raise LoradError(code, delta.message or "the engine ended this request")
        return self._piece(delta)

    def _piece(self, delta: SequenceDelta) -> Piece | None:
        tokens: tuple[int, ...] = delta.tokens
        finish: str | None = delta.finish_reason
        first = not self._echoed and bool(tokens or finish)
        self._echoed |= first
        text = self._echo_text if first else ""
        if not self._keep:
            tokens = ()
            finish = finish and "length"
        visible = tokens
        if finish == "stop" and tokens and tokens[-1] in self._silent:
            visible = tokens[:-1]
        counted, stopped = len(tokens), False
        if visible:
            decoded = self._decoder.push(visible)
            text += decoded.text
            if decoded.stopped:
                stopped, finish, counted = True, "stop", decoded.consumed_tokens
        self.num_tokens += counted
        if finish is not None:
            self.ended = True
            if not stopped:
                text += self._decoder.finish()
        scored = delta.logprobs[: min(counted, len(visible))]
        prompt = self._echo_ids if first else ()
        if not (text or scored or prompt or finish):
            return None
        return Piece(
            index=self.index,
            text=text,
            tokens=scored,
            prompt=prompt,
            prompt_logprobs=delta.prompt_logprobs if first else (),
            finish=finish,
        )
