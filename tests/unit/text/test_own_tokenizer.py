"""An adapter's own tokenizer: as if it were read whole, with the base's vocabulary held once."""

import contextlib
import gc
import json
import tracemalloc

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from lorad.text import own_tokenizer, tokenizer_file
from lorad.text import tokenizer as ours
from lorad.text.own_tokenizer import OwnTokenizers
from lorad.text.tokenizer import TextError

TEXT = "the <|new|> theme, über <tool> 12 <|end|> ünder <|new|>"
MERGES = [("t", "h"), ("th", "e"), ("e", "r")]


def make(folder, *added, vocab=(), split=None, before=None):
    """A byte-level tokenizer in `folder`; a special added token is written <|...|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "th", "the", "er", *vocab]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split is not None:
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), made.pre_tokenizer]
        made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(t, special=t[1] == "|") for t in ("<|end|>", *added)])
    if before is not None:
        ids = [(before, made.token_to_id(before))]
        made.post_processor = processors.TemplateProcessing(f"{before} $A", None, ids)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@pytest.fixture
def base(tmp_path):
    return make(tmp_path / "base")


@pytest.fixture
def own(base):
    return OwnTokenizers(ours.Tokenizer.load(base), base)


def edit(folder, change, name="tokenizer.json"):
    """Change a file of JSON in place."""
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def joins(monkeypatch):
    """Grows by one where a vocabulary is the base's."""
    seen = []
    monkeypatch.setattr(
        own_tokenizer, "joined", lambda *given: seen.append(1) or tokenizer_file.joined(*given)
    )
    return seen


@pytest.mark.parametrize("before", [None, "<|new|>"])
@pytest.mark.parametrize("vocab", [(), ("re",)])
def test_it_reads_and_writes_as_the_library_does_with_the_whole_file(
    tmp_path, own, joins, vocab, before
):
    folder = make(tmp_path / "a", "<tool>", "<|new|>", vocab=vocab, before=before)
    whole = ours.Tokenizer.load(folder)
    found, _ = own.read(folder)
    assert bool(joins) == (not vocab), "which way it was read"
    for special in (True, False):
        ids = found.encode(TEXT, special)
        assert ids == whole.encode(TEXT, special)
        assert (ids[0] == found.token_id("<|new|>")) == (special and before is not None)
    assert (
        found.decode(ids) == whole.decode(ids) == TEXT.replace("<|new|>", "").replace("<|end|>", "")
    )
    assert found.decode(ids, skip_special=False) == TEXT
    facts = ("vocab_size", "special_ids", "eos_ids", "chat_stop_ids", "spelling", "specials")
    assert {name: getattr(found, name) for name in facts} == {
        name: getattr(whole, name) for name in facts
    }
    every = range(whole.vocab_size + 2)
    assert [found.token_bytes(i) for i in every] == [whole.token_bytes(i) for i in every]
    assert found.spell(every) == whole.spell(every)


def test_the_bases_tokenizer_is_as_it_was(tmp_path, own):
    before = own._base.encode(TEXT, False)
    own.read(make(tmp_path / "a", "<tool>", "<|new|>"))
    assert own._base.encode(TEXT, False) == before
    assert own._base.token_id("<tool>") is None


def test_merges_in_the_old_spelling_are_the_same_vocabulary(tmp_path, own, joins):
    folder = make(tmp_path / "a", "<tool>")

    def respell(content):
        model = content["model"]
        model["merges"] = [" ".join(m) for m in model["merges"]]
        del model["ignore_merges"], model["dropout"]

    found, _ = own.read(edit(folder, respell))
    assert joins
    assert found.encode("the<tool>", False) == [257, found.token_id("<tool>")]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model["vocab"].update(th=258, er=256),
        lambda model: model["merges"].pop(),
        lambda model: model["merges"].reverse(),
    ],
)
def test_what_another_vocabulary_says_is_never_taken_for_the_bases(tmp_path, own, change):
    folder = edit(make(tmp_path / "a"), lambda content: change(content["model"]))
    parts = [
        tokenizer_file.parts_of((f / "tokenizer.json").read_bytes(), f)
        for f in (folder, own._folder)
    ]
    assert not tokenizer_file.same_model(*(p["model"] for p in parts))
    assert own.read(folder)[0].encode(TEXT, False) == ours.Tokenizer.load(folder).encode(
        TEXT, False
    )


def test_equal_files_of_two_adapters_are_one_object_whatever_their_chat_templates(tmp_path, own):
    folders = [make(tmp_path / name, "<tool>") for name in "ab"]
    edit(folders[1], lambda c: c.update(chat_template="hi"), "tokenizer_config.json")
    (one, key), (other, same) = (own.read(folder) for folder in folders)
    assert one is other and key == same and own.get(key) is one
    third, another = own.read(make(tmp_path / "c", "<tool>", "<more>"))
    assert third is not one and another != key
    changed = edit(folders[1], lambda c: c.update(eos_token="<tool>"), "tokenizer_config.json")
    assert own.read(changed)[0].eos_ids > one.eos_ids


