"""Tokenizers in adapter folders: the base's written in another way, or the adapter's own."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.adapters import adapter_text, own_tokenizer, tokenizer_files
from engine.adapters.manifest import AdapterManifest
from engine.adapters.own_tokenizer import differs
from engine.adapters.pack import pack_into
from engine.adapters.peft import base_text, inspect, inspect_text
from engine.adapters.tokenizer_files import BaseTokenizer
from engine.models.spec import ModelSpec

MakeFolder = Callable[..., Path]
MakePair = Callable[..., dict[str, torch.Tensor]]
TEXT = "<r0> ab abc  abcd"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 ids, of which the last two are reserved."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=98, show_progress=False)
    tokenizer.train_from_iterator([f"ab abc abcd {i} word{i}" for i in range(200)], trainer)
    while (size := tokenizer.get_vocab_size()) < 98:
        tokenizer.add_tokens([f"more{size}"])
    tokenizer.add_special_tokens(["<r0>", "<r1>"])
    folder = tmp_path_factory.mktemp("base")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"added_tokens_decoder": {"98": {"content": "<r0>"}, "99": {"content": "<r1>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def held(folder: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


Change = Callable[[dict[str, Any]], object]


def spelled(t: dict[str, Any]) -> None:
    t["model"]["merges"] = [" ".join(pair) for pair in t["model"]["merges"]]


def reordered(t: dict[str, Any]) -> None:
    t["model"] = dict(reversed(t["model"].items()))
    t["model"]["vocab"] = dict(reversed(t["model"]["vocab"].items()))


def of_an_older_library(t: dict[str, Any]) -> None:
    del t["model"]["ignore_merges"], t["model"]["dropout"], t["post_processor"]
    t["model"]["byte_fallback"] = None


def of_a_training_run(t: dict[str, Any]) -> None:
    t["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    t["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }


def swapped(t: dict[str, Any]) -> None:
    merges = t["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


SAME: dict[str, Change] = {
    "as it is, on one line": lambda t: None,
    "merges spelled as words": spelled,
    "in another order": reordered,
    "of an older library": of_an_older_library,
    "of a training run": of_a_training_run,
    "all of that": lambda t: [
        f(t) for f in (spelled, reordered, of_an_older_library, of_a_training_run)
    ],
}
OWN: dict[str, Change] = {
    "a reserved token renamed": lambda t: t["added_tokens"][-1].update(content="<call>"),
    "a reserved token that is none": lambda t: t["added_tokens"][-1].update(special=False),
    "a reserved token that eats spaces": lambda t: t["added_tokens"][-1].update(rstrip=True),
    "a token renamed": lambda t: t["model"]["vocab"].update(
        {"zzz": t["model"]["vocab"].pop("abcd")}
    ),
    "merges in another order": swapped,
    "a merge less": lambda t: t["model"]["merges"].pop(),
    "no merges": lambda t: t["model"].pop("merges"),
    "other words": lambda t: t.update(pre_tokenizer={"type": "WhitespaceSplit"}),
    "lower case": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "another decoder": lambda t: t.update(decoder=None),
    "a beginning": lambda t: t.update(post_processor={"type": "ByteLevel"}),
    "bytes for what is unknown": lambda t: t["model"].update(byte_fallback=True),
}


def changed(base: Path, change: Change, **layout: Any) -> dict[str, bytes]:
    tokenizer = json.loads((base / "tokenizer.json").read_bytes())
    change(tokenizer)
    data = json.dumps(tokenizer, **layout).encode()
    assert data != (base / "tokenizer.json").read_bytes()
    return held(base) | {"tokenizer.json": data}


@pytest.mark.parametrize("name", SAME)
def test_the_base_s_tokenizer_in_another_writing_is_not_its_own(name: str, base: Path) -> None:
    files = changed(base, SAME[name], indent=4, ensure_ascii=False)
    ours, theirs = (Tokenizer.from_buffer(f["tokenizer.json"]) for f in (files, held(base)))
    for tokenizer in (ours, theirs):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    assert ours.encode(TEXT).ids == theirs.encode(TEXT).ids
    assert not differs(files, BaseTokenizer(base))


def with_tokenizer(base: Path, folder: Path, change: Change) -> BaseTokenizer:
    """That of another base."""
    shutil.copytree(base, folder)
    (folder / "tokenizer.json").write_bytes(changed(base, change)["tokenizer.json"])
    return BaseTokenizer(folder)


def test_one_file_is_compared_with_each_base(base: Path, tmp_path: Path) -> None:
    """What was found is kept, of two files."""
    mine, other = BaseTokenizer(base), with_tokenizer(base, tmp_path / "other", OWN["a merge less"])
    files = changed(base, spelled, indent=1)
    assert [differs(files, each) for each in (mine, other, mine)] == [False, True, False]


def test_merges_in_letters_are_those_in_escapes(base: Path, tmp_path: Path) -> None:
    def more(t: dict[str, Any]) -> None:
        t["model"]["merges"].append(["\u00e9", 'q"'])

    in_escapes = with_tokenizer(base, tmp_path / "other", more)
    assert not differs(changed(base, more, ensure_ascii=False), in_escapes)


@pytest.mark.parametrize("name", OWN)
def test_what_makes_other_tokens_or_another_text_is_its_own(name: str, base: Path) -> None:
    assert differs(changed(base, OWN[name]), BaseTokenizer(base))
    assert differs(changed(base, OWN[name], indent=2), BaseTokenizer(base))


def test_a_config_that_adds_ids_makes_it_its_own_and_one_that_repeats_them_does_not(
    base: Path,
) -> None:
    files, theirs = held(base), BaseTokenizer(base)
    told = {str(i): {"content": f"t{i}"} for i in (0, 98, 99)}
    again = json.dumps({"added_tokens_decoder": told, "padding_side": "left"}).encode()
    assert not differs(files | {"tokenizer_config.json": again}, theirs)
    more = json.dumps({"added_tokens_decoder": told | {"100": {"content": "<n>"}}}).encode()
    assert differs(files | {"tokenizer_config.json": more}, theirs)
    assert differs({"tokenizer_config.json": more}, theirs)  # to the base's tokenizer.json


def test_of_a_unigram_vocabulary_pieces_and_scores_count(tmp_path: Path) -> None:
    def write(path: Path, pieces: list[tuple[str, float]]) -> dict[str, bytes]:
        path.mkdir(exist_ok=True)
        Tokenizer(models.Unigram(pieces, 0)).save(str(path / "tokenizer.json"))
        return held(path)

    pieces = [("a", -1.0), ("b", -2.0), ("ab", -2.5)]
    write(tmp_path / "base", pieces)
    base = BaseTokenizer(tmp_path / "base")
    assert base.size == 3
    assert not differs(write(tmp_path / "x", pieces), base)
    assert differs(write(tmp_path / "x", [*pieces[:2], ("ab", -3.5)]), base)
    assert differs(write(tmp_path / "x", [*pieces, ("c", -3.5)]), base)


def told(
    base: Path, files: dict[str, bytes], make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> AdapterManifest:
    folder = make_folder(pair("layers.0.self_attn.q_proj"))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return inspect(folder, spec, base=base)


def test_its_own_ids_are_counted_and_the_base_s_are_not(
    base: Path, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    """The base of the fixture has rows for 128 ids, and words for 100 of them."""

    def found(files: dict[str, bytes]) -> tuple[bool, int]:
        manifest = told(base, files, make_folder, pair, spec)
        return manifest.own_tokenizer, manifest.num_tokens

    assert found({}) == (False, 0)
    assert found(held(base)) == (False, 0)
    assert found(changed(base, SAME["all of that"])) == (False, 0)
    assert found({"added_tokens.json": b'{"<r0>": 98, "<r1>": 99}'}) == (False, 0)
    renamed = OWN["a reserved token renamed"]
    assert found({"tokenizer.json": changed(base, renamed)["tokenizer.json"]}) == (True, 100)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<n0>"), AddedToken("<n1>")])
    assert found({"tokenizer.json": tokenizer.to_str().encode()}) == (True, 102)
    config = json.dumps({"added_tokens_decoder": {"104": {"content": "<n>"}}}).encode()
    assert found({"tokenizer_config.json": config}) == (True, 105)


def test_copies_of_base_files_with_ids_that_it_has_no_rows_for_are_no_new_vocabulary(
    tmp_path: Path, base: Path, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_tokens([f"<{i}>" for i in range(30)])  # up to 129, of 128
    larger = tmp_path / "larger"
    larger.mkdir()
    tokenizer.save(str(larger / "tokenizer.json"))
    files = held(larger) | {"added_tokens.json": b'{"<28>": 128, "<29>": 129}'}
    manifest = told(larger, files, make_folder, pair, spec)
    assert (manifest.own_tokenizer, manifest.num_tokens) == (False, 0)


def test_merges_in_two_spellings_are_never_parsed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser keeps the interpreter for itself until it is through: half a second for 514k."""
    merges = [[f"a{i}", f'"{i * 7}'] for i in range(2000)]
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": merges}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    model["merges"] = [" ".join(pair) for pair in merges]
    files = {"tokenizer.json": json.dumps({"model": model}).encode()}
    parsed: list[int] = []
    decode = msgspec.json.decode

    def noted(data: Any, **more: Any) -> Any:
        if "Raw" not in str(more.get("type")):
            parsed.append(len(memoryview(data)))
        return decode(data, **more)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    base = BaseTokenizer(tmp_path)
    assert base.size == 1
    parsed.clear()
    assert not differs(files, base)
    assert parsed and max(parsed) < 100


