"""An adapter with tokens, chat template and end token of its own, beside another and the base,
against transformers and PEFT."""

import shutil
import sqlite3
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from tokenizers import Tokenizer

from lorad import wire
from lorad.client import ApiError
from tests.integration.daemon.conftest import until, write_adapter

pytestmark = pytest.mark.late

TEMPLATE = "{% for m in messages %}<tool>{{ m.content }}<note>{% endfor %}"
MESSAGES = [{"role": "user", "content": "a <note> of mine"}]
#: Behind the base's 260 rows, of which its tokenizer has 258.
TOOL, NOTE, MORE, DONE, SIZE = 258, 259, 260, 261, 262


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """Its folder as PEFT and transformers write it, and both to ask."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tuned")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_tokens(["<tool>", "<note>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>", "<|done|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|done|>", TEMPLATE
    assert tokenizer.convert_tokens_to_ids(["<tool>", "<note>", "<|done|>"]) == [TOOL, NOTE, DONE]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        model = LlamaForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(SIZE, mean_resizing=False)
        with torch.no_grad():
            for end in (model.get_input_embeddings(), model.get_output_embeddings()):
                end.weight[258:].normal_(0, 0.2)
                end.weight[[TOOL, NOTE]] *= 3  # drawn now and then
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        made = get_peft_model(model, config)
        made.save_pretrained(folder, save_embedding_layers=True)
        tokenizer.save_pretrained(folder)
        fresh = LlamaForCausalLM.from_pretrained(base)
        fresh.resize_token_embeddings(SIZE, mean_resizing=False)
        loaded = PeftModel.from_pretrained(fresh, folder).eval()

    def generate(ids, count, **more):
        given = torch.tensor([ids])
        with torch.no_grad():
            out = loaded.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=[257, DONE],
                **more,
            )
        return out[0, len(ids) :].tolist()

    return SimpleNamespace(folder=folder, tokenizer=tokenizer, generate=generate)


def post(daemon, path, status=200, **body):
    with daemon.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(daemon, model, count=24, **more):
    body = {"model": model, "messages": MESSAGES, "max_tokens": count, "temperature": 0, **more}
    return post(daemon, "/v1/chat/completions", **body)["choices"][0]


def upload(daemon, folder, **start):
    with daemon.client() as client:
        return client.upload(folder, wire.UploadStart(name="tools", **start))


def test_its_tokens_are_read_drawn_and_written(make_daemon, tuned, tmp_path):
    daemon = make_daemon()
    config = daemon.config.read_text()
    daemon.config.write_text(config.replace("slots", "extra_vocab = 1\nslots"))
    daemon.start()
    with pytest.raises(ApiError) as refused:
        upload(daemon, tuned.folder)
    assert refused.value.details["reason"] == "E_VOCAB_RESIZED"
    assert "extra_vocab` = 64 (2 or more)" in refused.value.hint
    assert daemon.stop() == 0
    daemon.config.write_text(config)  # 256 unless told
    daemon.start()
    upload(daemon, tuned.folder)
    daemon.upload("bible", 1)

    # Text in: as transformers reads it, and the base by its own.
    ids = tuned.tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert {TOOL, NOTE} <= set(ids)
    said = post(daemon, "/tokenize", model="tools", messages=MESSAGES, return_token_strs=True)
    assert said["tokens"] == ids and said["token_strs"][0] == "<tool>"
    back = post(daemon, "/detokenize", model="tools", tokens=[TOOL, DONE])
    assert back["prompt"] == "<tool><|done|>"
    assert len(post(daemon, "/tokenize", model="tiny", prompt="<tool>")["tokens"]) == 6

    # Text out: alone, and with others in its batch, each of another vocabulary.
    wanted = tuned.generate(ids, 24)
    assert not {TOOL, NOTE}.isdisjoint(wanted)
    told = tuned.tokenizer.decode(wanted, skip_special_tokens=True)
    alone = {model: chat(daemon, model)["message"]["content"] for model in ("bible", "tiny")}
    with ThreadPoolExecutor(6) as pool:
        models = ["tools", "bible", "tiny"] * 2
        answers = list(pool.map(lambda model: chat(daemon, model, n=2), models))
    for model, answer in zip(models, answers, strict=True):
        assert answer["message"]["content"] == (told if model == "tools" else alone[model])

    # What it draws may be new, is in log-probabilities, and stops where it is told.
    prompt = {"model": "tools", "prompt": ids, "temperature": 0, "max_tokens": 4}
    drawn = post(daemon, "/v1/completions", **prompt, logit_bias={str(TOOL): 100}, logprobs=2)
    assert drawn["choices"][0]["text"] == "<tool>" * 4
    assert drawn["choices"][0]["logprobs"]["tokens"] == ["<tool>"] * 4
    bias = {str(MORE): 100}
    for skip, text in ((True, ""), (False, "<|more|>" * 4)):
        body = {**prompt, "logit_bias": bias, "skip_special_tokens": skip}
        assert post(daemon, "/v1/completions", **body)["choices"][0]["text"] == text
    bias = {str(NOTE): 100}
    stopped = post(daemon, "/v1/completions", **prompt, logit_bias=bias, stop=["note"])
    assert stopped["choices"][0]["text"] == "<" and stopped["choices"][0]["finish_reason"] == "stop"

    # A form of answer is followed in its own vocabulary.
    form = {"structured_outputs": {"grammar": 'start: <tool> "ok"'}, "max_tokens": 9}
    followed = post(daemon, "/v1/completions", **{**prompt, **form}, logprobs=0)["choices"][0]
    assert (followed["text"], followed["finish_reason"]) == ("<tool>ok", "stop")

    # Its own end ends its answers, of both kinds.
    ended = post(daemon, "/v1/completions", **prompt, logit_bias={str(DONE): 100})
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    bias, shown = {str(DONE): 100}, {"skip_special_tokens": False}
    ended = post(daemon, "/v1/completions", **prompt, logit_bias=bias, **shown)
    assert ended["choices"][0]["text"] == "", "an end is no part of the text"
    assert chat(daemon, "tools", logit_bias={str(DONE): 100})["finish_reason"] == "stop"

    # Ids are checked for whom they are.
    for model, size in (("tools", SIZE), ("bible", 260), ("tiny", 260)):
        body = {"model": model, "max_tokens": 1}
        for wrong in ({"prompt": [size]}, {"prompt": "a", "logit_bias": {str(size): 1}}):
            error = post(daemon, "/v1/completions", 400, **body, **wrong)["error"]
            assert f"token id {size} is outside the vocabulary of {size}" in error["message"]
        post(daemon, "/v1/completions", **body, prompt=[size - 1])
    with daemon.client() as client:
        revision = client.adapter("tools").serving
        [verified] = client.verify("tools").items
    assert (revision.num_tokens, revision.own_tokenizer, revision.extra_tokens) == (SIZE, True, 2)
    assert verified.ok and verified.modules, verified

    # A tokenizer that changed is another revision, whose text is for requests from then on.
    other = tmp_path / "other"
    shutil.copytree(tuned.folder, other)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"<tool>"', '"<fool>"'))
    (other / "chat_template.jinja").write_text(TEMPLATE.replace("<tool>", "<fool>"))
    added = upload(daemon, other, replace=True)
    assert added.replaced_rev == revision.rev != added.rev
    drawn = post(daemon, "/v1/completions", **prompt, logit_bias={str(TOOL): 100})
    assert drawn["choices"][0]["text"] == "<fool>" * 4
    assert post(daemon, "/tokenize", model="tools", messages=MESSAGES)["tokens"] == ids
    again = tuned.generate(ids, 24)
    assert chat(daemon, "tools")["message"]["content"] == tuned.tokenizer.decode(
        again, skip_special_tokens=True
    ).replace("<tool>", "<fool>")

    # Without its room it is not served, and nothing is lost.
    assert daemon.stop() == 0
    daemon.config.write_text(config.replace("slots", "extra_vocab = 0\nslots"))
    daemon.start()
    refused = daemon.ask("tools", 2)
    assert refused.status_code == 404 and "262 tokens" in refused.json()["error"]["message"]
    with daemon.client() as client:
        [told] = client.load("tools").items
    assert told.code == "adapter_invalid" and "extra_vocab" in told.hint
    assert daemon.text("bible", 2)
    assert daemon.stop() == 0
    daemon.config.write_text(config)
    daemon.start()
    assert post(daemon, "/v1/completions", **prompt, logit_bias={str(TOOL): 100}) == {
        **drawn,
        **{key: ANY for key in ("id", "created")},
    }
    # Both starts that found it registered have read its tokenizer before they were ready.
    told = [line for line in daemon.log.read_text().splitlines() if "tokenizers of" in line]
    assert len(told) == 2 and all("tokenizers of adapters: 1 read in" in line for line in told)
    assert daemon.stop() == 0


def test_a_start_finds_whose_tokenizer_adapters_have_that_were_registered_beside_another_bases(
    make_daemon, base, tmp_path
):
    """They were read by the base's, and a copy of its former one by its new one, without a word."""
    daemon = make_daemon()
    served = tmp_path / "served"
    shutil.copytree(base, served)
    daemon.config.write_text(daemon.config.read_text().replace(str(base), str(served)))
    folder = write_adapter(tmp_path / "copy", 1)
    shutil.copy(base / "tokenizer.json", folder)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_tokens(["<tool>"])  # its id has a row that no word of the base is on
    tokenizer.save(str(write_adapter(tmp_path / "own", 3) / "tokenizer.json"))
    daemon.start()
    with daemon.client() as client:
        client.upload(folder, wire.UploadStart(name="copy"))
        client.upload(write_adapter(tmp_path / "bare", 2), wire.UploadStart(name="bare"))
        client.upload(tmp_path / "own", wire.UploadStart(name="own"))
        assert not client.adapter("copy").serving.own_tokenizer
    ids = post(daemon, "/tokenize", model="copy", prompt="a b")["tokens"]
    assert daemon.stop() == 0
    registry = sqlite3.connect(daemon.root / "state" / "registry.db")
    with registry:  # as schema 4 left it
        unknown = "num_tokens = 0, own_tokenizer = 0, base_text = ''"
        registry.execute(f"UPDATE revisions SET {unknown}")
    registry.close()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_tokens(["a b"])
    tokenizer.save(str(served / "tokenizer.json"))
    daemon.start()
    assert post(daemon, "/tokenize", model="copy", prompt="a b")["tokens"] == ids
    for model in ("bare", "tiny"):
        assert post(daemon, "/tokenize", model=model, prompt="a b")["tokens"] == [258]
    assert post(daemon, "/tokenize", model="own", prompt="<tool>")["tokens"] == [258]
    bias = {"logit_bias": {"258": 100}, "max_tokens": 2, "prompt": "a"}
    drawn = {m: post(daemon, "/v1/completions", model=m, **bias) for m in ("own", "tiny")}
    assert drawn["own"]["choices"][0]["text"] == "<tool>" * 2
    assert drawn["tiny"]["choices"][0]["text"] == "a b" * 2
    with daemon.client() as client:
        until(lambda: client.adapter("copy").serving.own_tokenizer, "it to be known")
        assert not client.adapter("bare").serving.own_tokenizer
    found = [event for event in daemon.events() if event.type == "adapter.tokenizer"]
    assert sorted(event.name for event in found) == ["copy", "own"]
    assert daemon.stop() == 0


def test_a_model_that_makes_vectors_too_reads_each_adapters_inputs_by_its_own_tokenizer(
    make_daemon, base, tuned
):
    """They were refused, whatever the adapter's tokenizer had to do with the input."""
    daemon = make_daemon()
    config = daemon.config.read_text()
    tasks = f'base = "{base}"\ntasks = ["generate", "embed"]'
    daemon.config.write_text(config.replace(f'base = "{base}"', tasks))
    daemon.start()
    upload(daemon, tuned.folder)
    daemon.upload("bible", 1)
    text = "a <note> of mine"

    def vector(model, given):
        [item] = (told := post(daemon, "/v1/embeddings", model=model, input=[given]))["data"]
        return item["embedding"], told["usage"]["prompt_tokens"]

    ids = tuned.tokenizer(text)["input_ids"]
    assert NOTE in ids and vector("tools", text) == vector("tools", ids)
    assert vector("tools", text)[1] == len(ids)
    assert vector("bible", text)[1] == vector("tiny", text)[1] == len(text)
    assert daemon.stop() == 0
