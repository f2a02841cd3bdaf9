"""Pieces of answers → the two OpenAI shapes, as one body or as chunks of a stream.

Goes in: a Generation's facts and its Pieces, in order.  Comes out: Structs of `wire_openai`, ready
to be encoded.  Knows no socket and no SSE.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from engine.messages import TokenLogprobs
from lorad.service.ask import Count, Piece
from lorad.wire_openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    PromptDetails,
    TopLogprob,
    Usage,
)

_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


class Facts(Protocol):
    """What every body of one request repeats."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def usage(count: Count) -> Usage:
    return Usage(
        prompt_tokens=count.prompt,
        completion_tokens=count.completion,
        total_tokens=count.prompt + count.completion,
        prompt_tokens_details=PromptDetails(count.cached),
    )


class Gathered:
    """All pieces of one answer, put together for a body that is not streamed."""

    def __init__(self) -> None:
        self.text = ""
        self.pieces: list[Piece] = []
        self.finish: Finish = "stop"
        self.num_scored = 0  # tokens that probabilities may be told of

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.pieces.append(piece)
        self.num_scored += len(piece.tokens) + len(piece.prompt)
        if piece.finish is not None:
            self.finish = _FINISH[piece.finish]


class ChatShape:
    """`spell` gives the bytes of a token id; `top` how many alternatives, None = no logprobs."""

    framed = True

    def __init__(
        self, facts: Facts, spell: Callable[[int], bytes], top: int | None, null_usage: bool
    ) -> None:
        self._facts, self._spell, self._top = facts, spell, top
        self._usage: UnsetType | None = None if null_usage else UNSET
        self._greeted: set[int] = set()

    def chunks(self, piece: Piece) -> list[Struct]:
        """The role first, then content, and the finish in a chunk of its own."""
        chunks = self._greeting(piece.index)
        if piece.text or piece.tokens:
            delta = ChatDelta(content=piece.text)
            chunks.append(self._chunk(piece.index, delta, self._logprobs([piece])))
        if piece.finish is not None:
            chunks.append(self._chunk(piece.index, ChatDelta(), None, _FINISH[piece.finish]))
        return chunks

    def finish_of(self, piece: Piece) -> Finish:
        return _FINISH[piece.finish or "stop"]

    def usage_chunk(self, count: Count) -> Struct:
        return self._envelope([], usage(count))

    def message(self, answer: Gathered) -> tuple[AssistantMessage, Finish]:
        return AssistantMessage(content=answer.text), answer.finish

    def body(self, answers: Sequence[Gathered], count: Count) -> Struct:
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return ChatCompletion(
            id=f"chatcmpl-{self._facts.id}",
            created=self._facts.created,
            model=self._facts.model,
            choices=choices,
            usage=usage(count),
            system_fingerprint=self._facts.fingerprint,
        )

    def _choice(self, index: int, answer: Gathered) -> ChatChoice:
        message, finish = self.message(answer)
        logprobs = self._logprobs(answer.pieces)
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=finish)

    def _greeting(self, index: int) -> list[Struct]:
        if index in self._greeted:
            return []
        self._greeted.add(index)
        return [self._chunk(index, ChatDelta(role="assistant", content=""))]

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish: Finish | None = None,
    ) -> Struct:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return self._envelope([choice], self._usage)

    def _envelope(
        self, choices: list[ChatChunkChoice], total: Usage | UnsetType | None
    ) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._facts.id}",
            created=self._facts.created,
            model=self._facts.model,
            choices=choices,
            system_fingerprint=self._facts.fingerprint,
            usage=total,
        )

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return ChatLogprobs([self._token(token) for piece in pieces for token in piece.tokens])

    def _token(self, scored: TokenLogprobs) -> ChatTokenLogprob:
        spelled = self._spell(scored.token)
        top = [(self._spell(token), logprob) for token, logprob in scored.top[: self._top]]
        return ChatTokenLogprob(
            token=_text(spelled),
            logprob=scored.logprob,
            bytes=list(spelled),
            top_logprobs=[TopLogprob(_text(t), logprob, list(t)) for t, logprob in top],
        )


class CompletionShape:
    """The same for plain completions, whose chunks look like their bodies."""

    framed = True

    def __init__(
        self, facts: Facts, spell: Callable[[int], bytes], top: int | None, null_usage: bool
    ) -> None:
        self._facts, self._spell, self._top = facts, spell, top
        self._usage: UnsetType | None = None if null_usage else UNSET
        self._offsets: dict[int, int] = {}  # characters that came before, by answer

    def chunks(self, piece: Piece) -> list[Struct]:
        chunks = []
        if piece.text or piece.tokens or piece.prompt:
            logprobs = self._logprobs(piece.index, [piece])
            choice = CompletionChoice(index=piece.index, text=piece.text, logprobs=logprobs)
            chunks.append(self._envelope([choice], self._usage))
        if piece.finish is not None:
            finish = _FINISH[piece.finish]
            choice = CompletionChoice(index=piece.index, text="", finish_reason=finish)
            chunks.append(self._envelope([choice], self._usage))
        return chunks

    def usage_chunk(self, count: Count) -> Struct:
        return self._envelope([], usage(count))

    def body(self, answers: Sequence[Gathered], count: Count) -> Struct:
        choices = [
            CompletionChoice(
                index=index,
                text=answer.text,
                logprobs=self._logprobs(index, answer.pieces),
                finish_reason=answer.finish,
            )
            for index, answer in enumerate(answers)
        ]
        return self._envelope(choices, usage(count))

    def _envelope(self, choices: list[CompletionChoice], total: Usage | UnsetType | None) -> Struct:
        return Completion(
            id=f"cmpl-{self._facts.id}",
            created=self._facts.created,
            model=self._facts.model,
            choices=choices,
            system_fingerprint=self._facts.fingerprint,
            usage=total,
        )

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        out = CompletionLogprobs([], [], [], [])
        for piece in pieces:
            # The first token of a prompt follows nothing, so it has no probability.
            scores = piece.prompt_logprobs or (None,) * len(piece.prompt)
            for token, scored in zip(piece.prompt, scores, strict=True):
                self._add(out, index, token, scored)
            for scored in piece.tokens:
                self._add(out, index, scored.token, scored)
        return out

    def _add(
        self, out: CompletionLogprobs, index: int, token: int, scored: TokenLogprobs | None
    ) -> None:
        text = _text(self._spell(token))
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        out.tokens.append(text)
        out.text_offset.append(offset)
        out.token_logprobs.append(None if scored is None else scored.logprob)
        out.top_logprobs.append(None if scored is None else self._top_of(scored))

    def _top_of(self, scored: TokenLogprobs) -> dict[str, float]:
        """Best first; of two tokens with the same text the better one; the chosen one always."""
        top: dict[str, float] = {}
        for token, logprob in (*scored.top[: self._top], (scored.token, scored.logprob)):
            top.setdefault(_text(self._spell(token)), logprob)
        return top


def _text(spelled: bytes) -> str:
    """A token may be half a character."""
    return spelled.decode("utf-8", "replace")
