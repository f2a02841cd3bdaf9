"""ChatTemplate: the same text as transformers, from every place where a template may lie."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lorad.text.template import ChatTemplate, TemplateError

#: After Qwen3's: tools, tool calls, thinking that is cut out of earlier turns, loop controls.
QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' ~ message.role ~ '\n' ~ content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ content ~ '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

#: After Llama's: bos, a date, strict roles, a macro, filters, generation marks.
LLAMA = r"""{{- bos_token }}
{%- macro turn(role, text) -%}<|{{ role | upper }}|>{{ text | trim }}{{ eos_token }}{%- endmacro %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate ' + message['role'] | tojson) }}
    {% endif %}
    {%- generation %}{{ turn(message['role'], message['content']) }}{% endgeneration %}
{% endfor %}
{{ messages | map(attribute='role') | join(', ') | replace('user', 'U') }}
{{ {'a': [1, 2.5, none, true], 'b': '<&é'} | tojson(indent=2) }} {{ [3, 1, 2] | sort | list }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ strftime_now('%Y') }}
{{ "%s-%03d" | format('x', 7) }} {{ "{} {:>4}".format('y', 1) }}
{{ messages | groupby('role') | length }}
{% for key, value in {'k': 'v'}.items() %}{{ key ~ value ~ loop.length ~ loop.last }}{% endfor %}
"""

#: After Gemma's: the system turn is folded into the user's, the assistant is called model.
GEMMA = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

#: After Phi's: tools stand in the system turn, the end of text stands where no answer is awaited.
PHI = r"""{% for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none -%}
{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- else -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": 'Be <b> & "terse"'},
        {"role": "user", "content": "hi 你好 🙂\n\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "go  "},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "<é>"}}}
            ],
        },
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "<think>so</think>It is 42"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d <x> é", "parameters": {"n": 1}},
    }
]


def _theirs(tokenizer: Any, chat: list[dict[str, Any]], **options: Any) -> str:
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **options))
    except jinja2.TemplateError as error:
        return f"refused: {error}"


def _ours(template: ChatTemplate, chat: list[dict[str, Any]], **options: Any) -> str:
    try:
        return template.render(chat, **options)
    except TemplateError as error:
        return f"refused: {str(error).removeprefix('the chat template failed: ')}"


@pytest.mark.model
@pytest.mark.parametrize(
    "source",
    [None, QWEN, LLAMA, GEMMA, PHI],
    ids=["smollm", "qwen", "llama", "gemma", "phi"],
)
def test_a_chat_renders_as_transformers_renders_it(smollm: Path, source: str | None) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm)
    ours = ChatTemplate.load(smollm)
    assert ours is not None
    if source is not None:
        theirs.chat_template = source
        specials = {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token}
        ours = ChatTemplate({"default": source}, specials)
    texts = set()
    for chat in CHATS:
        for tools in (None, TOOLS):
            for options in ({}, {"enable_thinking": False}):
                for prompt in (True, False):
                    asked = {"tools": tools, "add_generation_prompt": prompt, **options}
                    texts.add(_ours(ours, chat, **asked))
                    assert _ours(ours, chat, **asked) == _theirs(theirs, chat, **asked)
    assert len(texts) > 2


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path]:
    def put(**files: Any) -> Path:
        for name, content in files.items():
            if name == "jinja":
                (tmp_path / "chat_template.jinja").write_text(content)
            else:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return put


def _render(folder: Path, **options: Any) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render([{"role": "user", "content": "hi"}], **options)


def test_the_jinja_file_comes_first_then_the_config_then_its_own_json(
    place: Callable[..., Path],
) -> None:
    folder = place(chat_template={"chat_template": "json"})
    assert _render(folder) == "json"
    place(tokenizer_config={"chat_template": "config"})
    assert _render(folder) == "config"
    place(jinja="jinja")
    assert _render(folder) == "jinja"


def test_of_a_list_the_tool_template_is_taken_when_there_are_tools(
    place: Callable[..., Path],
) -> None:
    named = [
        {"name": "rag", "template": "rag"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
        {"name": "default", "template": "plain"},
    ]
    folder = place(tokenizer_config={"chat_template": named})
    assert _render(folder) == "plain"
    assert _render(folder, tools=TOOLS) == "tools 1"


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize("value", [3, [], [{"name": "default"}], {"default": "x"}])
def test_a_template_of_the_wrong_kind_is_refused(place: Callable[..., Path], value: Any) -> None:
    folder = place(tokenizer_config={"chat_template": value or [1]})
    with pytest.raises(TemplateError, match="neither a string nor a list"):
        ChatTemplate.load(folder)


def test_special_tokens_come_from_the_folder_and_else_from_the_base(
    place: Callable[..., Path],
) -> None:
    folder = place(
        tokenizer_config={"bos_token": {"content": "<own>"}, "chat_template": "{{ bos_token }}"}
    )
    loaded = ChatTemplate.load(folder, specials={"bos_token": "<base>"})
    assert loaded is not None and loaded.render([]) == "<own>"
    folder = place(tokenizer_config={"chat_template": "{{ bos_token }}"})
    loaded = ChatTemplate.load(folder, specials={"bos_token": "<base>"})
    assert loaded is not None and loaded.render([]) == "<base>"


def test_a_template_reads_the_clock_that_it_is_given() -> None:
    template = ChatTemplate(
        {"default": "{{ strftime_now('%d %b %Y') }}"}, {}, now=lambda: datetime(2026, 11, 29)
    )
    assert template.render([]) == "29 Nov 2026"


def test_a_requests_variables_cannot_replace_its_messages() -> None:
    template = ChatTemplate({"default": "{{ messages | length }}{{ mood }}"}, {})
    assert template.render([{"role": "user"}], mood="!") == "1!"
    assert template.render([{"role": "user"}], mood="!", self=1, template=2) == "1!"
    hostile: list[dict[str, Any]] = [{"messages": []}, {"tools": 3}, {"tools": "f"}]
    for variables in hostile:
        with pytest.raises(TemplateError):
            template.render([{"role": "user"}], **variables)


def test_a_templates_own_refusal_is_one_line(place: Callable[..., Path]) -> None:
    folder = place(jinja="{{ raise_exception('no\nsystem \x1b[31mrole') }}")
    with pytest.raises(TemplateError, match=r"failed: no system \?\[31mrole$"):
        _render(folder)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'a' | nofilter }}", "{% if %}", "{{", "{% macro %}{% endfor %}"]
)
def test_a_template_that_does_not_compile_is_named_with_its_line(source: str) -> None:
    with pytest.raises(TemplateError, match=r"'default' cannot be used: .*\(line 2\)"):
        ChatTemplate({"default": f"\n{source}"}, {})