def test_only_so_many_bytes_are_kept_and_what_is_in_use_stays_one_object(tmp_path, base):
    own = OwnTokenizers(ours.Tokenizer.load(base), base, budget=8 << 20)
    folders = [make(tmp_path / f"a{n}", f"<t{n}>") for n in range(4)]
    used, key = own.read(folders[0])
    keys = [own.read(folder)[1] for folder in folders[1:]]
    assert own.get(key) is used, "a request has it"
    del used
    gc.collect()
    kept = [k in own._kept for k in (key, *keys)]
    assert kept == [False, False, True, True], "3 MB each"
    assert own.get(key) is None
    assert own.read(folders[0])[0].token_id("<t0>") is not None


@pytest.mark.parametrize("less", [0, 1])
def test_one_fits_beside_what_is_kept_by_the_bytes_of_its_file(tmp_path, base, less):
    folders = [make(tmp_path / name, f"<{name}>") for name in "ab"]
    most = 5 * (folders[1] / "tokenizer.json").stat().st_size
    budget = 2 * own_tokenizer._REMEMBERED_BYTES + most - less
    own = OwnTokenizers(ours.Tokenizer.load(base), base, budget=budget)
    own.read(folders[0])
    assert own.fits(folders[1]) == (not less)


def test_many_added_tokens_do_not_take_seconds(tmp_path, own):
    """One call each took the square of their number."""
    import time

    folder = make(tmp_path / "a", *(f"<t{n}>" for n in range(20_000)))
    before = time.process_time()
    found, _ = own.read(folder)
    assert found.token_id("<t19999>") == found.vocab_size - 1
    assert time.process_time() - before < 5


def replacing(*texts):
    """A normalizer that puts one for another, in turn."""
    steps = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in texts]
    return lambda c: c.update(normalizer={"type": "Sequence", "normalizers": steps})


MANY = [[]] * 200_000
SPLIT = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Isolated", "invert": False}
SPACES = [(" ", "\u2581"), ("\u2581", " ")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["added_tokens"].append({"id": 9999, "content": "<x>"}), "'<x>' at id 9999"),
        (
            lambda c: c["added_tokens"].append({"id": "1", "content": "<x>"}),
            r"added_tokens: Expected `int`",
        ),
        (lambda c: c.update(added_tokens={}), "not a tokenizer"),
        (lambda c: c.pop("model"), "it has no model"),
        (replacing(("a", "aa")), "normalizer has an expression of its own"),
        (replacing(*SPACES, SPACES[0]), "expression of its own"),
        (
            lambda c: c.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT] * 99}),
            "pre_tokenizer has .* bytes",
        ),
        (lambda c: c.update(normalizer=MANY), "normalizer has many times the values"),
        (lambda c: c["model"].update(byte_fallback=True), "another byte_fallback than the base's"),
        (lambda c: c["model"].update(continuing_subword_prefix="#" * 99), "continuing_subword"),
        (lambda c: c["model"].update(type="WordPiece"), "another type"),
        (lambda c: c.update(decoder={"type": "Unheard"}), "not a tokenizer"),
        (lambda c: c.update(model={"type": "BPE", "vocab": 3}), "not a tokenizer"),
        (lambda c: c.update(model=None), "not a tokenizer"),
        (
            lambda c: c.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [
                        {"Sequence": {"id": "A", "type_id": 0}},
                        {"Sequence": {"id": "B", "type_id": 0}},
                    ],
                    "special_tokens": {
                        "<|end|>": {"id": "<|end|>", "ids": [1 << 30], "tokens": ["<|end|>"]}
                    },
                }
            ),
            "puts token 1073741824 around texts",
        ),
    ],
)
def test_a_file_that_the_library_cannot_use_is_refused_in_a_line(tmp_path, own, change, said):
    folder = edit(make(tmp_path / "a", "<tool>"), change)
    with pytest.raises(TextError, match=said) as caught:
        own.read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(normalizer=MANY),
        lambda c: c.update({f"k{n}": n for n in range(60_000)}),
        lambda c: c["model"].update(merges=MANY),
        lambda c: c["model"].update(unheard=MANY),
        lambda c: c["added_tokens"][0].update(unheard=MANY),
        None,
    ],
)
def test_values_by_the_million_are_not_made_to_be_refused(tmp_path, base, change, monkeypatch):
    """Those of 60 MB took 1.7 GB, and kept Python's lock for 4 s."""
    monkeypatch.setattr(ours, "MOST_VALUES", 100_000)
    folder = make(tmp_path / "a", "<tool>")
    if change is not None:
        edit(folder, change)
    else:
        edit(folder, lambda c: c.update(unheard=MANY), "tokenizer_config.json")
    own = OwnTokenizers(ours.Tokenizer.load(base), base)
    tracemalloc.start()
    with contextlib.suppress(TextError):
        own.read(folder)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 << 20, "the file has 0.6 MB, and as lists 14"


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", '{"model": "\\ud800"}', "[" * 100_000])
def test_bytes_that_are_no_tokenizer_are_refused(tmp_path, own, text):
    folder = make(tmp_path / "a")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TextError, match="not a tokenizer"):
        own.read(folder)


