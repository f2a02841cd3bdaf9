"""A revision with a vocabulary of its own: its text, its ends, its checks; and nobody else's."""

import asyncio
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.messages import SamplingParams
from lorad.errors import LoradError
from lorad.service import guides
from lorad.service import text as text_module
from lorad.service.ask import Ask, Format
from lorad.service.plan import plan
from lorad.service.prompts import ends_of
from lorad.service.seams import OwnVocabulary
from lorad.service.text import TextService
from lorad.text import templates
from tests.unit.service.conftest import INFO

#: Of the base: 256 bytes, then these.
END, TURN = 256, 257
MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"


def write(folder, *added, words=(), config=None, template=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate((*alphabet, *words))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(t, special=t[1] == "|") for t in ("<|end|>", "<|im_end|>", *added)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def service(tmp_path):
    """`service.known[rev]` is what the registry knows of a revision."""
    specials = {"eos_token": "<|end|>", "bos_token": "<|s|>"}
    base = write(tmp_path / "base", config=specials, template=TEMPLATE)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    known = {}
    service = TextService(base, lambda rev: tmp_path / rev, known.get)
    service.known = known
    return service


def own(num_tokens, own_tokenizer=True):
    return SimpleNamespace(num_tokens=num_tokens, own_tokenizer=own_tokenizer)


def ask(chat=False, **sampling):
    return Ask(
        model="m",
        chat=chat,
        prompts=((1, 2),),
        sampling=SamplingParams(max_tokens=1, **sampling),
    )


def info(**facts):
    from msgspec.structs import replace

    return replace(INFO, vocab_size=300, eos_token_ids=(END,), max_model_len=64, **facts)


def test_new_tokens_are_read_and_written_by_their_adapter_alone(service, tmp_path):
    write(tmp_path / "r1", "<tool>")
    service.known["r1"] = own(259)
    text, base = service("r1"), service(None)
    assert text.encode("a<tool>", add_special=False)[-1] == 258 == text.num_tokens - 1
    assert text.decode([258, 65]) == "<tool>" + base.decode([65])
    assert text.spell([258]) == ["<tool>"] and text.token_bytes(258) == b"<tool>"
    assert len(base.encode("<tool>", add_special=False)) == 6 and base.spell([258]) == [""]
    assert text.detokenizers(())(()).push([258]).text == "<tool>"
    assert text.vocabulary.path == tmp_path / "r1" / "tokenizer.json"
    assert (base.num_tokens, base.vocabulary) == (0, None)


def test_special_tokens_are_text_where_they_are_asked_for(service, tmp_path):
    write(tmp_path / "r1", "<|tool|>", "<|note|>")
    service.known["r1"] = own(260)
    text = service("r1")

    def told(**which):
        return text.detokenizers((), **which)(()).push([258, 65, 259]).text

    assert told() == told(shown=("<|nowhere|>",)) == text.decode([65])
    assert told(skip_special=False) == text.decode([258, 65, 259], skip_special=False)
    assert told(shown=("<|tool|>",)) == "<|tool|>" + text.decode([65])


def test_what_the_registry_does_not_know_as_its_own_is_the_bases(service, tmp_path):
    write(tmp_path / "r1", "<tool>")
    for service.known["r1"] in (own(0, False), own(200, False)):
        service.forget("r1")
        text = service("r1")
        assert text.tokenizer is service.base.tokenizer and text.vocabulary is None
        assert text.num_tokens == service.known["r1"].num_tokens


def test_equal_tokenizers_are_held_once_and_read_again_when_they_had_to_go(service, tmp_path):
    for rev in ("r1", "r2"):
        write(tmp_path / rev, "<tool>")
        service.known[rev] = own(259)
    assert service("r1").tokenizer is service("r2").tokenizer
    assert service("r1").vocabulary.key == service("r2").vocabulary.key
    kept = service.tokenizers
    with kept._lock:
        kept._kept.clear()
    assert not kept._alive, "a revision that is known holds no tokenizer"
    assert service("r1").encode("<tool>", add_special=False) == [258]


def test_the_registry_is_asked_once_of_each_of_many_plain_revisions(service, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "CACHED", 2)
    asked = []
    counted = TextService(tmp_path / "base", lambda rev: tmp_path / rev, asked.append)
    for n in range(6):
        (tmp_path / f"r{n}").mkdir()
    for _ in range(3):
        for n in range(6):
            counted(f"r{n}")
    assert len(asked) == 6
    for n in range(3):
        (tmp_path / f"t{n}").mkdir()
        (tmp_path / f"t{n}" / "chat_template.jinja").write_text(f"{n}")
        counted(f"t{n}")
    counted("t0")
    assert asked[6:] == ["t0", "t1", "t2", "t0"], "templates are few"


def test_equal_templates_are_compiled_once_whosever_they_are(service, tmp_path, monkeypatch):
    monkeypatch.setattr(service._templates, "_most", 2)
    made, make = [], templates.ChatTemplate
    monkeypatch.setattr(templates, "ChatTemplate", lambda *a: made.append(a) or make(*a))
    for n in range(4):
        write(tmp_path / f"r{n}", config={"bos_token": "<|two|>"}, template="{{ bos_token }}!")
        write(tmp_path / f"base{n}", config={"eos_token": "<|end|>"}, template=TEMPLATE)
        write(tmp_path / f"mine{n}", config={"bos_token": "<|two|>"})
    for _ in range(2):
        for n in range(4):
            assert service(f"r{n}").render(MESSAGES, {}) == "<|two|>!"
            assert service(f"base{n}").template is service.base.template
            assert service(f"mine{n}").render(MESSAGES, {}) == "<|two|>Hi<|end|>"
    assert len(made) == 2


def test_requests_that_come_together_read_a_tokenizer_once(service, tmp_path, monkeypatch):
    made, make = [], service.tokenizers._make
    monkeypatch.setattr(
        service.tokenizers, "_make", lambda files: made.append(files.path) or make(files)
    )
    for n in range(4):
        write(tmp_path / f"r{n}", "<tool>")
        service.known[f"r{n}"] = own(259)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(service, [f"r{n % 4}" for n in range(32)]))
    assert len(made) == 1 and len({id(text.tokenizer) for text in texts}) == 1


