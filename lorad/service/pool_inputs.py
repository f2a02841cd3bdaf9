"""Inputs of a request for vectors or scores → token ids that fit the model.

Goes in: a `PoolAsk`.  Comes out: one `Prepared` for each input, or the LoradError that names the
one that cannot be served.  Runs in a worker thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.pooling.config import PoolingInfo
from lorad.errors import LoradError
from lorad.service.pool_ask import Input, PoolAsk
from lorad.text.pooling import Encoded, Fit, Pieces, PoolingText, TooLong
from lorad.text.tokenizer import TextError

#: Inputs that are tokenised together.  A long request's tokens, with all that the library keeps of
#: each, are then not in memory at once.
AT_ONCE = 128


class Model(Protocol):
    """Of `pooling.Facts`."""

    @property
    def info(self) -> PoolingInfo: ...
    @property
    def text(self) -> PoolingText: ...
    @property
    def truncate(self) -> bool: ...


class Limits(Protocol):
    """Of `[limits]`."""

    @property
    def inputs(self) -> int: ...
    @property
    def token_vectors(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """`param` names the input in errors."""

    encoded: Encoded
    param: str


def prepare(ask: PoolAsk, model: Model, limits: Limits) -> list[Prepared]:
    """Raises LoradError."""
    if len(ask.inputs) > limits.inputs:
        message = f"{len(ask.inputs)} inputs; limits.inputs = {limits.inputs}"
        hint = "send them in several requests"
        raise LoradError("invalid_value", message, param=_whole(ask.inputs[-1].param), hint=hint)
    fit = _fit(ask, model)
    prepared: list[Prepared] = []
    for start in range(0, len(ask.inputs), AT_ONCE):
        part = ask.inputs[start : start + AT_ONCE]
        ahead = model.text.ahead(_texts(ask, part, model.text))
        prepared += [Prepared(_encode(ask, one, model, fit, ahead), one.param) for one in part]
    if ask.task == "tokens":
        _check_vectors(ask, prepared, model, limits)
    return prepared


def _fit(ask: PoolAsk, model: Model) -> Fit:
    cut, most = ask.wish.cut, model.info.max_length
    truncate = model.truncate if cut.truncate is None else cut.truncate
    return Fit(min(most, cut.length or most), truncate, cut.pair, cut.second)


def _texts(ask: PoolAsk, inputs: Sequence[Input], text: PoolingText) -> Iterator[str]:
    """All that is to become tokens, but for what is put into a form of the model's own."""
    for one in inputs:
        if not isinstance(one.text, str):
            continue
        if one.second is None:
            yield _prompt(ask, one, text) + one.text
        elif text.asks is None:
            yield from (one.text, one.second)


def _encode(ask: PoolAsk, one: Input, model: Model, fit: Fit, ahead: Pieces) -> Encoded:
    text = model.text
    try:
        if not isinstance(one.text, str):
            _check_ids(one, text.vocab_size)
            return text.ids(one.text, fit)
        if one.second is not None:
            return text.pair(one.text, one.second, fit, ask.instruction, ahead)
        return text.one(one.text, fit, _prompt(ask, one, text), ahead, one.role)
    except TooLong as error:
        message = f"{one.param} has {error}"
        hint = "shorten it, or send truncate = true"
        raise LoradError("context_length_exceeded", message, param=one.param, hint=hint) from None
    except TextError as error:
        raise LoradError("invalid_value", str(error), param=one.param) from None


def _prompt(ask: PoolAsk, one: Input, text: PoolingText) -> str:
    task = ask.instruction if one.role != "document" else ""
    try:
        return text.prompt(ask.prompt_name, one.role, task)
    except TextError as error:
        named = ask.prompt_name is not None and not ask.instruction
        code = "invalid_value" if named else "unsupported_parameter"
        param = "prompt_name" if named else "instruction"
        raise LoradError(code, str(error), param=param) from None


def _check_ids(one: Input, size: int) -> None:
    assert not isinstance(one.text, str)
    if not one.text:
        raise LoradError("invalid_value", f"{one.param} must not be empty", param=one.param)
    if not 0 <= min(one.text) <= max(one.text) < size:
        message = f"{one.param} holds a token id outside 0..{size - 1}"
        raise LoradError("invalid_value", message, param=one.param)


def _check_vectors(ask: PoolAsk, prepared: list[Prepared], model: Model, limits: Limits) -> None:
    """A vector for every token is much more than what was sent: it is bounded by itself."""
    width, prepared = ask.dimensions or model.info.width, prepared[: ask.num_kept]
    size = 4 * width * sum(len(p.encoded.tokens) for p in prepared)
    if size > limits.token_vectors:
        message = f"token vectors of {size} bytes; limits.token_vectors = {limits.token_vectors}"
        hint = "send fewer or shorter inputs, or ask for fewer dimensions"
        param = _whole(prepared[-1].param)
        raise LoradError("invalid_value", message, param=param, hint=hint)


def _whole(param: str) -> str:
    """The parameter that an input is a part of."""
    return param.partition("[")[0]
