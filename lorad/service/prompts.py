"""A request's texts in the words of the revision that answers it.

Goes in: the request, the text of its revision.  Comes out: every prompt as ids, the ids that end an
answer, the text that stands before one.  Knows no engine, and none of what is asked of it.
"""

from collections.abc import Callable

from engine.messages import EngineInfo
from lorad.service.ask import Ask
from lorad.service.seams import Text


def read_prompts(ask: Ask, text_of: Callable[[], Text]) -> tuple[Text, list[tuple[int, ...]]]:
    """In a worker thread: the text of the revision, and the ids of every prompt."""
    text = text_of()
    if ask.chat:
        rendered = text.render(ask.messages, ask.template_vars, ask.tools)
        return text, [tuple(text.encode(rendered, add_special=False))]
    return text, [
        tuple(text.encode(prompt, add_special=True)) if isinstance(prompt, str) else prompt
        for prompt in ask.prompts
    ]


def ends_of(ask: Ask, text: Text, info: EngineInfo) -> frozenset[int]:
    """Ids that end the answer and are no part of its text; a turn's end is the end of a chat's."""
    ends = frozenset(ask.sampling.stop_token_ids)
    if not ask.sampling.ignore_eos:
        ends |= text.ends(info.eos_token_ids, chat=ask.chat)
    return ends


def echo_of(ask: Ask, text: Text, number: int) -> str:
    """The prompt as it was given, in front of its answer."""
    if not ask.echo:
        return ""
    prompt = ask.prompts[number]
    if isinstance(prompt, str):
        return prompt
    return text.decode(prompt, skip_special=ask.skip_special)
