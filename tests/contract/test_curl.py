"""curl over the Unix socket, as the guides write it."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")


def curl(api, path, body=None, *options):
    """The body of the answer; `-f` makes an error's status one of curl's."""
    command = ["curl", "-sS", "--unix-socket", str(api.inference), f"http://lorad{path}"]
    if body is not None:
        command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=30, check=True
    ).stdout


def test_models_and_one_of_them(api):
    listed = json.loads(curl(api, "/v1/models"))
    assert [card["id"] for card in listed["data"]] == ["tiny", "acme/sql", "bible"]
    assert json.loads(curl(api, "/v1/models/acme/sql"))["parent"] == "tiny"


def test_tokens_there_and_back(api):
    asked = {"model": "acme/sql", "prompt": "héy", "return_token_strs": True}
    tokens = json.loads(curl(api, "/tokenize", asked))
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 4
    assert tokens["token_strs"][0] == "h"
    back = {"model": "acme/sql", "tokens": [*tokens["tokens"], 256]}
    assert json.loads(curl(api, "/detokenize", back)) == {"prompt": "héy<|im_end|>"}


def test_a_chat_is_tokenized_with_and_without_the_answers_beginning(api):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    whole = json.loads(curl(api, "/tokenize", chat))["tokens"]
    assert bytes(whole) == b"<user>x\n<assistant>"


def test_a_stream(api):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    events = curl(api, "/v1/chat/completions", chat, "-N").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]


def test_the_document(api):
    assert "/v1/chat/completions" in json.loads(curl(api, "/openapi.json"))["paths"]


def test_an_error_has_its_status_and_its_envelope(api):
    out = curl(api, "/v1/responses", {"model": "tiny", "input": "x"}, "-w", "\n%{http_code}")
    body, _, status = out.rpartition("\n")
    assert status == "404"
    assert json.loads(body)["error"]["code"] == "not_found"
    assert "/v1/chat/completions" in json.loads(body)["error"]["message"]