def test_its_own_end_ends_answers_of_both_kinds(service, tmp_path):
    write(tmp_path / "r1", "<|stop|>", config={"eos_token": "<|stop|>"})
    service.known["r1"] = own(259)
    text = service("r1")
    assert ends_of(ask(), text, info()) == {END, 258}
    assert ends_of(ask(chat=True), text, info()) == {END, TURN, 258}
    assert ends_of(ask(ignore_eos=True, stop_token_ids=(7,)), text, info()) == {7}
    base = service(None)
    assert ends_of(ask(), base, info()) == {END}
    assert ends_of(ask(chat=True), base, info()) == {END, TURN}


def test_an_end_of_its_own_needs_no_tokenizer_of_its_own(service, tmp_path):
    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    service.known["r1"] = own(0, False)
    assert ends_of(ask(), service("r1"), info()) == {END, TURN}
    assert service("r1").tokenizer is service.base.tokenizer


def test_the_bases_template_writes_its_special_tokens(service, tmp_path):
    write(tmp_path / "r1", config={"bos_token": "<|mine|>"})
    service.known["r1"] = own(258, False)
    assert service("r1").render(MESSAGES, {}) == "<|mine|>Hi<|end|>"
    assert service(None).render(MESSAGES, {}) == "<|s|>Hi<|end|>"
    write(tmp_path / "r2", config={"bos_token": "<|two|>"}, template="{{ bos_token }}!")
    assert service("r2").render(MESSAGES, {}) == "<|two|>!"


def test_an_end_of_the_base_that_is_a_word_of_its_own_does_not_end_its_answers(service, tmp_path):
    write(tmp_path / "r1", words=("hello",))
    service.known["r1"] = own(259)
    text = service("r1")
    assert text.spell([END, END + 1]) == ["hello", "<|end|>"]
    ends = ends_of(ask(), text, info())
    assert ends == {END + 1}
    [params] = plan(ask(), [(1, 2)], info(), ends, 9, text.num_tokens)
    assert params.ignore_eos and params.stop_token_ids == (END + 1,)
    [params] = plan(ask(), [(1, 2)], info(), ends_of(ask(), service(None), info()), 9)
    assert not params.ignore_eos and params.stop_token_ids == ()
    assert text.vocabulary.ends == (END + 1,)


def test_a_stop_token_that_is_named_stops_one_that_ignores_the_end(service):
    asked = ask(ignore_eos=True, stop_token_ids=(END,))
    [params] = plan(asked, [(1, 2)], info(), ends_of(asked, service(None), info()), 9)
    assert params.ignore_eos and params.stop_token_ids == (END,)