def test_an_expression_of_its_own_is_not_run_but_the_bases_is(tmp_path):
    hostile = make(tmp_path / "a", "<tool>", split=r"(\w+\w+)+$")
    own = OwnTokenizers(ours.Tokenizer.load(make(tmp_path / "b")), tmp_path / "b")
    with pytest.raises(TextError, match="expression of its own"):
        own.read(hostile)
    base = make(tmp_path / "c", split=r"(\w+\w+)+$")
    found, _ = OwnTokenizers(ours.Tokenizer.load(base), base).read(hostile)
    assert found.token_id("<tool>") is not None


def sequence(key, kind, times=40, **more):
    return {"type": "Sequence", key: [{"type": kind, **more}] * times}


BYTES = {"add_prefix_space": True, "trim_offsets": True, "use_regex": False}
TEXTS = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
TWICE = [[TEXTS[0]] * 2, TEXTS, {}]


@pytest.mark.parametrize(
    ("part", "value", "step"),
    [
        ("normalizer", sequence("normalizers", "ByteLevel"), "ByteLevel"),
        ("pre_tokenizer", sequence("pretokenizers", "ByteLevel", **BYTES), "ByteLevel"),
        ("decoder", sequence("decoders", "BPEDecoder", suffix=""), "BPEDecoder"),
        ("post_processor", TWICE, "text again"),
        ("normalizer", [["NFC"], ["NFC"]], "not a tokenizer"),
        ("normalizer", {"normalizers": [["NFC"], ["NFC"]]}, "NFC"),
    ],
)
def test_a_step_that_the_base_lacks_is_not_run_however_it_is_written(
    tmp_path, own, part, value, step
):
    """Forty that double a text take all memory as soon as one is read."""
    folder = edit(make(tmp_path / "a", "<tool>"), lambda c: c.update({part: value}))
    with pytest.raises(TextError, match="not a tokenizer") as caught:
        own.read(folder)
    assert step in str(caught.value)


@pytest.mark.parametrize("place", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        (" ", {"rstrip": True}, "of blanks alone"),
        ("\n\u3000", {"lstrip": True}, "of blanks alone"),
        ("x" * 513, {}, "a token of 513 characters"),
    ],
)
def test_added_tokens_that_take_more_than_they_say_are_refused(
    tmp_path, own, place, content, flags, said
):
    folder = make(tmp_path / "a", "<tool>")
    config = place == "tokenizer_config.json"
    token = {"id": 261, "content": content, "lstrip": False, "rstrip": False, **flags}
    own.read(folder)

    def add(written):
        if config:
            written["added_tokens_decoder"] = {"261": token}
        else:
            written["added_tokens"].append(token)

    with pytest.raises(TextError, match=said):
        own.read(edit(folder, add, place))


def test_a_panic_of_the_library_is_an_error_of_the_text_alone(tmp_path, own):
    """As an adapter's it ended the daemon at the first token that was drawn."""

    def strip(content):
        content["decoder"] = {"type": "Strip", "content": "q", "start": 0, "stop": 3}

    broken = edit(make(tmp_path / "a", "<tool>"), strip)
    with pytest.raises(TextError, match=r"decoder has an expression of its own .*Strip"):
        own.read(broken)
    found = ours.Tokenizer.load(broken)
    with pytest.raises(TextError, match="this vocabulary fails at a text: index out of bounds"):
        found.decode(found.encode("q", False))
    assert found.decode(found.encode("x", False)) == "x"


def test_added_tokens_are_of_so_many_characters_in_all(tmp_path, own):
    many = {str(261 + n): {"content": f"<{n:0500}>"} for n in range(600)}
    folder = make(tmp_path / "a", "<tool>")
    edit(folder, lambda c: c.update(added_tokens_decoder=many), "tokenizer_config.json")
    with pytest.raises(TextError, match="added tokens of 301,2"):
        own.read(folder)


def test_a_vocabulary_of_its_own_has_no_token_of_any_length(tmp_path, own):
    own.read(make(tmp_path / "a", vocab=("x" * 512,)))
    with pytest.raises(TextError, match="a token of 513 characters"):
        own.read(make(tmp_path / "b", vocab=("x" * 513,)))


