"""What a model is for: found from its files, told, and held against its settings."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.config import PoolsToo
from lorad import base, checks
from lorad.config_sources import load
from lorad.errors import BadConfig
from lorad.pairs import engine_config, pair_form
from lorad.service.text import TextService
from tests.fakes.tiny_bert import LENGTH, write_bert
from tests.fakes.tiny_qwen3 import NO, YES, write_qwen3


@pytest.fixture
def configure(tmp_path):
    """configure(folder, models, rest): the settings of a lorad.toml."""

    def configure(folder, models="", rest=""):
        (tmp_path / "etc").mkdir(exist_ok=True)
        text = f'[[models]]\nbase = "{folder}"\ndevice = "cpu"\n{models}\n{rest}'
        (tmp_path / "etc" / "lorad.toml").write_text(text)
        kinds = ("CONFIGURATION", "STATE", "RUNTIME", "CACHE")
        env = {f"{kind}_DIRECTORY": str(tmp_path / kind.lower()) for kind in kinds}
        return load(None, env | {"CONFIGURATION_DIRECTORY": str(tmp_path / "etc")})[0]

    return configure


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize(
    "files, tasks",
    [
        ({}, ("embed",)),
        ({"pooling": "mean"}, ("embed",)),
        ({"labels": 3}, ("classify",)),
        ({"labels": 1}, ("rerank", "classify")),
    ],
)
def test_an_encoder_pools_by_what_its_files_hold(configure, tmp_path, files, tasks):
    settings = configure(write_bert(tmp_path / "bert", **files))
    assert settings.models[0].tasks == tasks and settings.models[0].pools
    checks.check_all(settings)


def test_every_other_model_generates_unless_it_is_said(configure, llama):
    assert configure(llama).models[0].tasks == ("generate",)
    assert not configure(llama).models[0].pools
    assert configure(llama, 'tasks = ["embed"]').models[0].pools


def test_a_classifier_that_sentence_transformers_saved_is_one_all_the_same(configure, tmp_path):
    folder = write_bert(tmp_path / "bert", labels=1)
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "x.Transformer"}]))
    told = {"transformer_task": "sequence-classification"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(told))
    settings = configure(folder)
    assert settings.models[0].tasks == ("rerank", "classify")
    checks.check_all(settings)


def test_a_sentence_transformers_folder_pools_whatever_its_model(configure, llama):
    (llama / "modules.json").write_text("[]")
    assert configure(llama).models[0].tasks == ("embed",)


def test_settings_reach_the_engine_by_its_names(configure, tmp_path):
    settings = configure(
        write_bert(tmp_path / "bert"),
        'max_model_len = 48\ntruncate = true\npooling = "cls"\nmax_batch_tokens = 99\nthreads = 1\n'
        "graph_tokens = 64",
        '[lora]\nslots = 7\nadapter_pool = "3MiB"\nram_cache = "2MiB"\nthrash_window = "9s"',
    )
    config = settings.process_config()
    assert config == settings.pooling_config()
    assert (config.max_length, config.truncate, config.pooling) == (48, True, "cls")
    assert (config.max_batch_tokens, config.threads, config.device) == (99, 1, "cpu")
    assert config.graph_tokens == 64
    assert (config.slots, config.adapter_pool, config.ram_cache) == (7, 3 << 20, 2 << 20)
    assert config.thrash_window == 9.0 and config.verify_on_load == "sample"


def test_inputs_of_a_step_are_the_engines_to_choose_unless_told(configure, tmp_path):
    folder = write_bert(tmp_path / "bert")
    assert configure(folder).pooling_config().max_num_seqs == 256
    assert configure(folder, "max_num_seqs = 64").pooling_config().max_num_seqs == 64


@pytest.mark.parametrize(
    "models, rest, told",
    [
        ('tasks = ["generate", "embed"]', "", "models.tasks: the base is an encoder, which gen"),
        ("pooled_tokens = 9", "", "models.pooled_tokens: only a model that does both has it"),
        ('tasks = ["embed", "sing"]', "", "models.tasks: 'sing' is none of generate, embed,"),
        ('tasks = ["generate"]', "", "models.tasks: the base is an encoder, which generates"),
        ("beside_generators = -0.1", "", "models.beside_generators: 0 (auto), or up to 1"),
        ("beside_generators = 1.5", "", "models.beside_generators: 0 (auto), or up to 1"),
        ("num_blocks = 9", "", "models.num_blocks: only a model that generates has it"),
        ("graph_tokens = 1025", "", "models.graph_tokens = 1025: must be 0 (no graphs) to 1024"),
        ('speculation = "ngram"', "", "models.speculation: only a model that generates has it"),
        ('draft_model = "/m"', "", "models.draft_model: only a model that generates has it"),
        ('cpu_pool = "1GiB"', "", "models.cpu_pool: only a model that generates has it"),
        ("", '[lora]\nkv_floor = "1MiB"', "lora.kv_floor: only a model that generates has it"),
        ("", "[lora]\nextra_vocab = 2", "lora.extra_vocab: only a model that generates has it"),
        ("", '[lora]\nadapter_pool = "1KiB"', "lora.adapter_pool = 1024: must be 1 MiB or more"),
        (f"max_model_len = {LENGTH + 1}", "", f"models.max_model_len = {LENGTH + 1} is above"),
        ('pooling = "step"', "", "models.pooling = step: expected one of auto, cls, last,"),
    ],
)
def test_what_an_encoder_cannot_be_told_is_refused_in_one_line(
    configure, tmp_path, models, rest, told
):
    folder = write_bert(tmp_path / "bert")
    with pytest.raises(BadConfig) as caught:
        checks.check_all(configure(folder, models, rest))
    assert told in caught.value.message and "\n" not in caught.value.message


def test_only_a_model_that_does_nothing_else_gives_way_to_generators(configure, tmp_path, llama):
    folder = write_bert(tmp_path / "bert")
    assert configure(folder, "beside_generators = 0.5").models[0].beside_generators == 0.5
    for told in ("", 'tasks = ["generate", "embed"]'):
        with pytest.raises(BadConfig, match="beside_generators: only a model that only pools has"):
            configure(llama, f"{told}\nbeside_generators = 0.5")


@pytest.mark.parametrize(
    "models, rest, key",
    [
        ("truncate = true", "", "models.truncate"),
        ('pooling = "cls"', "", "models.pooling"),
        ('prefix_cache = "off"', "", "models.prefix_cache"),
        ("", '[lora]\nadapter_pool = "8MiB"', "lora.adapter_pool"),
    ],
)
def test_what_only_pooling_models_have_is_refused_elsewhere(configure, llama, models, rest, key):
    with pytest.raises(BadConfig, match=f"{key}: only a model that pools has it") as caught:
        configure(llama, models, rest)
    assert "lorad.toml" in caught.value.message  # where it stands


def test_a_decoder_that_does_both_has_the_settings_of_both(configure, tmp_path):
    folder = write_qwen3(tmp_path / "qwen3")
    told = 'tasks = ["generate", "embed", "rerank"]\npooled_tokens = 5\nnum_blocks = 99\n'
    settings = configure(folder, f'{told}truncate = true\nprefix_cache = "off"')
    checks.check_all(settings)
    text = TextService(folder, folder_of=Path, key="models.base")
    config = engine_config(settings, pair_form(settings, text.base))
    assert config == replace(settings.engine_config(), pools=config.pools)
    assert (config.pooled_tokens, config.num_blocks, config.model) == (5, 99, str(folder))
    wanted = PoolsToo(root=str(folder), truncate=True, prefix_cache="off", score_tokens=(YES, NO))
    assert config.pools == wanted
    spec = base.spec_of(settings)
    assert spec.generates and spec.head is not None


def test_adapters_may_bring_tokens_where_a_model_generates(configure, tmp_path):
    folder = write_qwen3(tmp_path / "qwen3")
    rest = "[lora]\nextra_vocab = 7"
    usual = base.spec_of(configure(folder))
    for tasks in ('["generate"]', '["generate", "embed"]'):
        spec = base.spec_of(configure(folder, f"tasks = {tasks}", rest))
        assert (spec.extra_vocab, spec.num_ids) == (7, usual.vocab_size + 7)
    assert usual.extra_vocab == 256
    assert base.spec_of(configure(folder, 'tasks = ["embed"]')).extra_vocab == 0


@pytest.mark.parametrize(
    "told, wrong",
    [
        ('pooling = "mean"\nprefix_cache = "on"', "models.prefix_cache = 'on': pooling by mean"),
        ('chunked_prefill = "off"', "models.chunked_prefill = 'off': inputs share steps with"),
        ("pooled_tokens = -1", "models.pooled_tokens = -1: must be 0 (auto) or more"),
        ('score_words = ["yes no"]', "models.score_words: 'yes no' is 3 tokens of this model"),
    ],
)
def test_what_a_decoder_that_does_both_cannot_be_told_is_refused_in_one_line(
    configure, tmp_path, told, wrong
):
    folder = write_qwen3(tmp_path / "qwen3")
    with pytest.raises(BadConfig) as caught:
        checks.check_all(configure(folder, f'tasks = ["generate", "rerank"]\n{told}'))
    assert wrong in caught.value.message and "\n" not in caught.value.message


def test_the_hint_for_an_encoder_that_should_generate_says_what_it_can(configure, tmp_path):
    folder = write_bert(tmp_path / "bert", labels=1)
    with pytest.raises(BadConfig) as caught:
        base.spec_of(configure(folder, 'tasks = ["generate"]'))
    assert caught.value.hint == 'tasks = ["rerank", "classify"]'


TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "max_position_embeddings": 64,
}


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps(TINY | changes))


def test_a_decoder_pools_where_it_is_said(configure, llama):
    write(llama)
    for tasks in ('["embed"]', '["classify"]', '["embed", "classify"]'):
        spec = base.spec_of(configure(llama, f"tasks = {tasks}"))
        assert spec.head.pools == "last" and not spec.num_labels
    assert base.spec_of(configure(llama)).head is None


@pytest.mark.parametrize(
    "changes, tasks",
    [
        ({"architectures": ["LlamaModel"]}, ("embed",)),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("classify",)),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "fits"}},
            ("rerank", "classify"),
        ),
    ],
)
def test_a_decoder_without_a_head_that_generates_pools_by_itself(configure, llama, changes, tasks):
    write(llama, **changes)
    settings = configure(llama)
    assert settings.models[0].tasks == tasks
    assert base.spec_of(settings).num_labels == (0 if tasks == ("embed",) else 3 - len(tasks))
    with pytest.raises(BadConfig, match="architecture Llama") as caught:
        base.spec_of(configure(llama, 'tasks = ["generate"]'))
    assert caught.value.hint == f"tasks = {json.dumps(tasks)}"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["llama"]},
        {"architectures": {"LlamaForSequenceClassification": 1}},
        {"architectures": "LlamaForSequenceClassification", "num_labels": "two"},
        {"architectures": ["LlamaForSequenceClassification"], "id2label": 7},
        {"architectures": [["LlamaModel"]]},
    ],
)
def test_odd_files_are_for_something_and_refused_in_one_line(configure, llama, changes):
    write(llama, **changes)
    settings = configure(llama)
    assert settings.models[0].tasks in (("generate",), ("classify",))
    try:
        base.spec_of(settings)
    except BadConfig as refused:
        assert "\n" not in refused.message
    else:
        assert settings.models[0].tasks == ("classify",)  # of two classes, as transformers counts


@pytest.mark.parametrize("setting", ["prefix_cache", "chunked_prefill"])
def test_what_a_pooled_decoder_is_not_served_with_is_refused_by_its_key(configure, llama, setting):
    write(llama)
    forced = f'tasks = ["embed"]\n{setting} = "on"\npooling = '
    why = f"models.{setting} = 'on': pooling by mean reads"
    with pytest.raises(BadConfig, match=why) as caught:
        base.spec_of(configure(llama, forced + '"mean"'))
    assert "lorad.toml" in caught.value.message
    for wish in ("on", "off"):
        base.spec_of(configure(llama, f'tasks = ["embed"]\n{setting} = "{wish}"'))
    with pytest.raises(BadConfig, match=f"models.{setting}: only a model that pools has it"):
        configure(llama, f'{setting} = "on"')


def test_model_files_may_lie_below_the_base(configure, tmp_path):
    root = tmp_path / "nested"
    write_bert(root / "0_Transformer")
    modules = [{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]
    (root / "modules.json").write_text(json.dumps(modules))
    settings = configure(root)
    assert base.folder_of(settings) == Path(root / "0_Transformer")
    checks.check_all(settings)
