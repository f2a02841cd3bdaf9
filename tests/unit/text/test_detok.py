"""Detokenizer: the pieces are the text, no character is ever halved, stop strings cut it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorad.text.detok import Detokenizer, StopFinder, StopStrings
from lorad.text.tokenizer import Tokenizer

WORDS = st.lists(
    st.sampled_from(["the", " hen", "é", "你好", "🙂", "👩‍👩‍👧", "\n\n", " ", "ab", ".", "\u0301"]),
    max_size=12,
).map("".join)
TEXTS = st.one_of(WORDS, st.text(max_size=20))
STOPS = st.lists(st.text(alphabet="abh e.你🙂", min_size=1, max_size=4), max_size=4)


def pieces(detok: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Push `ids` in groups of the given sizes, then one by one."""
    out, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        out.append(detok.push(ids[at : at + size]).text)
        at += size
    return [*out, detok.finish()]


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that ends first; of two, the one that began earlier."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return text[: min(ends)[1]] if ends else text


@given(text=TEXTS, sizes=st.lists(st.integers(0, 4), max_size=6))
def test_the_pieces_are_the_whole_decode(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text, False)
    whole = tokenizer.decode(ids)
    parts = pieces(Detokenizer(tokenizer), ids, sizes)
    assert "".join(parts) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in part for part in parts)


@given(data=st.data())
def test_random_ids_decode_as_the_library_decodes_them(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    token = st.integers(0, byte_level.vocab_size)
    ids = data.draw(st.lists(token, max_size=12))
    assert "".join(pieces(Detokenizer(byte_level), ids, [])) == byte_level.decode(ids)


@given(text=TEXTS, stops=STOPS, sizes=st.lists(st.integers(0, 4), max_size=6))
def test_stop_strings_cut_the_text_where_the_first_is_complete(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    ids = tokenizer.encode(text, False)
    detok = Detokenizer(tokenizer, stop=StopStrings(stops))
    whole = tokenizer.decode(ids)
    assert "".join(pieces(detok, ids, sizes)) == cut(whole, stops)
    if detok.stopped:
        before = tokenizer.decode(ids[: detok.num_tokens - 1])
        assert cut(before, stops) == before


@given(text=TEXTS, prompt=TEXTS)
def test_an_answer_goes_on_where_the_prompt_ended(
    byte_level: Tokenizer, text: str, prompt: str
) -> None:
    ids = byte_level.encode(text, False)
    context = byte_level.encode(prompt, False)
    assert "".join(pieces(Detokenizer(byte_level, context), ids, [])) == text


@given(text=st.text(alphabet="ab你", max_size=30), stops=st.lists(st.text("ab你", max_size=5)))
def test_what_is_held_back_is_only_what_may_begin_a_stop_string(
    text: str, stops: list[str]
) -> None:
    finder = StopFinder(StopStrings(stops))
    shown = ""
    for at, character in enumerate(text, 1):
        certain, found = finder.push(character)
        shown += certain
        if found:
            assert shown == cut(text, [s for s in stops if s])
            return
        held = text[len(shown) : at]
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [text[n:at] for n in range(len(shown))]
        assert not any(rest and stop.startswith(rest) for rest in longer for stop in stops)
    assert shown + finder.flush() == text


def test_a_character_comes_out_whole_with_its_last_half(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("你", False)
    detok = Detokenizer(byte_level)
    assert detok.push([first]).text == ""
    assert detok.push([second]).text == "你"


def test_a_prompt_that_ends_in_half_a_character_is_completed(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("你", False)
    assert Detokenizer(byte_level, [first]).push([second]).text == "你"


def test_half_a_character_at_the_end_shows_as_a_replacement(byte_level: Tokenizer) -> None:
    detok = Detokenizer(byte_level)
    assert detok.push(byte_level.encode("a你", False)[:-1]).text == "a"
    assert detok.finish() == "\ufffd"


def test_a_stop_string_across_tokens_is_never_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("go.END.and more", False)
    detok = Detokenizer(byte_level, stop=StopStrings(["END"]))
    shown = [detok.push([token]) for token in ids]
    assert "".join(piece.text for piece in shown) == "go."
    assert [piece.consumed_tokens for piece in shown].count(1) == detok.num_tokens == 6
    assert detok.finish() == ""


def test_tokens_after_the_one_that_completed_the_string_do_not_count(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("abENDcd", False)
    piece = Detokenizer(byte_level, stop=StopStrings(["END"])).push(ids)
    assert (piece.text, piece.stopped, piece.consumed_tokens) == ("ab", True, 5)


def test_of_several_stop_strings_the_one_complete_first_wins(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("xabcd", False)
    assert Detokenizer(byte_level, stop=StopStrings(["abcd", "bc"])).push(ids).text == "xa"
    assert Detokenizer(byte_level, stop=StopStrings(["bc", "abc"])).push(ids).text == "x"


def test_a_stop_string_that_only_began_is_text(byte_level: Tokenizer) -> None:
    detok = Detokenizer(byte_level, stop=StopStrings(["END"]))
    assert detok.push(byte_level.encode("goEN", False)).text == "go"
    assert detok.finish() == "EN"


def test_special_tokens_count_but_do_not_show(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("he</s>", False)
    piece = Detokenizer(byte_level).push(ids)
    assert (piece.text, piece.consumed_tokens) == ("he", len(ids))
    assert Detokenizer(byte_level, skip=frozenset()).push(ids).text == "he</s>"
    assert (
        Detokenizer(byte_level, skip=byte_level.special_ids - {ids[-1]}).push(ids).text == "he</s>"
    )


def test_the_first_words_space_is_kept_only_after_text(space_mark: Tokenizer) -> None:
    word = space_mark.token_id("▁the")
    bos = space_mark.token_id("<s>")
    assert word is not None and bos is not None
    assert Detokenizer(space_mark).push([word]).text == "the"
    assert Detokenizer(space_mark, [bos]).push([word]).text == "the"
    assert Detokenizer(space_mark, [word]).push([word]).text == " the"


def test_a_byte_wise_vocabulary_is_read_without_decoding_windows(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constant work per token: the library's decoder is not called at all."""
    ids = byte_level.encode("the hen 你好", False)
    monkeypatch.setattr(byte_level, "decode", None)
    assert Detokenizer(byte_level).push(ids).text == "the hen 你好"


def test_a_window_stays_small_however_long_the_text(
    other: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = other.encode("unbelievables, word" * 50, False)
    lengths = []
    decode = other.decode

    def measured(window: list[int], **options: bool) -> str:
        lengths.append(len(window))
        return decode(window, **options)

    monkeypatch.setattr(other, "decode", measured)
    detok = Detokenizer(other)
    for token in ids:
        detok.push([token])
    assert len(lengths) >= len(ids) > 100
    assert max(lengths) <= 16


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, stops=STOPS)
def test_the_same_holds_for_smollm(smollm: Path, text: str, stops: list[str]) -> None:
    tokenizer = _loaded(smollm)
    ids = tokenizer.encode(text, False)
    whole = tokenizer.decode(ids)  # not always `text`: the vocabulary lacks some rare bytes
    assert "".join(pieces(Detokenizer(tokenizer, stop=StopStrings(stops)), ids, [])) == cut(
        whole, stops
    )


_cache: dict[Path, Tokenizer] = {}


def _loaded(folder: Path) -> Tokenizer:
    if folder not in _cache:
        _cache[folder] = Tokenizer.load(folder)
    return _cache[folder]
