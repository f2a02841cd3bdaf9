"""The same socket through openai-python 1 and 2, which speak httpx, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import openai
from lorad.client import openai as connect

client = connect(sys.argv[1])
ask = [{"role": "user", "content": "Say it."}]
answer = client.chat.completions.create(model="acme/sql", messages=ask)
stream = list(client.chat.completions.create(
    model="tiny", messages=ask, stream=True, stream_options={"include_usage": True}))
plain = client.completions.create(model="tiny", prompt="ab", echo=True, logprobs=1)
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
tooled = [
    choice.delta.tool_calls or []
    for chunk in client.chat.completions.create(
        model="bible", messages=ask, tools=[tool], stream=True)
    for choice in chunk.choices
]
try:
    client.chat.completions.create(model="nobody", messages=ask)
    error = None
except openai.NotFoundError as caught:
    error = caught.code
print(json.dumps({
    "version": openai.__version__,
    "text": answer.choices[0].message.content,
    "cached": answer.usage.prompt_tokens_details.cached_tokens,
    "streamed": "".join(c.choices[0].delta.content or "" for c in stream if c.choices),
    "usage": stream[-1].usage.completion_tokens,
    "tokens": plain.choices[0].logprobs.tokens[:3],
    "models": [m.id for m in client.models.list()],
    "error": error,
    "called": [c.function.name for calls in tooled for c in calls if c.function.name],
    "arguments": "".join(c.function.arguments for calls in tooled for c in calls),
}))
"""


CALL = b'{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize("version", [pytest.param("1.109", marks=pytest.mark.late), "2.54"])
def test_an_older_openai_reads_every_shape(api, openai_site, version):
    api.engine.reply = lambda submit: CALL if b"<tools>" in bytes(submit.prompt) else b"Hello world"
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{openai_site(version)}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(api.inference)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("version").startswith(f"{version}.")
    assert seen == {
        "text": "Hello world",
        "cached": 0,
        "streamed": "Hello world",
        "usage": 12,
        "tokens": ["a", "b", "H"],
        "models": ["tiny", "acme/sql", "bible"],
        "error": "model_not_found",
        "called": ["f"],
        "arguments": '{"a": 1}',
    }
