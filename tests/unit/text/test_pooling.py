"""Texts and pairs for a model that pools: marks, types, prompts, and what is cut."""

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from engine.pooling.spec import PoolingSpec
from lorad.text.pooling import Fit, PoolingText, TooLong
from lorad.text.tokenizer import TextError, Tokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", *"abcdefgh", "q:", "A"]
ID = {word: i for i, word in enumerate(WORDS)}


def text(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", types=2, end="", **spec):
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=ID, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(w, special=True) for w in WORDS[1:5]])
    if single:
        inner.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(w, ID[w]) for w in WORDS[1:5]]
        )
    tokenizer = Tokenizer(inner, specials={"eos_token": end}, adds_end=bool(end))
    return PoolingText(tokenizer, PoolingSpec(**spec), num_types=types)


def spelled(encoded):
    return " ".join(WORDS[i] for i in encoded.tokens)


WIDE = Fit(100)


def test_a_text_has_the_tokenizers_own_marks_and_no_types():
    encoded = text().one("a b", WIDE)
    assert spelled(encoded) == "[CLS] a b [SEP]"
    assert (encoded.types, encoded.keeps, encoded.num_cut) == (None, 1, 0)


def test_a_text_by_itself_is_read_with_its_marks_at_once(monkeypatch):
    """To put them around a long one keeps everybody else's Python waiting."""
    made = text(end="</s>")
    told = made.one("a b", WIDE, prompt="q: "), made.one("A", WIDE)
    monkeypatch.setattr(Tokenizer, "joined", None)
    assert (made.one("a b", WIDE, prompt="q: "), made.one("A", WIDE)) == told
    assert spelled(told[0]) == "[CLS] q: a b [SEP] </s>"


def test_a_pair_has_berts_types_or_robertas_marks_without_any():
    bert = text().pair("a b", "c", WIDE)
    assert spelled(bert) == "[CLS] a b [SEP] c [SEP]" and bert.types == [0, 0, 0, 0, 1, 1]
    roberta = text("<s> $A </s>", "<s> $A </s> </s> $B </s>", types=1).pair("a b", "c", WIDE)
    assert spelled(roberta) == "<s> a b </s> </s> c </s>" and roberta.types is None


def test_a_model_without_token_types_gets_none_even_if_its_tokenizer_tells_them():
    assert text(types=0).pair("a", "b", WIDE).types is None


def test_a_tokenizer_that_adds_nothing_is_taken_at_its_word():
    bare = text(single="")
    assert spelled(bare.one("a b", WIDE)) == "a b" and bare.one("a", WIDE).keeps == 0
    assert spelled(bare.pair("a", "b", WIDE)) == "a b"


def test_an_end_mark_that_only_the_config_speaks_of_is_put_behind_and_never_cut():
    made = text("<s> $A", "<s> $A $B", end="</s>")
    assert spelled(made.one("a b", WIDE)) == "<s> a b </s>"
    cut = made.one("a b c", Fit(4, cuts=True))
    assert (spelled(cut), cut.keeps, cut.num_cut) == ("<s> a b </s>", 1, 1)
    assert spelled(made.pair("a", "b", WIDE)) == "<s> a b </s>"
    left_out = text("<s> $A", end="</s>", include_prompt=False).one("a", WIDE, "q: ")
    assert (spelled(left_out), left_out.prompt_tokens) == ("<s> q: a </s>", 2)


def test_an_end_mark_that_the_tokenizer_puts_there_itself_is_not_put_twice():
    assert spelled(text("<s> $A </s>", end="</s>").one("a", WIDE)) == "<s> a </s>"


def test_exactly_as_long_as_allowed_is_whole_and_one_more_is_cut_or_refused():
    made = text()
    assert made.one("a b c", Fit(5)).num_cut == 0
    cut = made.one("a b c d", Fit(5, cuts=True))
    assert spelled(cut) == "[CLS] a b c [SEP]" and cut.num_cut == 1
    with pytest.raises(TooLong, match="6 tokens: the model takes 5"):
        made.one("a b c d", Fit(5))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("longest_first", "[CLS] a b [SEP] e f [SEP]"),
        ("only_second", "[CLS] a b c [SEP] e [SEP]"),
        ("only_first", "[CLS] a [SEP] e f g [SEP]"),
    ],
)
def test_a_pair_is_cut_as_is_asked_and_keeps_its_marks(how, expected):
    encoded = text().pair("a b c", "e f g", Fit(7, cuts=True, pair=how))
    assert spelled(encoded) == expected and encoded.num_cut == 2
    assert len(encoded.types) == 7


