"""How a model is asked about two texts: decided before anything is loaded."""

import json

import pytest

from lorad import base, checks, pairs
from lorad.config_sources import load
from lorad.errors import BadConfig
from lorad.service.text import TextService
from tests.fakes.tiny_bert import write_bert
from tests.fakes.tiny_qwen3 import NO, YES, write_qwen3

ROLES = "{% for m in messages if m.role in ['query', 'document'] %}{{ m.content }};{% endfor %}"


@pytest.fixture
def decide(tmp_path):
    """decide(folder, models): the settings of a lorad.toml, and the form."""

    def decide(folder, models=""):
        (tmp_path / "etc").mkdir(exist_ok=True)
        text = f'[[models]]\nbase = "{folder}"\ndevice = "cpu"\n{models}\n'
        (tmp_path / "etc" / "lorad.toml").write_text(text)
        kinds = ("CONFIGURATION", "STATE", "RUNTIME", "CACHE")
        env = {f"{kind}_DIRECTORY": str(tmp_path / kind.lower()) for kind in kinds}
        settings = load(None, env | {"CONFIGURATION_DIRECTORY": str(tmp_path / "etc")})[0]
        root = base.folder_of(settings)
        text = TextService(root, folder_of=lambda rev: root).base
        return settings, pairs.pair_form(settings, text)

    return decide


@pytest.fixture
def qwen3(tmp_path):
    return write_qwen3(tmp_path / "qwen3")


RERANK = 'tasks = ["rerank"]\n'


def test_a_qwen3_that_reranks_answers_yes_or_no_to_its_own_form(decide, qwen3):
    settings, form = decide(qwen3, RERANK)
    assert form.words == (YES, NO) and form.asks.origin == "the form of Qwen3-Reranker"
    assert pairs.engine_config(settings, form).score_tokens == (YES, NO)
    checks.check_all(settings)


def test_who_does_not_rerank_needs_no_words(decide, qwen3, tmp_path):
    settings, form = decide(qwen3, 'tasks = ["embed"]')
    assert form == pairs.PairForm()
    assert pairs.engine_config(settings, form) == settings.pooling_config()
    settings, form = decide(qwen3)
    assert form == pairs.PairForm()
    assert pairs.engine_config(settings, form) == settings.engine_config()
    assert decide(write_bert(tmp_path / "bert", labels=1))[1] == pairs.PairForm()


def test_words_are_the_operators_to_name_and_one_token_each(decide, qwen3):
    assert decide(qwen3, RERANK + 'score_words = ["no", "yes"]')[1].words == (NO, YES)
    assert decide(qwen3, RERANK + 'score_words = ["y"]')[1].words == (ord("y") - 33,)
    with pytest.raises(BadConfig, match="score_words: 'maybe' is 5 tokens"):
        decide(qwen3, RERANK + 'score_words = ["maybe", "no"]')
    with pytest.raises(BadConfig, match=r"models\.score_words: a word that an answer"):
        decide(qwen3, RERANK + "score_words = []")


def test_files_that_name_the_words_are_believed(decide, qwen3):
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_L", "type": "x.LogitScore"}]
    (qwen3 / "1_L").mkdir()
    (qwen3 / "modules.json").write_text(json.dumps(modules))
    (qwen3 / "1_L" / "config.json").write_text(json.dumps({"true_token_id": 7}))
    settings, form = decide(qwen3)
    assert settings.models[0].tasks == ("rerank",) and form.words == () and form.asks is not None
    checks.check_all(settings)


def test_the_models_own_template_comes_first_and_a_file_before_it(decide, qwen3, tmp_path):
    (qwen3 / "chat_template.jinja").write_text(ROLES)
    form = decide(qwen3, RERANK)[1]
    assert form.asks.ask("a", "b").text == "a;b;" and not form.asks.takes_instruction
    assert decide(qwen3, 'tasks = ["embed", "classify"]')[1].asks is not None
    path = tmp_path / "own.jinja"
    path.write_text(ROLES.replace(";", "!"))
    own = decide(qwen3, RERANK + f'pair_template = "{path}"')[1]
    assert own.asks.ask("a", "b").text == "a!b!"
    named = decide(qwen3, RERANK + 'pair_template = "qwen3-reranker"')[1]
    assert named.asks.origin == "the form of Qwen3-Reranker"
    assert decide(qwen3, RERANK + 'pair_template = "tokenizer"')[1].asks is None
    with pytest.raises(BadConfig, match=r"models\.pair_template: .* cannot be read.*lorad\.toml"):
        decide(qwen3, RERANK + 'pair_template = "/nowhere.jinja"')


def test_a_decoder_that_nobody_knows_how_to_ask_is_refused(decide, qwen3):
    config = json.loads((qwen3 / "config.json").read_text())
    changed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (qwen3 / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(BadConfig, match="nothing says in which words") as caught:
        decide(qwen3, RERANK)
    assert "roles query and document" in caught.value.hint
    classifier = changed | {"architectures": ["LlamaForSequenceClassification"]}
    told = {"id2label": {"0": "fits"}}
    (qwen3 / "config.json").write_text(json.dumps(config | classifier | told))
    assert decide(qwen3)[1] == pairs.PairForm()  # it reads its tokenizer's own pair
    assert decide(qwen3, 'pair_template = "qwen3-reranker"')[1].asks is not None


def test_an_encoder_is_not_asked_in_words(decide, tmp_path):
    folder = write_bert(tmp_path / "bert", labels=1)
    with pytest.raises(BadConfig, match="an encoder reads its tokenizer's own form"):
        decide(folder, 'pair_template = "qwen3-reranker"')
