"""Calls are told from text, however the text is cut."""

import random

import pytest

from lorad.text.tool_calls import CLOSE, MAX_HEAD, OPEN, ToolCalls

NAMES = ("get_weather", "f")
ARGUMENTS = '{"city": "Köln }<tool_call>\\"", "days": [1, {"a": 2}]}'
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
WEATHER, PLAIN = ("get_weather", ARGUMENTS), ("f", "{}")

#: what the model wrote -> (its text, its calls)
CASES = {
    "text": ("Hello there.\n", "Hello there.\n", []),
    "nothing": ("", "", []),
    "white space": (" \n", " \n", []),
    "hermes": (f"{OPEN}\n{CALL}\n{CLOSE}", "", [WEATHER]),
    "hermes after text": (f"Let me see.\n\n{OPEN}{CALL}{CLOSE}\n", "Let me see.", [WEATHER]),
    "hermes twice": (
        f'{OPEN}\n{CALL}\n{CLOSE}\n{OPEN}{{"name":"f","arguments":{{}}}}{CLOSE}',
        "",
        [WEATHER, PLAIN],
    ),
    "text behind": (f"{OPEN}{CALL}{CLOSE} So.", " So.", [WEATHER]),
    "a name that nobody gave": (
        f'{OPEN}{{"name": "g", "arguments": {{}}}}{CLOSE}',
        "",
        [("g", "{}")],
    ),
    "arguments first": (
        f'{OPEN}{{"arguments": {{"a":1}}, "name": "f"}}{CLOSE}',
        "",
        [("f", '{"a":1}')],
    ),
    "no arguments": (f'{OPEN}{{"name": "f"}}{CLOSE}', "", [PLAIN]),
    "arguments as text": (
        f'{OPEN}{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}{CLOSE}',
        "",
        [("f", '{"a": 1}')],
    ),
    "cut before the closing tag": (f"{OPEN}{CALL}", "", [WEATHER]),
    "cut within the arguments": (f"{OPEN}{CALL[:-9]}", "", [("get_weather", ARGUMENTS[:-8])]),
    "cut within the name": (f'a {OPEN}{{"name": "get_we', f'a {OPEN}{{"name": "get_we', []),
    "cut within the tag": ("a <tool_c", "a <tool_c", []),
    "no JSON in tags": (f"so: {OPEN}oops{CLOSE} yes", f"so: {OPEN}oops{CLOSE} yes", []),
    "a tag within a tag": (f"{OPEN}{CALL}{OPEN}{CALL}{CLOSE}", "", [WEATHER, WEATHER]),
    "like a tag": ("1 < 2 <t <tool> <tool_calls>", "1 < 2 <t <tool> <tool_calls>", []),
    "llama": (LLAMA, "", [WEATHER]),
    "llama with its type": (
        LLAMA.replace('{"name', ' {"type": "function", "name', 1),
        "",
        [WEATHER],
    ),
    "llama twice": (f'{LLAMA}; {{"name": "f", "parameters": {{}}}}', "", [WEATHER, PLAIN]),
    "an array": (f'[{CALL}, {{"name": "f", "arguments": {{}}}}]\n', "", [WEATHER, PLAIN]),
    "llama, arguments first": ('{"parameters": {"a":1}, "name": "f"}', "", [("f", '{"a":1}')]),
    "of a name that nobody gave": ('{"name": "g", "parameters": {}}',) * 2 + ([],),
    "an answer in JSON": ('{"answer": {"name": "f"}}',) * 2 + ([],),
    "an answer with a name": ('{"name": "f", "age": 3}',) * 2 + ([],),
    "a list": ("[1, 2, 3]",) * 2 + ([],),
    "JSON later": (f"It is {CALL}",) * 2 + ([],),
    "a head that never ends": (f'{OPEN}{{"name": "{"x" * 3000}',) * 2 + ([],),
    "a long gap": (f'{{{" " * 3000}"name": "f", "parameters": {{}}}}',) * 2 + ([],),
}


def read(text, cut=lambda left: left):
    """(text, calls) of an answer that came in pieces of `cut(characters left)`."""
    reader, said = ToolCalls(NAMES), []
    while text:
        size = max(1, cut(len(text)))
        said += reader.push(text[:size])
        text = text[size:]
    said += reader.finish()
    calls = [["", ""] for _ in range(reader.count)]
    for part in said:
        if part.call >= 0:
            assert bool(part.name) == (calls[part.call] == ["", ""]), "a name comes first, once"
            calls[part.call][0] += part.name
            calls[part.call][1] += part.arguments
    return "".join(part.text for part in said), [tuple(call) for call in calls]


@pytest.mark.parametrize("case", CASES)
def test_a_form_is_read_however_it_is_cut(case):
    written, text, calls = CASES[case]
    assert read(written) == (text, calls)
    assert read(written, lambda left: 1) == (text, calls)
    for seed in range(20):
        draw = random.Random(seed)
        assert read(written, lambda left, draw=draw: draw.randint(1, 9)) == (text, calls)


def test_noise_is_read_alike_however_it_is_cut():
    draw = random.Random(7)
    words = [
        OPEN,
        CLOSE,
        CALL,
        LLAMA,
        "{",
        "}",
        "[",
        '"name": "f"',
        ", ",
        '"',
        "\\",
        "\n",
        "<to",
        "é",
    ]
    for _ in range(400):
        noise = "".join(draw.choices(words, k=draw.randint(1, 8)))
        whole = read(noise)
        assert read(noise, lambda left: 1) == whole, noise
        assert read(noise, lambda left: draw.randint(1, 30)) == whole, noise


def test_text_that_calls_nothing_comes_out_as_it_was():
    draw = random.Random(8)
    words = ["a", " ", "\n", "<", "<tool_call", "tool_call>", "{", "}", "[", '"name"', ": ", '"x"']
    for _ in range(400):
        text = "".join(draw.choices(words, k=draw.randint(1, 12)))
        assert read(text, lambda left: draw.randint(1, 4)) == (text, [])


def test_text_does_not_wait_for_more_than_might_be_a_tag():
    reader = ToolCalls(NAMES)
    assert [part.text for part in reader.push("Hello wor")] == ["Hello wor"]
    assert reader.push(" <tool") == []
    assert [part.text for part in reader.push("box>")] == [" <toolbox>"]


def test_arguments_come_as_they_are_written():
    reader = ToolCalls(NAMES)
    assert reader.push(f'{OPEN}{{"name": "f", "arg') == []
    first = reader.push('uments": {"a": ')
    assert [(part.call, part.name, part.arguments) for part in first] == [
        (0, "f", ""),
        (0, "", '{"a": '),
    ]
    assert [part.arguments for part in reader.push("12")] == ["12"]


def test_an_answer_in_json_is_held_no_longer_than_its_first_key():
    reader = ToolCalls(NAMES)
    assert reader.push('{"ans') == []
    assert [part.text for part in reader.push('wer":')] == ['{"answer":']


def test_what_might_be_a_call_is_bounded():
    reader = ToolCalls(NAMES)
    assert reader.push("[" * MAX_HEAD) == []
    assert [len(part.text) for part in reader.push("[")] == [MAX_HEAD + 1]
    assert read("[" * 100_000) == ("[" * 100_000, [])
    assert read(f"{OPEN}{'[' * 100_000}{CLOSE}") == (f"{OPEN}{'[' * 100_000}{CLOSE}", [])