def test_a_pair_whose_first_text_alone_is_too_long_is_refused():
    with pytest.raises(TooLong):
        text().pair("a b c d e f", "g", Fit(6, cuts=True, pair="only_second"))
    with pytest.raises(TooLong, match="3 tokens of a pair's own"):
        text().pair("a", "b", Fit(2, cuts=True))
    with pytest.raises(TooLong, match="7 tokens"):
        text().pair("a b", "c d", Fit(6))


def test_the_second_text_has_a_bound_of_its_own():
    assert spelled(text().pair("a", "b c d", Fit(100, second=2))) == "[CLS] a [SEP] b c [SEP]"


def test_ids_are_taken_as_they_are_and_only_their_own_end_mark_is_kept():
    made = text()
    ids = [ID[w] for w in ("a", "b", "c", "d")]
    assert made.ids(ids, WIDE).tokens == ids and made.ids(ids, WIDE).keeps == 0
    assert spelled(made.ids(ids, Fit(2, cuts=True))) == "a b"
    assert spelled(made.ids([*ids, ID["[SEP]"]], Fit(2, cuts=True))) == "a [SEP]"


def test_texts_are_lowered_where_the_model_says_so():
    assert spelled(text(lower_case=True).one("A", WIDE)) == "[CLS] a [SEP]"
    assert spelled(text().one("A", WIDE)) == "[CLS] A [SEP]"


def test_a_prompt_that_is_not_pooled_is_counted_with_the_mark_ahead_of_it():
    left_out = text(include_prompt=False).one("a b", WIDE, "q: ")
    assert (spelled(left_out), left_out.prompt_tokens) == ("[CLS] q: a b [SEP]", 2)
    assert text().one("a b", WIDE, "q: ").prompt_tokens == 0
    with pytest.raises(TooLong, match="a prompt of 4 tokens alone"):
        text(include_prompt=False).one("a", Fit(4, cuts=True), "q: q: q: ")


def test_a_role_has_the_first_of_its_prompts_and_none_is_bare():
    made = text(prompts={"search_query": "q: ", "document": ""}, default_prompt="search_query")
    assert made.prompt(role="query") == "q: " and made.prompt(role="document") == ""
    assert made.prompt() == "q: " and text().prompt(role="query") == text().prompt() == ""
    with pytest.raises(TextError, match="search_query, document"):
        made.prompt("none")


@pytest.mark.parametrize("space", ["", " "])
def test_an_instruction_is_put_into_the_prompt_as_its_model_spaces_it(space):
    made = text(prompts={"query": f"Instruct: x\nQuery:{space}"})
    assert made.prompt(role="query", task="find it") == f"Instruct: find it\nQuery:{space}"
    with pytest.raises(TextError, match="no place for an instruction"):
        text(prompts={"query": "q: "}).prompt(role="query", task="find it")


def test_a_lone_surrogate_is_no_text():
    with pytest.raises(TextError, match="surrogate"):
        text().one("\ud800", WIDE)
    with pytest.raises(TextError, match="surrogate"):
        text().pair("a", "\ud800", WIDE)


@pytest.mark.parametrize("fit", [WIDE, Fit(7, cuts=True), Fit(8, cuts=True, second=2)])
def test_texts_that_were_tokenised_together_are_as_each_by_itself(fit):
    made = text()
    texts = ["a b", "c d e f g h", "", "nothing known", "a b"]
    ahead = made.ahead(texts)
    assert set(ahead) == set(texts)
    for one in texts:
        assert made.one(one, fit, ahead=ahead) == made.one(one, fit)
        assert made.pair("c d e f g h", one, fit, ahead=ahead) == made.pair("c d e f g h", one, fit)
    assert len(ahead["c d e f g h"]) == 6, "what is cut for one pair is whole for the next"


def test_texts_are_lowered_and_one_that_is_no_text_fails_alone():
    made = text(lower_case=True)
    assert spelled(made.one("q: A", WIDE, ahead=made.ahead(["q: A", "B"]))) == "[CLS] q: a [SEP]"
    assert made.ahead(["a", "\ud800"]) == {} and made.ahead(["a", "a"]) == {}
    with pytest.raises(TextError, match="lone surrogate"):
        made.one("\ud800", WIDE, ahead={})


def test_a_document_that_is_read_alone_has_a_bound_of_its_own():
    """Whatever else is cut; a query has none, and what others have of the same text stays whole."""
    made, fit = text(), Fit(100, second=2)
    ahead = made.ahead(["a b c d", "e"])
    assert spelled(made.one("a b c d", fit, ahead=ahead, role="document")) == "[CLS] a b [SEP]"
    assert spelled(made.one("a b c d", fit, ahead=ahead, role="query")) == "[CLS] a b c d [SEP]"
    assert spelled(made.one("a b c d", fit, ahead=ahead)) == "[CLS] a b c d [SEP]"
    behind = made.one("a b c d", fit, "q: ", role="document")
    assert spelled(behind) == "[CLS] q: a b [SEP]"
