"""Pairs that are put into one text: its form, and what is cut of it."""

import pytest

from engine.pooling.spec import PoolingSpec
from lorad.text.pair_prompt import from_file, of_template, qwen3_reranker, takes_pairs
from lorad.text.pooling import Fit, PoolingText, TooLong
from lorad.text.template import ChatTemplate
from lorad.text.tokenizer import TextError, Tokenizer
from tests.fakes.tiny_qwen3 import write_qwen3

ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}] "
    "{% elif m.role == 'query' %}Q={{ m.content }} "
    "{% elif m.role == 'document' %}D={{ m.content%s }}{% endif %}{% endfor %}?"
)


def template(source):
    return ChatTemplate({"default": source}, {})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_qwen3(tmp_path_factory.mktemp("qwen3")))


def pooling_text(tokenizer, asks, **spec):
    return PoolingText(tokenizer, PoolingSpec(**spec), asks=asks)


WIDE = Fit(1000)


def test_the_form_of_qwen3_reranker():
    asked = qwen3_reranker().ask("what?", "that.")
    assert asked.text == (
        "<|im_start|>system\n"
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: what?\n"
        "<Document>: that.<|im_end|>\n"
        "<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert asked.text[asked.start : asked.end] == "that."
    assert "<Instruct>: Find it\n<Query>" in qwen3_reranker().ask("q", "d", "Find it").text


@pytest.mark.parametrize(
    ("filters", "document", "text"),
    [("", " a b ", "Q=q D= a b ?"), ("|trim", " a b ", "Q=q D=a b?"), ("", "", "Q=q D=?")],
)
def test_a_template_with_these_roles_is_obeyed(filters, document, text):
    prompt = of_template(template(ROLES.replace("%s", filters)), "here")
    asked = prompt.ask("q", document)
    assert asked.text == text and asked.text[asked.start : asked.end] == (
        document.strip() if filters else document
    )
    assert prompt.takes_instruction and prompt.ask("q", "d", "i").text == "[i] Q=q D=d?"


def test_a_document_that_is_also_elsewhere_in_the_text_is_found_where_it_was_put():
    asked = of_template(template(ROLES.replace("%s", "")), "here").ask("D", "D")
    assert (asked.text, asked.start, asked.end) == ("Q=D D=D?", 6, 7)


@pytest.mark.parametrize(
    "source", [ROLES.replace("%s", "[:2]"), ROLES.replace("%s", " }}{{ m.content")]
)
def test_a_template_that_puts_no_document_or_two_into_its_text_is_refused(source):
    with pytest.raises(TextError, match="times: once is served"):
        of_template(template(source), "here").ask("q", "d")


def test_which_templates_take_pairs(tmp_path):
    assert takes_pairs(template(ROLES.replace("%s", "")))
    chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert not takes_pairs(template(chat)) and not takes_pairs(None)
    path = tmp_path / "pair.jinja"
    for source, told in ((chat, "does not speak of messages"), ("{% if", "cannot be used")):
        path.write_text(source)
        with pytest.raises(TextError, match=told):
            from_file(path)
    with pytest.raises(TextError, match="cannot be read"):
        from_file(tmp_path / "nothing.jinja")
    path.write_text(ROLES.replace("%s", ""))
    assert from_file(path).origin == f"the form of {path}"


def test_tokens_are_those_of_the_whole_text_and_no_marks_are_added(tokenizer):
    encoded = pooling_text(tokenizer, qwen3_reranker()).pair("yes or no?", "wörds", WIDE)
    asked = qwen3_reranker().ask("yes or no?", "wörds")
    assert encoded.tokens == tokenizer.encode(asked.text, False)
    assert (encoded.types, encoded.num_cut) == (None, 0)
    behind = tokenizer.encode(asked.text[asked.end :], False)
    assert encoded.keeps == len(behind) and encoded.tokens[-encoded.keeps :] == behind


@pytest.mark.parametrize("how", ["longest_first", "only_second", "only_first"])
def test_only_the_document_is_cut_from_its_end(tokenizer, how):
    made = pooling_text(tokenizer, of_template(template(ROLES.replace("%s", "")), "here"))
    whole = made.pair("q", "abcdef", WIDE).tokens
    for room in range(len(whole) - 6, len(whole) + 1):
        cut = made.pair("q", "abcdef", Fit(room, cuts=True, pair=how))
        assert len(cut.tokens) == room and cut.num_cut == len(whole) - room
        assert tokenizer.decode(cut.tokens) == f"Q=q D={'abcdef'[: 6 - cut.num_cut]}?"
    with pytest.raises(TooLong, match=f"{len(whole) - 6} tokens without its document"):
        made.pair("q", "abcdef", Fit(len(whole) - 7, cuts=True, pair=how))
    with pytest.raises(TooLong, match=f"{len(whole)} tokens: the model takes {len(whole) - 1}"):
        made.pair("q", "abcdef", Fit(len(whole) - 1))


def test_the_document_has_a_bound_of_its_own(tokenizer):
    made = pooling_text(tokenizer, of_template(template(ROLES.replace("%s", "")), "here"))
    cut = made.pair("q", "abcdef", Fit(1000, second=2))
    assert tokenizer.decode(cut.tokens) == "Q=q D=ab?" and cut.num_cut == 4
    both = made.pair("q", "abcdef", Fit(8, cuts=True, second=3))
    assert tokenizer.decode(both.tokens) == "Q=q D=a?" and both.num_cut == 5


def test_half_a_character_may_be_cut_off_and_nothing_else_is(tokenizer):
    made = pooling_text(tokenizer, of_template(template(ROLES.replace("%s", "")), "here"))
    cut = made.pair("ö", "öö", Fit(11, cuts=True))
    assert tokenizer.decode(cut.tokens) == "Q=ö D=ö\ufffd?" and cut.num_cut == 1


def test_texts_are_lowered_where_the_model_says_so(tokenizer):
    asks = of_template(template(ROLES.replace("%s", "")), "here")
    made = pooling_text(tokenizer, asks, lower_case=True)
    assert tokenizer.decode(made.pair("A", "B", WIDE).tokens) == "Q=a D=b?"