@pytest.mark.parametrize("size", [0, 259, 310])
@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("logit_bias", lambda token: {"logit_bias": {token: 1.0}}),
        ("stop_token_ids", lambda token: {"stop_token_ids": (token,)}),
        ("allowed_token_ids", lambda token: {"allowed_token_ids": (token,)}),
        ("prompt", None),
    ],
)
def test_ids_are_held_against_the_vocabulary_of_the_revision(size, param, sampling):
    limit = size or 300

    def planned(token):
        asked, prompt = ask(**(sampling(token) if sampling else {})), (1, 2)
        if sampling is None:
            prompt = (1, token)
            asked = dataclasses.replace(asked, prompts=(prompt,))
        return plan(asked, [prompt], info(), frozenset((END,)), 9, size)

    assert planned(limit - 1)
    with pytest.raises(LoradError, match=f"{param}: token id {limit} .* vocabulary of {limit}$"):
        planned(limit)


def test_a_prompt_that_no_context_holds_is_refused_before_its_ids_are_looked_at():
    prompt = (1,) * info().max_model_len + (-1,)
    asked = dataclasses.replace(ask(), prompts=(prompt,))
    with pytest.raises(LoradError, match="the context holds"):
        plan(asked, [prompt], info(), frozenset((END,)), 9)


def test_a_tokenizer_that_went_bad_is_an_error_and_never_the_bases(service, tmp_path):
    folder = write(tmp_path / "r1", "<tool>")
    service.known["r1"] = own(259)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoradError, match="tokenizer cannot be used") as caught:
        service("r1")
    assert caught.value.status == 400
    assert str(tmp_path) not in str(caught.value), "a path of this host is told to a client"


def test_a_client_is_told_of_the_bases_files_as_such_and_not_where_they_lie(service, tmp_path):
    listed = {"added_tokens_decoder": {"999": {"content": "<tool>"}}}
    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))
    service.known["r1"] = own(1000)
    with pytest.raises(
        LoradError, match=r"used: the base's tokenizer\.json lacks the token '<tool>'"
    ):
        service("r1")
    (tmp_path / "base" / "tokenizer.json").unlink()
    write(folder, "<tool>")
    with pytest.raises(
        LoradError, match=r"used: the base's tokenizer\.json cannot be read"
    ) as caught:
        service("r1")
    assert str(tmp_path) not in str(caught.value) and caught.value.status == 400


@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_half_a_character_as_a_special_token_is_an_error_in_a_line(
    service, tmp_path, own_tokenizer
):
    write(tmp_path / "r1", "<tool>", config={"eos_token": "\ud800"})
    service.known["r1"] = own(259, own_tokenizer)
    with pytest.raises(LoradError, match=r"tokenizer cannot be used: .*surrogate") as caught:
        service("r1")
    assert caught.value.status == 400


class Checker:
    """In place of the grammar process."""

    def __init__(self, path, vocab_size, ends):
        self.path, self.size, self.ends = path, vocab_size, tuple(ends)
        self.closed, self.asked = False, []

    def check(self, grammar):
        self.asked.append(grammar)

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    """All the checkers, as they are made."""
    made = []
    monkeypatch.setattr(guides, "GrammarChecker", lambda *a: made.append(Checker(*a)) or made[-1])
    return made


def vocabularies(tmp_path):
    return [OwnVocabulary(tmp_path / f"{n}.json", bytes([n]) * 32, (n,)) for n in range(4)]


def test_a_grammar_checker_is_not_closed_while_somebody_uses_it(made, tmp_path):
    desk, facts = guides.Guides(tmp_path), info(extra_vocab=16)
    first, *others = vocabularies(tmp_path)
    with desk._checking(facts, first) as used:
        for own in others:
            with desk._checking(facts, own):
                pass
        assert not used.closed and [c.closed for c in made[1:]] == [True, True, False]
    desk.close()


def test_each_vocabulary_has_its_grammar_checker_and_few_are_kept(made, tmp_path):
    desk, facts = guides.Guides(tmp_path), info(extra_vocab=16)
    words = vocabularies(tmp_path)

    async def follow(own=None, word="a"):
        asked = Format("choice", f'["{word}"]', "structured_outputs")
        return await desk.grammar(asked, facts, own=own)

    async def scenario():
        await follow()
        await follow(words[0])
        await follow(words[0])  # known
        copy = dataclasses.replace(words[0], path=tmp_path / "copy.json")
        await follow(copy, "b")
        assert [(c.size, c.ends, len(c.asked)) for c in made] == [(300, (END,), 1), (316, (0,), 2)]
        assert made[1].path == copy.path, "the first one's file may be gone"
        for own in words[1:]:
            await follow(own)
        assert [c.closed for c in made] == [False, True, True, False, False]
        await follow(None, "c")
        assert len(made[0].asked) == 2, "the base's stays"
        desk.close()
        assert all(c.closed for c in made)

    asyncio.run(scenario())
