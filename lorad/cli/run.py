"""`loractl run`: one prompt to one adapter, streamed to the terminal.

Goes in: a name and a prompt (argument or stdin).  Comes out: text on stdout as it is generated.
Uses the inference socket as any application would.
"""

import sys
from typing import Annotated, Any

import typer

from lorad.cli.complete import any_name
from lorad.cli.output import note, print_json, printable
from lorad.cli.session import session


def register(app: typer.Typer) -> None:
    """Hang the command on the root."""
    app.command("run")(run)


def run(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="An adapter or the base.", autocompletion=any_name)],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; default: stdin.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
) -> None:
    """Send one prompt and stream the answer."""
    s = session(context)
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, or pipe one in")
        prompt = sys.stdin.read()
    body: dict[str, object] = {
        "model": name,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if seed is not None:
        body["seed"] = seed
    if raw:
        body["prompt"] = prompt
    else:
        spoken = [("system", system)] if system else []
        spoken.append(("user", prompt))
        body["messages"] = [{"role": role, "content": text} for role, text in spoken]
    path = "/v1/completions" if raw else "/v1/chat/completions"
    text, usage, fingerprint = [], None, ""
    with s.inference() as client:
        for chunk in client.stream(path, body):
            usage = chunk.get("usage") or usage
            fingerprint = chunk.get("system_fingerprint") or fingerprint
            piece = "".join(_text(choice) for choice in chunk["choices"])
            text.append(piece)
            if not s.options.machine:
                print(printable(piece), end="", flush=True)
    if s.options.machine:
        answer = {
            "model": name,
            "system_fingerprint": fingerprint,
            "text": "".join(text),
            "usage": usage,
        }
        print_json({"schema": "lorad/run.v1", **answer})
        return
    print()
    if usage and s.options.verbose:
        counts = f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} generated"
        note(counts, s.options)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return str((delta.get("content") if delta else choice.get("text")) or "")
