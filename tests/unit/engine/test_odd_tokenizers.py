"""Tokenizers that llguidance cannot read, or reads as something else: a line, and no more."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

from engine.errors import GrammarInvalid
from engine.grammar import Grammars, regex

VOCAB = {letter: i for i, letter in enumerate("abcdefgh")}


def written(folder: Path, before: str = "", **more: Any) -> Path:
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    model = {"type": "BPE", "vocab": VOCAB, "merges": [], **more}
    path = folder / "tokenizer.json"
    path.write_text(before + json.dumps({"version": "1.0", "decoder": decoder, "model": model}))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocab", [{"<0xZZ>": 8}, {"a" * 70_000: 8}], ids=["byte", "long"])
def test_one_at_which_the_library_panics_is_refused(
    tmp_path: Path, vocab: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """It was no Exception: the request waited for half a minute for a mask that never came."""
    path = written(tmp_path, vocab=VOCAB | vocab, byte_fallback=True)
    with pytest.raises(GrammarInvalid, match="llguidance broke off: "):
        Grammars(path, 9, (7,))
    assert "panicked" in capfd.readouterr().err


def test_one_that_begins_with_a_blank_is_no_path(tmp_path: Path) -> None:
    grammars = Grammars(written(tmp_path, before="\n "), 8, (7,))
    matcher = grammars.matcher(regex("[ac]d"))
    [word] = matcher.mask()
    assert word == 0b101
    matcher.take([2])
    [word] = matcher.mask()
    assert word == 0b1000


def test_ends_of_no_vocabulary_allow_nothing(tmp_path: Path) -> None:
    vocab = VOCAB | {f"<{i}>": i for i in range(8, 32)}  # a mask of just one word
    matcher = Grammars(written(tmp_path, vocab=vocab), 32, (7,)).matcher(regex("a"))
    matcher.take([0])
    [word] = matcher.mask((-1, 32, 1 << 40, 5))
    assert word == 1 << 7 | 1 << 5


def test_a_tokenizer_is_read_in_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each the library keeps the interpreter's lock, and an engine begins no step."""
    import llguidance

    real, asked = llguidance.LLTokenizer, list[object]()

    class Noted:
        general_slices = staticmethod(real.general_slices)

        def __new__(cls, *args: Any, **options: Any) -> Any:
            asked.append(options["slices"])
            return real(*args, **options)

    monkeypatch.setattr(llguidance, "LLTokenizer", Noted)
    matcher = Grammars(written(tmp_path), 8, (7,)).matcher(regex("[ac]d"))
    assert asked == [[]] and matcher.mask()[0] == 0b101