def test_blanks_of_the_bases_own_may_take_others_along(tmp_path):
    def take(content):
        content["added_tokens"][1].update(content="  ", rstrip=True)

    base = edit(make(tmp_path / "base", "<x>"), take)
    own = OwnTokenizers(ours.Tokenizer.load(base), base)
    found, _ = own.read(edit(make(tmp_path / "a", "<x>", "<tool>"), take))
    assert found.spell(found.encode("a   <tool>", False)) == ["a", "  ", "<tool>"]


def test_spaces_may_be_written_as_sentencepiece_has_them(tmp_path, own):
    found, _ = own.read(edit(make(tmp_path / "a", "<tool>"), replacing(*SPACES)))
    assert found.decode(found.encode("a b", False)) == "a b"


def sentences(folder, *added, again=False):
    """As Llama 2's; or `again`, as transformers 5 saves that."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
    ]
    vocab = {word: i for i, word in enumerate((*words, "\u2581a"))}
    unknown = {} if again else {"unk_token": "<unk>"}
    made = Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, fuse_unk=True, **unknown)
    )
    if again:
        made.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(steps)
    undo = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
    made.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([*added])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return made


def test_one_of_llama_2_that_transformers_5_saved_again_has_the_bases_vocabulary(tmp_path, joins):
    sentences(tmp_path / "base")
    own = OwnTokenizers(ours.Tokenizer.load(tmp_path / "base"), tmp_path / "base")
    again = sentences(tmp_path / "a", "<tool>", again=True)
    found, _ = own.read(tmp_path / "a")
    assert len(joins) == 1
    for text in ("a b <tool> a", "\u4e2d\x00 a", "a<s>a"):
        ids = found.encode(text, True)
        assert ids == again.encode(text).ids and found.decode(ids) == again.decode(ids)


def test_one_that_lacks_a_character_and_its_stand_in_is_refused(tmp_path):
    def with_a_stand_in(content):
        content["model"]["unk_token"] = "<none>"

    def lacking(content):
        vocab = content["model"]["vocab"]
        vocab["zz"] = vocab.pop("a")

    base = edit(make(tmp_path / "base"), with_a_stand_in)
    own = OwnTokenizers(ours.Tokenizer.load(base), base)
    folder = edit(edit(make(tmp_path / "a"), with_a_stand_in), lacking)
    with pytest.raises(TextError, match="Unk token"):
        own.read(folder)


def test_a_large_vocabulary_of_its_own_is_refused(tmp_path, own):
    folder = make(tmp_path / "a", vocab=[f"w{n}" for n in range(4000)])
    with pytest.raises(TextError, match="4 times the base's"):
        own.read(folder)


def test_a_token_that_is_listed_twice_has_its_first_place(tmp_path):
    base = make(tmp_path / "base")
    listed = {"260": {"content": "<q>"}, "261": {"content": "<r>"}, "262": {"content": "<q>"}}
    edit(base, lambda c: c.update(added_tokens_decoder=listed), "tokenizer_config.json")
    assert ours.Tokenizer.load(base).spell([260, 261, 262]) == ["<q>", "<r>", ""]
    listed["270"] = {"content": "<" + "x" * 5000 + ">"}
    edit(base, lambda c: c.update(added_tokens_decoder=listed), "tokenizer_config.json")
    with pytest.raises(TextError, match=r"lacks the token .* at id 270") as caught:
        ours.Tokenizer.load(base)
    assert len(str(caught.value)) < 400


def test_the_bases_ends_that_are_other_words_here_are_no_ends(tmp_path, own):
    assert own._base.eos_ids == {259}
    found, _ = own.read(make(tmp_path / "a", "<tool>", vocab=("hello",)))
    assert found.spell([259]) == ["hello"]
    assert found.eos_ids == {260}


def test_a_base_that_was_saved_anew_shares_nothing_until_the_next_start(tmp_path, base, joins):
    """Its file was compared, and the former vocabulary, which is in memory, read by."""
    own = OwnTokenizers(ours.Tokenizer.load(base), base)

    def swap(content):
        vocab = content["model"]["vocab"]
        vocab["the"], vocab["er"] = vocab["er"], vocab["the"]

    listed = {"added_tokens_decoder": {"260": {"content": "<tool>"}}}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps(listed))
    for folder in (base, make(tmp_path / "a", "<tool>")):
        edit(folder, swap)
    found, _ = own.read(tmp_path / "a")
    wanted = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert found.encode("the er", False) == wanted.encode("the er").ids and not joins
    with pytest.raises(ours.TextError, match="changed since the start: restart lorad"):
        own.read(tmp_path / "b")
