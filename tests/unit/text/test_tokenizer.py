"""Tokenizer: what a folder says, what a text becomes, and what a broken folder answers."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
import tokenizers.processors
from tokenizers import models

from lorad.text.template import ChatTemplate
from lorad.text.token_bytes import Bytes
from lorad.text.tokenizer import TextError, Tokenizer

TEXT = "the hen: 你好 🙂 wörld\n\ttail  "


def test_text_survives_the_way_to_ids_and_back(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode(TEXT, False)) == TEXT


@pytest.mark.parametrize("kind", ["byte_level", "space_mark"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(TEXT, False)
    spelled = b"".join(map(tokenizer.token_bytes, ids))
    first_space = b" " if kind == "space_mark" else b""
    assert spelled == first_space + TEXT.encode()


def test_a_model_that_draws_from_the_whole_vocabulary_fills_no_memory_with_it(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[tuple[bytes, str | None]]:
        ids = range(byte_level.vocab_size)
        return [(byte_level.token_bytes(i), byte_level.whole_text(i)) for i in ids]

    everything = told()
    monkeypatch.setattr("lorad.text.tokenizer.REMEMBERED", 16)
    byte_level._bytes.clear()
    byte_level._whole.clear()
    for _ in range(2):
        assert told() == everything
        assert max(len(byte_level._bytes), len(byte_level._whole)) <= 16 < byte_level.vocab_size


def test_the_spelling_is_read_from_the_decoder(
    byte_level: Tokenizer, space_mark: Tokenizer, other: Tokenizer
) -> None:
    kinds = [t.spelling for t in (byte_level, space_mark, other)]
    assert kinds == [Bytes.BYTE_LEVEL, Bytes.SPACE_MARK, Bytes.OTHER]
    assert other.token_bytes(other.encode("word", False)[0]) == b"word"


def test_a_text_that_a_vocabulary_cannot_read_is_an_error_of_the_text_however_it_is_read() -> None:
    """Without a token for what is unknown the library raises a bare Exception."""
    inner = tokenizers.Tokenizer(models.WordLevel(vocab={"hen": 0}, unk_token="[UNK]"))
    tokenizer = Tokenizer(inner, specials={})
    assert tokenizer.pieces("hen").ids == tokenizer.encode("hen", False) == [0]
    for read in (
        lambda text: tokenizer.encode(text, False),
        tokenizer.pieces,
        lambda text: tokenizer.many([text]),
    ):
        with pytest.raises(TextError, match=r"this vocabulary fails at a text: .*Missing"):
            read("cock")
        with pytest.raises(TextError, match="lone surrogate"):
            read("\ud800")


def test_half_a_character_has_bytes_and_shows_as_a_replacement(byte_level: Tokenizer) -> None:
    first = byte_level.encode("你", False)[0]
    assert byte_level.token_bytes(first) == "你".encode()[:2]
    assert byte_level.token_text(first) == "\ufffd"


def test_ids_that_the_vocabulary_lacks_are_nothing(byte_level: Tokenizer) -> None:
    assert byte_level.decode([-1, 10**9]) == ""
    assert byte_level.token_bytes(byte_level.vocab_size) == b""
    assert byte_level.token_bytes(-1) == b""


def test_a_lone_surrogate_is_an_error_of_the_text(byte_level: Tokenizer) -> None:
    with pytest.raises(TextError, match="surrogate"):
        byte_level.encode("a\ud800b", False)


@pytest.mark.parametrize("kind", ["byte_level", "space_mark", "other"])
def test_a_long_text_has_the_ids_and_the_offsets_of_a_short_one(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = request.getfixturevalue(kind)

    def told() -> list[object]:
        pieces = tokenizer.pieces(TEXT)
        encoded = [tokenizer.encode(TEXT, add) for add in (False, True)]
        return [encoded, *map(tokenizer.decode, encoded), pieces.ids, pieces.offsets]

    short = told()
    monkeypatch.setattr("lorad.text.tokenizer.LONG", 8)
    assert told() == short
    for read in (lambda text: tokenizer.encode(text, True), tokenizer.pieces):
        with pytest.raises(TextError, match="surrogate"):
            read("a\ud800b" * 20)


@pytest.mark.parametrize("reads", ["encode", "pieces"])
def test_others_go_on_while_a_long_text_becomes_ids(byte_level: Tokenizer, reads: str) -> None:
    """One client's prompt must not hold up the streams of all, which are the event loop's."""
    text, began, ended = "x" * 400_000, threading.Event(), threading.Event()

    def read() -> None:
        began.set()
        byte_level.encode(text, False) if reads == "encode" else byte_level.pieces(text)
        ended.set()

    with ThreadPoolExecutor(1) as pool:
        job, turns = pool.submit(read), 0
        began.wait()
        while not ended.wait(0.001):
            turns += 1
        job.result()
    assert turns > 5


def test_special_tokens_are_left_out_of_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("he</s>he", False)
    assert byte_level.decode(ids) == "hehe"
    assert byte_level.decode(ids, skip_special=False) == "he</s>he"


def test_end_tokens_are_the_union_of_all_three_files(folder: Callable[..., Path]) -> None:
    path = folder(
        tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [8, 9]},
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_ids == {7, 8, 9, tokenizer.token_id("</s>")}
    assert tokenizer.bos_id == tokenizer.token_id("<s>")
    assert tokenizer.chat_stop_ids - tokenizer.eos_ids == {tokenizer.token_id("<|im_end|>")}
    assert tokenizer.specials == {"eos_token": "</s>", "bos_token": "<s>"}


@pytest.mark.parametrize("end", ["<end_of_turn>", "<|end|>", "<|eot_id|>", "<|im_end|>"])
def test_a_chat_ends_on_the_turn_end_of_its_family_and_a_text_does_not(
    folder: Callable[..., Path], end: str
) -> None:
    """Phi's and Gemma's list more than one end in generation_config.json."""
    path = folder(
        tokenizer_config={"eos_token": "</s>"},
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [6, 5, 4]},
    )
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    inner.add_special_tokens([end])
    inner.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_ids == {4, 5, 6, tokenizer.token_id("</s>")}
    assert tokenizer.token_id(end) in tokenizer.chat_stop_ids
    assert tokenizer.chat_stop_ids > tokenizer.eos_ids


def test_a_rendered_chat_has_one_beginning_and_so_has_a_plain_text(
    folder: Callable[..., Path],
) -> None:
    """Gemma and Llama 3.1 write their bos in the template, and again behind the tokenizer."""
    path = folder(
        tokenizer_config={
            "bos_token": "<s>",
            "chat_template": "{{ bos_token }}<start>{{ messages[0].content }}",
        }
    )
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    bos = inner.token_to_id("<s>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    inner.save(str(path / "tokenizer.json"))
    tokenizer, template = Tokenizer.load(path), ChatTemplate.load(path)
    assert template is not None
    rendered = template.render([{"role": "user", "content": "hen"}])
    ids = tokenizer.encode(rendered, add_special=False)
    assert ids[0] == bos and ids.count(bos) == 1
    plain = tokenizer.encode("hen", add_special=True)
    assert plain[0] == bos and plain.count(bos) == 1


def test_the_truncation_of_a_training_run_is_not_a_servers(folder: Callable[..., Path]) -> None:
    path = folder()
    content = json.loads((path / "tokenizer.json").read_text())
    content["truncation"] = {
        "max_length": 4,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(path).encode("a" * 100, False)) == 100


def test_tokens_that_only_the_config_lists_are_added_on_their_ids(
    folder: Callable[..., Path],
) -> None:
    size = Tokenizer.load(folder()).vocab_size
    entry = {"content": "<extra>", "special": True}
    path = folder(tokenizer_config={"added_tokens_decoder": {str(size): entry}})
    assert Tokenizer.load(path).encode("<extra>", False) == [size]
    path = folder(tokenizer_config={"added_tokens_decoder": {str(size + 5): entry}})
    with pytest.raises(TextError, match="<extra>"):
        Tokenizer.load(path)


def test_a_folder_without_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"no tokenizer\.json in .*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": 3}'])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TextError) as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert "is not a tokenizer" in str(raised.value)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_broken_config_beside_it_is_named(folder: Callable[..., Path], content: str) -> None:
    path = folder()
    (path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TextError, match=r"tokenizer_config\.json"):
        Tokenizer.load(path)


def test_many_threads_may_use_one_tokenizer(byte_level: Tokenizer) -> None:
    texts = [f"the {n} 你好 🙂" * 20 for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda text: byte_level.encode(text, False), texts))
        assert list(pool.map(byte_level.decode, ids)) == texts


def test_the_text_package_starts_without_torch_and_transformers() -> None:
    code = (
        "import sys, lorad.text.tokenizer, lorad.text.template, lorad.text.detok;"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_smollm_reads_as_its_folder_says(smollm: Path) -> None:
    tokenizer = Tokenizer.load(smollm)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, {2})
    assert tokenizer.chat_stop_ids == {0, 2}
    assert tokenizer.decode(tokenizer.encode(TEXT, True)) == TEXT
