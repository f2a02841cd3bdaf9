"""Embedding and head of another vocabulary than the base's: what does not fit, and what lies."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.peft import inspect
from engine.errors import AdapterInvalid
from engine.models.spec import ModelSpec

P = "base_model.model."
EMBED, HEAD = f"{P}model.embed_tokens", f"{P}lm_head"
Spoil = Callable[[Any], object]


def ends(embed: int, head: int, name: str = "weight", **config: Any) -> Spoil:
    """Whole rows of both, 0 = none; in every row its own number."""

    def spoil(draft: Any) -> None:
        for path, rows in ((EMBED, embed), (HEAD, head)):
            if rows:
                values = np.arange(rows, dtype=np.float32)[:, None] * np.ones((1, 64), np.float32)
                draft.put(f"{path}.{name}", values)
        draft.config |= config

    return spoil


def factors(end: str, tokens: int) -> Spoil:
    def spoil(draft: Any) -> None:
        names = ("lora_embedding_A", "lora_embedding_B")
        wide, high = (4, tokens), (64, 4)
        if end == HEAD:
            names, wide, high = ("lora_A.weight", "lora_B.weight"), (4, 64), (tokens, 4)
        draft.add(f"{end}.{names[0]}", *wide)
        draft.add(f"{end}.{names[1]}", *high)

    return spoil


def tokens(embed: list[int], head: list[int]) -> Spoil:
    def spoil(draft: Any) -> None:
        held = {"embed_tokens": embed, "lm_head": head}
        draft.config["trainable_token_indices"] = {k: ids for k, ids in held.items() if ids}
        for path, ids in ((EMBED, embed), (HEAD, head)):
            if ids:
                draft.add(f"{path}.token_adapter.trainable_tokens_delta", len(ids), 64)

    return spoil


def zeros(name: str, *shape: int, dtype: str = "F32") -> Spoil:
    return lambda draft: draft.add(name, *shape, dtype=dtype)


def nan(draft: Any) -> None:
    draft.put(f"{EMBED}.weight", np.full((130, 64), np.nan))


def every(*spoils: Spoil) -> Spoil:
    return lambda draft: [spoil(draft) for spoil in spoils]


BOTH = ["lm_head", "embed_tokens"]
ROOM = 16  # of the base's 128
SETTING = "extra_vocab` = 64 (22 or more)"
ALORA = {"alora_invocation_tokens": [5]}
#: code, what spoils the folder, words of message and hint
CASES: list[tuple[str, Spoil, tuple[str, ...]]] = [
    ("E_VOCAB_RESIZED", ends(150, 150), ("150", "128", "16 more", SETTING)),
    ("E_VOCAB_RESIZED", ends(150, 150, "base_layer.weight"), ("150", SETTING)),
    ("E_VOCAB_RESIZED", ends(150, 150, modules_to_save=BOTH), ("150", SETTING)),
    ("E_VOCAB_RESIZED", tokens([*range(128, 150)], [*range(128, 150)]), ("150", SETTING)),
    ("E_VOCAB_RESIZED", tokens([1 << 40], [1 << 40]), (str((1 << 40) + 1), "resized model")),
    ("E_VOCAB_RESIZED", every(ends(130, 130), factors(EMBED, 150)), ("150", "128")),
    ("E_VOCAB_RESIZED", ends(130, 0), ("embed_tokens.weight", "130", "of lm_head", "128")),
    ("E_VOCAB_RESIZED", ends(0, 130), ("lm_head.weight", "130", "of embed_tokens")),
    ("E_VOCAB_RESIZED", ends(130, 131), ("130", "131")),
    ("E_VOCAB_RESIZED", ends(90, 100), ("90", "100")),
    ("E_VOCAB_RESIZED", ends(130, 128, modules_to_save=BOTH), ("130", "128")),
    ("E_VOCAB_RESIZED", tokens([128], []), ("129", "of lm_head")),
    ("E_VOCAB_RESIZED", tokens([128, 130], [128, 130]), ("131", "token 129")),
    ("E_VOCAB_RESIZED", tokens([128, 129], [129]), ("lm_head", "token 128")),
    ("E_VOCAB_RESIZED", factors(HEAD, 130), ("130", "row of lm_head", "token 128")),
    ("E_VOCAB_RESIZED", factors(EMBED, 130), ("row of embed_tokens", "token 128")),
    ("E_VOCAB_RESIZED", every(ends(130, 130), factors(HEAD, 129)), ("130", "129")),
    ("E_TRAINABLE_TOKENS", every(ends(130, 130), tokens([130], [5])), ("token 130", "130 rows")),
    ("E_TRAINABLE_TOKENS", every(ends(90, 90), tokens([3, 90], [5])), ("token 90",)),
    ("E_ALORA", ends(130, 130, **ALORA), ("2 tokens of its own",)),
    ("E_SHAPE", zeros(f"{EMBED}.weight", 130, 60), ("[130, 60]", "[130, 64]")),
    ("E_SHAPE", zeros(f"{EMBED}.weight", 1 << 40, 0), (f"[{1 << 40}, 0]",)),
    ("E_ZERO_SHARD", zeros(f"{HEAD}.weight", 0, 64), ("[0, 64]",)),
    ("E_DTYPE", zeros(f"{HEAD}.weight", 130, 64, dtype="F64"), ("F64",)),
    (
        "E_DUPLICATE_MODULE",
        every(ends(130, 130, "base_layer.weight"), zeros(f"{EMBED}.weight", 130, 64)),
        ("embed_tokens.weight", "embed_tokens.base_layer"),
    ),
    (
        "E_DUPLICATE_MODULE",
        every(ends(130, 130, modules_to_save=BOTH), factors(EMBED, 130)),
        ("embed_tokens.weight", "lora_embedding_A"),
    ),
    (
        "E_DUPLICATE_MODULE",
        every(
            ends(130, 130, modules_to_save=BOTH),
            zeros(f"{HEAD}.modules_to_save.weight", 130, 64),
        ),
        ("lm_head.weight", "lm_head.modules_to_save"),
    ),
    (
        "E_MODULES_TO_SAVE",
        ends(130, 130, "modules_to_save.weight", modules_to_save=BOTH),
        ("without embed_tokens.weight",),
    ),
    ("E_NONFINITE", every(ends(130, 130), nan), ("embed",)),
]


def refusal(folder: Path, spec: ModelSpec) -> AdapterInvalid:
    with pytest.raises(AdapterInvalid) as caught:
        inspect(folder, spec)
    return caught.value


@pytest.mark.parametrize(
    ("code", "spoil", "words"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_what_does_not_fit_is_refused_with_what_would(
    code: str, spoil: Spoil, words: tuple[str, ...], draft: Any, spec: ModelSpec
) -> None:
    spoil(draft)
    error = refusal(draft.write(), replace(spec, extra_vocab=ROOM))
    assert error.reason == code, error.message
    assert all(word in f"{error.message} | {error.hint}" for word in words), str(error)


def test_as_many_tokens_are_taken_as_there_is_room_for_and_not_one_more(
    new_draft: Any, spec: ModelSpec
) -> None:
    most, roomy = 128 + ROOM, replace(spec, extra_vocab=ROOM)
    full, over = new_draft(), new_draft()
    ends(most, most)(full)
    ends(most + 1, most + 1)(over)
    assert inspect(full.write(), roomy).num_tokens == most
    assert refusal(over.write(), roomy).reason == "E_VOCAB_RESIZED"


@pytest.mark.parametrize("rows", [90, 130])
def test_a_base_that_only_pools_takes_no_other_vocabulary_whatever_the_setting(
    rows: int, draft: Any, spec: ModelSpec
) -> None:
    ends(rows, 0)(draft)
    error = refusal(draft.write(), replace(spec, generates=False))
    assert error.reason == "E_VOCAB_RESIZED" and str(rows) in error.message
    assert "extra_vocab" not in error.hint


def test_a_base_that_only_pools_takes_ends_of_its_own_size(draft: Any, spec: ModelSpec) -> None:
    ends(128, 0, modules_to_save=BOTH)(draft)
    pools = replace(spec, generates=False)
    assert inspect(draft.write(), pools).modules[-1].module == "embed_tokens.rows"
    draft.path = draft.path.with_name("other")
    draft.tensors.pop(f"{EMBED}.weight")
    factors(EMBED, 128)(draft)
    assert inspect(draft.write(), pools).modules[-1].module == "embed_tokens"


def test_two_copies_that_differ_are_refused_where_the_base_has_one_tensor_for_both(
    draft: Any, spec: ModelSpec
) -> None:
    ends(130, 130)(draft)
    spec = replace(spec, extra_vocab=ROOM)
    assert inspect(draft.write(), replace(spec, tied=True)).modules
    draft.path = draft.path.with_name("other")
    draft.add(f"{HEAD}.weight", 130, 64)
    folder = draft.write()
    assert inspect(folder, spec).modules
    assert refusal(folder, replace(spec, tied=True)).reason == "E_DUPLICATE_MODULE"


def test_a_tokenizer_may_have_no_more_ids_than_the_adapter_has_rows(
    new_draft: Callable[[], Any], spec: ModelSpec
) -> None:
    spec = replace(spec, extra_vocab=ROOM)
    for rows, last, fits in ((130, 129, True), (130, 130, False), (90, 89, True), (90, 90, False)):
        draft = new_draft()
        ends(rows, rows)(draft)
        vocab = f'{{"model": {{"vocab": {{"a": 0, "b": {last}}}}}}}'
        draft.files["tokenizer.json"] = vocab.encode()
        if fits:
            assert inspect(draft.write(), spec).num_tokens == last + 1
        else:
            error = refusal(draft.write(), spec)
            assert error.reason == "E_TOKENIZER_TOO_LARGE"
            assert str(last) in error.message and f"its own embedding has {rows}" in error.message


def test_fewer_rows_than_the_base_s_tokenizer_has_ids_want_a_tokenizer(
    draft: Any, spec: ModelSpec, tmp_path: Path
) -> None:
    ends(90, 90)(draft)
    (tmp_path / "base").mkdir()
    words = ", ".join(f'"w{i}": {i}' for i in range(100))
    (tmp_path / "base" / "tokenizer.json").write_text(f'{{"model": {{"vocab": {{{words}}}}}}}')
    (tmp_path / "base" / "model.safetensors").write_bytes(draft.weights())
    with pytest.raises(AdapterInvalid) as caught:
        inspect(draft.write(), spec, base=tmp_path / "base")
    assert caught.value.reason == "E_VOCAB_RESIZED"
    assert "90 rows" in caught.value.message and "100 ids" in caught.value.message


def test_a_header_of_a_billion_rows_costs_nothing(draft: Any, spec: ModelSpec) -> None:
    ends(130, 130, modules_to_save=BOTH)(draft)
    raw = draft.weights()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b"[130, 64]", b"[1000000000, 64]")
    draft.raw_weights = len(header).to_bytes(8, "little") + header + raw[8 + length :]
    started = time.process_time()
    assert refusal(draft.write(), replace(spec, extra_vocab=ROOM)).reason == "E_SPAN"
    assert time.process_time() - started < 0.5
