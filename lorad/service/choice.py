"""One answer of a request: token ids as the engine sends them → pieces of text.

Goes in: SequenceDeltas of one sequence, in order.  Comes out: `Piece`s of all that came since the
last pull, how many tokens count, and whether the sequence must be aborted because a stop string was
completed.  Nobody need hurry to pull: what waits is text, a few bytes a token, and it becomes one
piece.  Knows no other answer and nobody to send to.
"""

from collections.abc import Callable

from engine.messages import SequenceDelta, TokenLogprobs
from lorad.errors import LoradError
from lorad.service.ask import Piece
from lorad.service.seams import Decoder

#: Tokens of a prompt whose probabilities are told in one piece, which is some kB.
IN_PIECE = 4


class Choice:
    """`silent`: ids that end a sequence and are not part of its text.  `new_decoder` makes another
    one like `decoder`; None: it can be begun once."""

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
        new_decoder: Callable[[], Decoder] | None = None,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0  # that count as completion tokens
        self.cached_tokens = 0
        self.started = False  # the engine has answered, or need not any more
        self.settled = False  # nothing is left to abort: the last delta came, or the abort is sent
        self.ended = False  # nothing more will be added to the last piece
        self.finish = ""  # stop | length, as its client is told
        self._decoder, self._new_decoder = decoder, new_decoder
        self._seen = False  # something of it was pulled
        self._silent = silent
        self._echoed = False
        self._keep = keep  # False: the generated token is only the price of scoring the prompt
        self._echo_ids, self._echo_text = echo_ids, echo_text
        # What was not pulled yet: pieces that are complete, and text that more can be added to.
        self._pieces: list[Piece] = []
        self._text = ""

    def take(self, delta: SequenceDelta) -> bool:
        """Take the next delta in; True if there is something to pull.  Not after it has ended.

        Raises LoradError for a failed sequence.
        """
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        finish = delta.finish_reason
        if finish == "abort" or finish == "error":
            self.ended = True
            code = delta.code or "internal_error"
            raise LoradError(code, delta.message or "the engine ended this request")
        self._add(delta, delta.tokens if self._keep else ())
        return self.has_news

    @property
    def has_news(self) -> bool:
        """Is there something to pull?"""
        return bool(self._text or self._pieces)

    def begin_anew(self) -> bool:
        """Its engine is gone, and another begins at the first token: forget what came.  False: its
        reader has seen something of it, or it has ended; nothing is forgotten then."""
        if self._seen or self.ended or self._new_decoder is None:
            return False
        self._decoder = self._new_decoder()
        self._pieces, self._text, self._echoed = [], "", False
        self.num_tokens = self.cached_tokens = 0
        return True

    def pull(self) -> list[Piece]:
        """All that came since the last call: with log probabilities a piece a delta, else one."""
        self._seen |= self.has_news
        pieces, self._pieces = self._pieces, []
        if self._text:
            pieces.append(Piece(index=self.index, text=self._text))
            self._text = ""
        return pieces

    def _add(self, delta: SequenceDelta, tokens: tuple[int, ...]) -> None:
        finish: str | None = delta.finish_reason
        first = not self._echoed and bool(delta.tokens or finish)
        if first:
            self._echoed = True
            self._text = self._echo_text
        visible = tokens
        if finish == "stop" and tokens and tokens[-1] in self._silent:
            visible = tokens[:-1]
        counted, stopped = len(tokens), False
        if visible:
            decoded = self._decoder.push(visible)
            self._text += decoded.text
            if decoded.stopped:
                stopped, finish, counted = True, "stop", decoded.consumed_tokens
        self.num_tokens += counted
        if finish is not None:
            self.ended = True
            self.finish = finish = finish if self._keep else "length"
            if not stopped:
                self._text += self._decoder.finish()
        scored = delta.logprobs[: min(counted, len(visible))] if delta.logprobs else ()
        prompt = self._echo_ids if first else ()
        if finish or scored or prompt:
            self._complete(scored, prompt, delta.prompt_logprobs if first else (), finish)

    def _complete(
        self,
        scored: tuple[TokenLogprobs, ...],
        prompt: tuple[int, ...],
        prompt_logprobs: tuple[TokenLogprobs | None, ...],
        finish: str | None,
    ) -> None:
        """The text comes with the first of a prompt's tokens, and all else with the last."""
        *starts, last = range(0, len(prompt_logprobs), IN_PIECE) or (0,)
        for at in starts:
            part = slice(at, at + IN_PIECE)
            told, scores = prompt[part], prompt_logprobs[part]
            self._pieces.append(
                Piece(index=self.index, text=self._text, prompt=told, prompt_logprobs=scores)
            )
            self._text = ""
        self._pieces.append(
            Piece(
                index=self.index,
                text=self._text,
                tokens=scored,
                prompt=prompt[last:],
                prompt_logprobs=prompt_logprobs[last:],
                finish=finish,
            )
        )
        self._text = ""
