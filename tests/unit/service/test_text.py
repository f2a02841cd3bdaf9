"""Tokenizer and chat template of the base, and an adapter's own template over it."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lorad.errors import BadConfig, LoradError
from lorad.service.text import RevisionText, TextService
from lorad.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("base: {{ messages[0].content }}")
    return folder


@pytest.fixture
def service(base, tmp_path):
    return TextService(base, lambda rev: tmp_path / rev)


def adapter(tmp_path, rev, template=None):
    (tmp_path / rev).mkdir()
    if template is not None:
        (tmp_path / rev / "chat_template.jinja").write_text(template)


def test_the_base_renders_encodes_and_decodes(service):
    text = service(None)
    assert text.render(MESSAGES, {}) == "base: Hi"
    assert text.decode(text.encode("Grüße", add_special=False)) == "Grüße"
    assert text.token_bytes(text.encode("A", add_special=False)[0]) == b"A"


def test_an_adapters_own_template_is_used_for_it_and_no_other(service, tmp_path):
    adapter(tmp_path, "r1", "own: {{ messages[0].content }}")
    adapter(tmp_path, "r2")
    assert service("r1").render(MESSAGES, {}) == "own: Hi"
    assert service("r2").render(MESSAGES, {}) == "base: Hi"
    assert service("r2") is service(None)


def test_an_adapter_whose_files_are_gone_is_not_rendered_with_the_bases_template(service, tmp_path):
    with pytest.raises(LoradError, match="gone from the store") as caught:
        service("r1")
    assert caught.value.code == "model_not_found"
    adapter(tmp_path, "r1", "own: {{ messages[0].content }}")
    assert service("r1").render(MESSAGES, {}) == "own: Hi"


def test_a_template_that_cannot_be_used_is_an_error_and_not_the_bases(service, tmp_path):
    adapter(tmp_path, "r1", "{% if %}")
    with pytest.raises(LoradError, match="chat template cannot be used"):
        service("r1")


def test_what_a_template_refuses_is_the_callers_mistake(service, tmp_path):
    adapter(tmp_path, "r1", "{{ raise_exception('only one message') }}")
    with pytest.raises(LoradError, match="only one message") as caught:
        service("r1").render(MESSAGES, {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_without_a_template_there_is_no_chat(base, tmp_path):
    (base / "chat_template.jinja").unlink()
    with pytest.raises(LoradError, match="no chat template") as caught:
        TextService(base, lambda rev: tmp_path)(None).render(MESSAGES, {})
    assert caught.value.hint == "use /v1/completions"


def test_what_was_retired_is_read_anew(service, tmp_path):
    adapter(tmp_path, "r1", "one")
    assert service("r1").render(MESSAGES, {}) == "one"
    (tmp_path / "r1/chat_template.jinja").write_text("two")
    assert service("r1").render(MESSAGES, {}) == "one"
    service.forget("r1")
    assert service("r1").render(MESSAGES, {}) == "two"


def test_a_base_without_a_tokenizer_is_a_configuration_error(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({}))
    with pytest.raises(BadConfig, match=r"models\.base: no tokenizer\.json"):
        TextService(tmp_path / "empty", lambda rev: tmp_path)


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("{% for t in tools %}{{ t.function.name }}{% endfor %}", None),
        (
            "{% if not tools is defined %}{% set tools = none %}{% endif %}"
            "{% if tools is not none %}{{ tools[0].function.name }}{% endif %}",
            None,
        ),
        ("{# tools #}no tools {{ messages }}", "takes no tools"),
        ("{{ tools }}<tool_call><function=f>", "in a form that is not read"),
    ],
)
def test_tools_are_for_templates_that_were_made_for_them(source, refused):
    text = RevisionText(None, ChatTemplate({"default": source}, {}))
    tools = [{"type": "function", "function": {"name": "f"}}]
    if refused is None:
        assert text.render(MESSAGES, {}, tools) == "f"
        return
    with pytest.raises(LoradError, match=refused) as caught:
        text.render(MESSAGES, {}, tools)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    text.render(MESSAGES, {})


def test_a_template_of_its_own_for_tools_is_made_for_them():
    sources = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    text = RevisionText(None, ChatTemplate(sources, {}))
    assert text.render(MESSAGES, {}) == "plain"
    assert text.render(MESSAGES, {}, [{"function": {"name": "f"}}]) == "f"
