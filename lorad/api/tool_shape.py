"""Answers of a chat with tools → the same OpenAI shapes, the calls apart from the text.

Goes in: Pieces, as for `ChatShape`.  Comes out: messages and deltas with `tool_calls`.  An answer
that calls something and ends by itself ends in `tool_calls`.  Knows no template: what a call looks
like in text, `text/tool_calls.py` knows.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec import UNSET, Struct

from lorad.api.shapes import ChatShape, Facts, Gathered
from lorad.service.ask import Piece
from lorad.text.tool_calls import Said, ToolCalls
from lorad.wire_openai import AssistantMessage, ChatDelta, Finish
from lorad.wire_tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta


class ToolShape(ChatShape):
    """`names` of the tools; unless `parallel`, the first call of an answer is its only one."""

    framed = False  # one piece of text may be part of anything

    def __init__(
        self,
        facts: Facts,
        spell: Callable[[int], bytes],
        top: int | None,
        null_usage: bool,
        *,
        names: Collection[str],
        parallel: bool,
    ) -> None:
        super().__init__(facts, spell, top, null_usage)
        self._names, self._parallel = names, parallel
        self._readers: dict[int, ToolCalls] = {}

    def chunks(self, piece: Piece) -> list[Struct]:
        """Text and calls as soon as they are certain; log probabilities when their tokens came."""
        chunks = self._greeting(piece.index)
        deltas = [_delta(said) for said in self._said(piece)]
        if piece.tokens and not deltas:
            deltas = [ChatDelta(content="")]
        logprobs = self._logprobs([piece]) if piece.tokens else None
        for delta in deltas:
            chunks.append(self._chunk(piece.index, delta, logprobs))
            logprobs = None
        if piece.finish is not None:
            finish = self._finish(piece)
            chunks.append(self._chunk(piece.index, ChatDelta(), None, finish))
        return chunks

    def message(self, answer: Gathered) -> tuple[AssistantMessage, Finish]:
        """All of one answer."""
        reader = ToolCalls(self._names)
        said = self._kept(reader.push(answer.text) + reader.finish())
        text = "".join(part.text for part in said)
        if not reader.count:
            return AssistantMessage(content=text), answer.finish
        calls: list[ToolCall] = []
        for number in range(reader.count if self._parallel else 1):
            parts = [part for part in said if part.call == number]
            arguments = "".join(part.arguments for part in parts)
            calls.append(ToolCall(id=_new_id(), function=FunctionCall(parts[0].name, arguments)))
        finish = _finish(answer.finish, reader)
        return AssistantMessage(content=text or None, tool_calls=calls), finish

    def _said(self, piece: Piece) -> list[Said]:
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._readers[piece.index] = ToolCalls(self._names)
        said = reader.push(piece.text)
        return self._kept(said + reader.finish() if piece.finish is not None else said)

    def _kept(self, said: Sequence[Said]) -> list[Said]:
        return [part for part in said if self._parallel or part.call < 1]

    def _finish(self, piece: Piece) -> Finish:
        return _finish(self.finish_of(piece), self._readers[piece.index])


def _finish(finish: Finish, reader: ToolCalls) -> Finish:
    return "tool_calls" if finish == "stop" and reader.count else finish


def _delta(said: Said) -> ChatDelta:
    if said.call < 0:
        return ChatDelta(content=said.text)
    first: dict[str, Any] = {"id": _new_id(), "type": "function"} if said.name else {}
    function = FunctionDelta(name=said.name or UNSET, arguments=said.arguments)
    return ChatDelta(tool_calls=[ToolCallDelta(index=said.call, function=function, **first)])


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
