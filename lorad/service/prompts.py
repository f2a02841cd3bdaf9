"""A request's texts in the words of the revision that answers it.

Goes in: the request, the text of its revision.  Comes out: every prompt as ids, what makes text of
answers, the ids that end one, the text that stands before one.  Knows no engine, and none of what
is asked of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.messages import EngineInfo
from lorad.service.ask import Ask
from lorad.service.seams import Decoder, Text
from lorad.text import tool_calls


@dataclass(frozen=True, slots=True)
class Prepared:
    """`prompts` are ids; `decoder` makes a new one for an answer to any of them."""

    text: Text
    prompts: list[tuple[int, ...]]
    decoder: Callable[[Sequence[int]], Decoder]


def prepare(ask: Ask, text_of: Callable[[], Text]) -> Prepared:
    """In a worker thread."""
    text = text_of()
    shown = tool_calls.TAGS if ask.tools else ()
    decoder = text.detokenizers(ask.stop, skip_special=ask.skip_special, shown=shown)
    if ask.chat:
        rendered = text.render(ask.messages, ask.template_vars, ask.tools)
        return Prepared(text, [tuple(text.encode(rendered, add_special=False))], decoder)
    prompts = [
        tuple(text.encode(prompt, add_special=True)) if isinstance(prompt, str) else prompt
        for prompt in ask.prompts
    ]
    return Prepared(text, prompts, decoder)


def ends_of(ask: Ask, text: Text, info: EngineInfo) -> frozenset[int]:
    """Ids that end the answer and are no part of its text; a turn's end is the end of a chat's."""
    ends = frozenset(ask.sampling.stop_token_ids)
    if not ask.sampling.ignore_eos:
        ends |= text.ends(info.eos_token_ids, chat=ask.chat)
    return ends


def echoes_of(ask: Ask, text: Text) -> list[str]:
    """In a worker thread, once the prompts are known to fit: each as it was given, to stand in
    front of its answers."""
    return [
        prompt if isinstance(prompt, str) else text.decode(prompt, skip_special=ask.skip_special)
        for prompt in ask.prompts
    ]
