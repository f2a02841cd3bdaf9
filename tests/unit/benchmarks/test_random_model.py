"""The random model's tokenizer: whatever is drawn is text."""

import pytest
from random_model import write_tokenizer

from lorad.text.detok import Detokenizer
from lorad.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 128256)
    return Tokenizer.load(folder)


def test_every_id_is_a_word_of_its_own(tokenizer):
    assert tokenizer.vocab_size == 128256
    words = {tokenizer.token_bytes(i) for i in range(128256)}
    assert len(words) == 128256
    assert all(word.isascii() and word.decode().isprintable() for word in words)


def test_every_token_of_a_stream_is_a_piece_of_its_own(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert all(detokenizer.push([i]).text for i in range(0, 128256, 97))


def test_text_can_be_encoded(tokenizer):
    text = "Hello, world 42"
    assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text
