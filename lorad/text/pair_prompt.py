"""A query and a document → the one text in which a decoder is asked how well they fit.

Goes in: a template, from the model's own files, from the operator or ours.  Comes out: the text,
and where in it the document lies, of which alone anything may be cut.  Knows no tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lorad.text.template import ChatTemplate
from lorad.text.tokenizer import TextError

#: What a document is until its place in the text is known: nothing that a template or a query has.
_PLACE = "\ue000document\ue001"
#: Queries whose text is kept in mind: one is asked of many documents, and may be long.
CACHED = 8
#: The form that Qwen3-Reranker was trained in; its published template is that of a chat.
QWEN3 = "qwen3-reranker"
_QWEN3_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_QWEN3_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
#: What that form is written with, and a tokenizer of the family has.
_QWEN3_MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Asked:
    """`text` with the document from `start` to `end`, in characters."""

    text: str
    start: int
    end: int


class PairPrompt:
    """`frame` makes of a query and an instruction, "" = the usual one, the whole text with `_PLACE`
    for the document.  `origin` says whose form it is."""

    def __init__(
        self, frame: Callable[[str, str], str], origin: str, *, takes_instruction: bool
    ) -> None:
        self.origin, self.takes_instruction = origin, takes_instruction
        self._around = lru_cache(CACHED)(lambda query, task: _split(frame(query, task)))

    def ask(self, query: str, document: str, instruction: str = "") -> Asked:
        """Raises TextError for a template that does not put a document into its text."""
        before, after, trimmed = self._around(query, instruction)
        document = document.strip() if trimmed else document
        return Asked(before + document + after, len(before), len(before) + len(document))


def _split(framed: str) -> tuple[str, str, bool]:
    """What is ahead of the document, what is behind it, and whether it loses the space around."""
    space = f" {_PLACE} "
    trimmed = space not in framed
    parts = framed.split(_PLACE if trimmed else space)
    if len(parts) != 2:
        raise TextError(
            f"the model's pair template puts a document into its text {len(parts) - 1} times: once"
            " is served"
        )
    return parts[0], parts[1], trimmed


def of_template(template: ChatTemplate, origin: str) -> PairPrompt:
    """A chat template whose messages have the roles `query` and `document`, and if it reads that
    one, `system` for the instruction."""

    def frame(query: str, task: str) -> str:
        messages = [{"role": "system", "content": task}] if task else []
        messages.append({"role": "query", "content": query})
        return template.render([*messages, {"role": "document", "content": f" {_PLACE} "}])

    return PairPrompt(frame, origin, takes_instruction=_speaks_of(template, "system"))


def takes_pairs(template: ChatTemplate | None) -> bool:
    """Whether it knows the roles of a query and a document."""
    return template is not None and all(_speaks_of(template, r) for r in ("query", "document"))


def qwen3_reranker() -> PairPrompt:
    """The form of Qwen3-Reranker."""

    def frame(query: str, task: str) -> str:
        told = f"<Instruct>: {task or _QWEN3_TASK}\n<Query>: {query}\n<Document>: "
        return f"{_QWEN3_HEAD}{told} {_PLACE} {_QWEN3_TAIL}"

    return PairPrompt(frame, "the form of Qwen3-Reranker", takes_instruction=True)


def has_qwen3_marks(specials: Callable[[str], int | None]) -> bool:
    """Whether a vocabulary, by its look-up of a token, can write that form."""
    return all(specials(mark) is not None for mark in _QWEN3_MARKS)


def from_file(path: Path) -> PairPrompt:
    """An operator's own template.  Raises TextError for one that cannot be used."""
    try:
        source = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read: {error}") from None
    template = ChatTemplate({"default": source}, {})
    if not takes_pairs(template):
        raise TextError(f"{path} does not speak of messages with the roles query and document")
    prompt = of_template(template, f"the form of {path}")
    prompt.ask("a query", "a document")  # told now, and not to the first request
    return prompt


def _speaks_of(template: ChatTemplate, role: str) -> bool:
    return any(f"{q}{role}{q}" in s for s in template.sources.values() for q in "'\"")
