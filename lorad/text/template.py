"""Chat templates: messages to the text that a model was trained to read.

Goes in: a model or adapter folder, then the messages of a request.  Comes out: one string, to be
encoded with `add_special=False`, as the template writes its own bos.  Renders as transformers'
`apply_chat_template` does.  Templates are untrusted; `sandbox.py` says what bounds them.  Knows no
tokens and no requests.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from lorad.text.budget import MAX_VALUE, Budget, Exceeded, limited
from lorad.text.sandbox import BoundedEnvironment
from lorad.text.tokenizer import TextError, read_json, read_specials

#: A render takes about a millisecond; what takes longer than this has no end in sight.
RENDER_SECONDS = 2.0


#: What marks forms of calls that `tool_calls.py` does not read: XML functions (Qwen3-Coder), names
#: outside of the JSON (Mistral since v11, DeepSeek).
_UNREAD_CALLS = ("<function=", "[ARGS]", "tool\u2581call\u2581begin")


class TemplateError(TextError):
    """A template cannot be compiled, or refuses or fails on these messages; one line."""


class ChatTemplate:
    """One folder's templates, compiled once; `render` may run in many threads at a time."""

    def __init__(
        self,
        sources: Mapping[str, str],
        specials: Mapping[str, str],
        *,
        seconds: float = RENDER_SECONDS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`sources`: template name ("default", "tool_use") -> Jinja.  TemplateError if one is
        broken."""
        self._specials = dict(specials)
        self._seconds = seconds
        environment = BoundedEnvironment(
            {"raise_exception": _raise_exception, "strftime_now": _strftime(now)}
        )
        self._templates = {
            name: _compile(environment, name, source) for name, source in sources.items()
        }
        self.sources = dict(sources)
        self._takes_tools = "tool_use" in sources or _asks_for_tools(environment, sources)

    @classmethod
    def load(
        cls, folder: Path, *, specials: Mapping[str, str] | None = None
    ) -> "ChatTemplate | None":
        """The folder's own template, None when it brings none.  `specials` are the bos and eos
        texts; an adapter's folder often lacks them, its base's then hold."""
        sources = find_templates(folder)
        if not sources:
            return None
        return cls(sources, {**(specials or {}), **read_specials(folder)})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt.  `variables` are the request's own, such as enable_thinking; they come from
        outside, so any name and value is either taken or a TemplateError."""
        if "messages" in variables:
            raise TemplateError("messages cannot be given as a template variable")
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise TemplateError("tools must be a list")
        values = {
            **self._specials,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._run(self._choose(tools), values)

    def refuses_tools(self) -> str:
        """Why a request with tools would not be answered as it should be; "" if it would."""
        if not self._takes_tools:
            return "this model's chat template takes no tools"
        source = self.sources.get("tool_use", "") or "".join(self.sources.values())
        if any(mark in source for mark in _UNREAD_CALLS):
            return "this model writes its tool calls in a form that is not read"
        return ""

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        return next(iter(self._templates.values()))

    def _run(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with limited(Budget(self._seconds)):
                for piece in template.generate(values):
                    size += len(piece)
                    if size > MAX_VALUE:
                        raise Exceeded(f"it writes more than {MAX_VALUE} characters")
                    pieces.append(piece)
        # Foreign code may fail in any way; whatever it is, it is the template's fault.
        except Exception as error:
            raise TemplateError(f"the chat template failed: {_line(error)}") from None
        return "".join(pieces)


def find_templates(folder: Path) -> dict[str, str]:
    """Template name -> source, {} when the folder has none: chat_template.jinja before
    tokenizer_config.json before chat_template.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text("utf-8")}
        except (OSError, ValueError) as error:
            raise TemplateError(f"{path} cannot be read: {_line(error)}") from None
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = read_json(folder / name).get("chat_template")
        if found:
            return _by_name(found, folder / name)
    return {}


def _by_name(found: object, path: Path) -> dict[str, str]:
    """A template string, or a list of {name, template}."""
    if isinstance(found, str):
        return {"default": found}
    entries = found if isinstance(found, list) else []
    named = {
        str(entry.get("name")): entry.get("template")
        for entry in entries
        if isinstance(entry, dict)
    }
    if not named or not all(isinstance(source, str) for source in named.values()):
        raise TemplateError(
            f"chat_template in {path} is neither a string nor a list of {{name, template}}"
        )
    return {name: str(source) for name, source in named.items()}


def _compile(environment: BoundedEnvironment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.compile_template(source)
    # As above: a hostile source can make the parser or Python's compiler fail in any way.
    except Exception as error:
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TemplateError(
            f"the chat template {name!r} cannot be used: {_line(error)}{where}"
        ) from None


def _asks_for_tools(environment: BoundedEnvironment, sources: Mapping[str, str]) -> bool:
    return any("tools" in environment.asked_of(source) for source in sources.values())


def _raise_exception(message: str) -> None:
    raise Exceeded(str(message))


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if len(format) > 256:
            raise Exceeded("it formats the date with more than 256 characters")
        return now().strftime(format)

    return strftime_now


def _line(error: BaseException) -> str:
    """One printable line of bounded length; the text may be the template's own."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:300]