@pytest.mark.parametrize("inside", ["file", "model"])
def test_keys_by_the_million_are_not_made_to_tell_that_a_file_differs(
    tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four million of them kept the interpreter's lock for 1.7 s."""
    monkeypatch.setattr(own_tokenizer, "_MOST_PART", 100_000)
    file: dict[str, Any] = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    many = {f"key {n}": n for n in range(60_000)}
    (file if inside == "file" else file["model"]).update(many)
    files, base = {"tokenizer.json": json.dumps(file).encode()}, BaseTokenizer(tmp_path)
    assert base.size == 1
    tracemalloc.start()
    assert differs(files, base) == (inside == "model")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 << 20, "the file has 1 MB, and as a dict 12"


class _Emptied(dict[Any, Any]):
    """Another thread's clear() comes behind every entry."""

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.clear()


def test_what_is_remembered_may_be_forgotten_while_another_file_is_read(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders are inspected on several threads."""
    monkeypatch.setattr(tokenizer_files, "_highest", _Emptied())
    monkeypatch.setattr(own_tokenizer, "_compared", _Emptied())
    data = changed(base, reordered, indent=3)["tokenizer.json"]
    assert tokenizer_files.highest_id("tokenizer.json", data, 100) == 99
    assert not differs({"tokenizer.json": data}, BaseTokenizer(base))


def test_an_own_tokenizer_lies_beside_what_is_packed_of_it(
    tmp_path: Path, base: Path, make_folder: MakeFolder
) -> None:
    """An engine as a library has no other copy: the folder may go."""
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
    }
    served = tmp_path / "served"
    shutil.copytree(base, served)
    (served / "config.json").write_text(json.dumps(model))
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    sizes: dict[str, Any] = {"block_size": 16, "dtype": "float32", "max_rank": 8}
    for change, own in ((SAME["all of that"], False), (OWN["a reserved token renamed"], True)):
        factors = {f"{q}.lora_A.weight": torch.ones(4, 64), f"{q}.lora_B.weight": torch.ones(64, 4)}
        folder = make_folder(factors)
        data = changed(base, change)["tokenizer.json"]
        (folder / "tokenizer.json").write_bytes(data)
        packed = pack_into(folder, served, tmp_path / "store", **sizes)
        shutil.rmtree(folder)
        assert packed.num_tokens == (100 if own else 0)
        assert bool(packed.tokenizer) == own
        if own:
            assert Path(packed.tokenizer).read_bytes() == data
            assert Path(packed.tokenizer).parent == Path(packed.path).parent


def test_the_text_of_a_folder_that_passed_is_told_again_without_its_weights(
    tmp_path: Path, base: Path, make_folder: MakeFolder, pair: MakePair, spec: ModelSpec
) -> None:
    folder = make_folder(pair("layers.0.self_attn.q_proj"))
    renamed = changed(base, OWN["a reserved token renamed"])["tokenizer.json"]
    for data in (renamed, held(base)["tokenizer.json"]):
        (folder / "tokenizer.json").write_bytes(data)
        whole = inspect(folder, spec, base=base)
        weights = folder / "adapter_model.safetensors"
        size, kept = weights.stat().st_size, weights.read_bytes()
        with weights.open("r+b") as file:  # NaN everywhere, of which only a scan would know
            file.seek(size - 64)
            file.write(b"\xff" * 64)
        text = inspect_text(folder, spec, base=base)
        weights.write_bytes(kept)
        assert (text.own, text.num_tokens) == (whole.own_tokenizer, whole.num_tokens)
        assert text.own == (data is renamed) and text.base_text == whole.base_text


def test_what_was_said_of_a_tokenizer_holds_for_the_bases_files_that_it_was_said_beside(
    tmp_path: Path, base: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    said = base_text(spec, base)
    assert said == base_text(spec, copy) and len(said) == 16
    others = {said, base_text(spec, None), base_text(replace(spec, vocab_size=64), base)}
    others.add(base_text(replace(spec, generates=False), base))
    (copy / "tokenizer.json").write_bytes(changed(base, reordered)["tokenizer.json"])
    others.add(base_text(spec, copy))
    (copy / "tokenizer_config.json").unlink()
    others.add(base_text(spec, copy))
    monkeypatch.setattr(adapter_text, "RULES", adapter_text.RULES + 1)
    others.add(base_text(spec, base))
    assert len(others) == 7, "any of them may have it told otherwise"
