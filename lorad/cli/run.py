"""`loractl run`: one prompt to one adapter, streamed to the terminal.

Goes in: a name and a prompt (argument or stdin).  Comes out: text on stdout as it is generated.
Uses the inference socket as any application would.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from lorad import wire
from lorad.caller import ApiError, Unreachable
from lorad.cli.complete import model_name
from lorad.cli.output import note, print_document, print_line, print_text
from lorad.cli.session import Failed, Interrupted, Session, Usage, session
from lorad.cli.unanswered import unanswered

if TYPE_CHECKING:
    from lorad.client import LoradClient

#: Fields of a request that follow from the arguments, and how its answer is read.
_OURS = ("model", "messages", "prompt", "stream", "stream_options", "n")
#: An answer that is not streamed comes all at once, after this many seconds at most.
WHOLE_SECONDS = 600.0


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("run")(run)


def run(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="An adapter or the base.", autocompletion=model_name),
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Default, and with -: stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", "-n", metavar="N", min=1, help="Generate at most this many."),
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", min=0.0, max=2.0, help="0 is greedy: the same answer every time."
        ),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="For a temperature above 0.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Ask for the answer in one piece.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            "--extra",
            metavar="KEY=VALUE",
            help="Also in the request, as JSON or else as text; repeatable.",
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens and speed, on stderr.")] = False,
) -> None:
    """Send one prompt and stream the answer."""
    s = session(context)
    text = _prompt(prompt)
    body: dict[str, object] = {
        "model": name,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    if seed is not None:
        body["seed"] = seed
    if raw:
        body["prompt"] = text
    else:
        spoken = [("system", system)] if system else []
        spoken.append(("user", text))
        body["messages"] = [{"role": role, "content": words} for role, words in spoken]
    body |= _extras(extra or ())
    path = "/v1/completions" if raw else "/v1/chat/completions"
    answer = _Answer()
    try:
        with s.inference() as client:
            for piece in answer.follow(_chunks(s, client, path, body, not no_stream)):
                if not s.options.machine:
                    print_text(piece)
    except KeyboardInterrupt:
        raise Interrupted("the request is aborted") from None
    except ApiError as error:
        raise unanswered(s, name, error) from None
    finally:
        # Half an answer must not share its line with what is said next.
        if answer.text and not s.options.machine:
            print_line("")
    if s.options.machine:
        print_document({"schema": "lorad/run.v1", "model": name, **answer.document()}, s.options)
    elif stats or s.options.verbose:
        note(answer.stats(), s.options)


def _extras(words: Sequence[str]) -> dict[str, object]:
    """What `--extra` adds to the body; what the command itself says has an option of its own."""
    found: dict[str, object] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise Usage(f"--extra {word!r}: write key=value, such as top_p=0.9")
        if key in _OURS:
            raise Usage(f"--extra {key}: the command says that itself")
        try:
            found[key] = msgspec.json.decode(text.encode())
        except UnicodeEncodeError:
            raise Usage(f"--extra {key}: not UTF-8 text") from None
        except (msgspec.DecodeError, RecursionError):
            found[key] = text  # NaN, too, which would be sent as null: nothing
    return found


def _prompt(given: str | None) -> str:
    """The argument, or stdin as UTF-8 whatever the locale, without its last line end."""
    if given not in (None, "-"):
        return str(given)
    if sys.stdin is None or (given is None and sys.stdin.isatty()):
        raise Usage("give a prompt, or pipe one in")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise Usage("stdin is not UTF-8 text") from None
    if not text:
        raise Usage("stdin is empty: give a prompt")
    return text


def _chunks(
    s: Session, client: "LoradClient", path: str, body: dict[str, object], streamed: bool
) -> Iterator[dict[str, Any]]:
    """The answer's chunks; one that is not streamed is a single chunk.  Ends at `--timeout`."""
    limit = s.options.timeout
    deadline = math.inf if limit is None else time.monotonic() + limit
    try:
        if streamed:
            asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
            yield from client.stream(path, asked, timeout=limit)
        else:
            yield client.post(path, body, dict[str, Any], timeout=s.timeout(WHOLE_SECONDS))
    except Unreachable:
        if time.monotonic() < deadline:
            raise
        raise Failed(
            wire.ItemResult(
                name=str(body["model"]),
                ok=False,
                code="deadline_exceeded",
                message=f"not answered after {limit:g} s; the request is aborted",
                hint="a longer --timeout, or fewer --max-tokens",
            )
        ) from None


@dataclass(slots=True)
class _Answer:
    """What the chunks add up to."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    fingerprint: str | None = None
    started: float = field(default_factory=time.monotonic)
    to_first: float | None = None
    seconds: float = 0.0

    def follow(self, chunks: Iterator[dict[str, Any]]) -> Iterator[str]:
        """Take every chunk in; yields what each adds to the text."""
        for chunk in chunks:
            self.usage = chunk.get("usage") or self.usage
            self.fingerprint = chunk.get("system_fingerprint") or self.fingerprint
            self.seconds = time.monotonic() - self.started
            for choice in chunk.get("choices", ()):
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                if piece := _text(choice):
                    self.to_first = self.seconds if self.to_first is None else self.to_first
                    self.text += piece
                    yield piece

    def document(self) -> dict[str, Any]:
        return {
            "system_fingerprint": self.fingerprint,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "seconds": round(self.seconds, 3),
            "first_token_seconds": None if self.to_first is None else round(self.to_first, 3),
        }

    def stats(self) -> str:
        usage = self.usage or {}
        made = usage.get("completion_tokens", 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        words = [
            f"{usage.get('prompt_tokens', 0)} prompt tokens ({cached} cached)",
            f"{made} generated in {self.seconds:.2f} s",
            f"{made / max(self.seconds, 1e-6):.1f} tokens/s",
        ]
        if self.to_first is not None:
            words.append(f"first after {self.to_first:.2f} s")
        return ", ".join(words)


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message")
    return str((said.get("content") if said else choice.get("text")) or "")
