"""The files of sentence-transformers in both schemas, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, ModelUnsupported
from engine.pooling.files import read_pooling
from engine.pooling.spec import DenseSpec, PoolingSpec

Folder = Callable[..., Path]

OLD = "sentence_transformers.models."
SPELLINGS = (
    OLD,
    "sentence_transformers.sentence_transformer.modules.lower.",
    "sentence_transformers.base.modules.lower.",
)


def modules(*kinds: str, spelling: str = OLD) -> list[dict[str, Any]]:
    """The first one lies in the folder itself."""
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": spelling + kind}
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """`folder({"1_Pooling/config.json": {...}})`: a folder with these files, and a config.json."""

    def make(files: dict[str, Any]) -> Path:
        for name, value in ({"config.json": {}} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        return tmp_path

    return make


def pooling(folder: Folder, config: dict[str, Any], **files: Any) -> PoolingSpec:
    listed = modules("Transformer", "Pooling")
    return read_pooling(folder({"modules.json": listed, "1_Pooling/config.json": config} | files))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_model_of_the_usual_three_modules_in_any_spelling(folder: Folder, spelling: str) -> None:
    config = {
        "word_embedding_dimension": 384,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
    }
    where = folder(
        {
            "modules.json": modules("Transformer", "Pooling", "Normalize", spelling=spelling),
            "1_Pooling/config.json": config,
            "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
            "config_sentence_transformers.json": {"__version__": {"pytorch": "1.8.1"}},
        }
    )
    assert read_pooling(where) == PoolingSpec(
        kinds=("mean",),
        steps=("normalize",),
        origin="1_Pooling/config.json",
        max_length=256,
        lower_case=True,
    )


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"pooling_mode_lasttoken": True}, ("last",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted_mean",)),
        ({"embedding_dimension": 384, "pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_length",)),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, ("last",)),
    ],
)
def test_the_kind_is_read_in_both_schemas(
    folder: Folder, config: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    assert pooling(folder, config).kinds == kinds


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"pooling_mode": "step"}, "STEP"),
        ({"pooling_mode": "attention"}, "attention"),
        ({"pooling_mode": []}, "pooling_mode"),
        ({"pooling_mode": {"mean": True}}, "pooling_mode"),
        ({"pooling_mode_cls_token": "yes"}, "pooling_mode_cls_token"),
        ({"pooling_mode_sum_tokens": True}, "pooling_mode_sum_tokens"),
    ],
)
def test_another_kind_is_refused_by_name(
    folder: Folder, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        pooling(folder, config)


def test_a_folder_without_the_files_is_a_plain_encoder_and_says_what_was_chosen(
    folder: Folder,
) -> None:
    bert = {"config.json": {"model_type": "bert"}}
    spec = read_pooling(folder(bert))
    assert spec.kinds == ("mean",) and not spec.normalizes and "mean" in spec.origin
    bare = read_pooling(folder(bert | {"modules.json": modules("Transformer")}))
    assert bare.kinds == ("mean",) and bare.origin == "modules.json has no Pooling: mean"


def test_a_plain_decoder_gets_its_last_row(folder: Folder) -> None:
    spec = read_pooling(folder({"config.json": {"model_type": "qwen3"}}))
    assert (spec.kinds, spec.origin) == (("last",), "no modules.json: last")


WORDS = {"true_token_id": 9, "false_token_id": 4}


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        (WORDS, (9, 4)),
        (WORDS | {"false_token_id": None}, (9,)),
        ({"true_token_id": 0, "module_input_name": "causal_logits"}, (0,)),
    ],
)
def test_words_of_an_output_head_score_where_the_files_name_them(
    folder: Folder, told: dict[str, Any], tokens: tuple[int, ...]
) -> None:
    where = folder(
        {
            "modules.json": modules("Transformer", "LogitScore"),
            "1_LogitScore/config.json": told,
            "sentence_bert_config.json": {"transformer_task": "text-generation"},
        }
    )
    assert read_pooling(where).score_tokens == tokens
    assert read_pooling(where).score_rule(1) == "sigmoid"


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"true_token_id": "yes"},
        {"true_token_id": -1},
        WORDS | {"false_token_id": True},
        WORDS | {"module_input_name": "scores"},
        WORDS | {"scale": 2},
    ],
)
def test_other_words_are_refused(folder: Folder, told: dict[str, Any]) -> None:
    listed = modules("Transformer", "LogitScore")
    with pytest.raises(ModelUnsupported, match="LogitScore"):
        read_pooling(folder({"modules.json": listed, "1_LogitScore/config.json": told}))


def test_a_model_that_generates_is_no_embedder_by_its_files(folder: Folder) -> None:
    files = {"sentence_bert_config.json": {"transformer_task": "text-generation"}}
    with pytest.raises(ModelUnsupported, match="transformer_task"):
        read_pooling(folder(files | {"modules.json": modules("Transformer", "Normalize")}))


def test_dense_and_normalize_follow_in_order(folder: Folder) -> None:
    dense = {
        "in_features": 8,
        "out_features": 4,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    spec = read_pooling(
        folder(
            {
                "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"),
                "1_Pooling/config.json": {"pooling_mode": "cls", "include_prompt": False},
                "2_Dense/config.json": dense,
            }
        )
    )
    assert spec.steps == (DenseSpec("2_Dense", 8, 4, False, "identity"), "normalize")
    assert spec.width(8) == 4 and spec.normalizes and not spec.include_prompt


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "Mish"),
        ({"activation_function": "mine.Tanh"}, "mine"),
        ({"use_residual": True}, "use_residual"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_another_dense_is_refused_by_name(
    folder: Folder, changes: dict[str, Any], named: str
) -> None:
    where = folder(
        {
            "modules.json": modules("Transformer", "Pooling", "Dense"),
            "1_Pooling/config.json": {},
            "2_Dense/config.json": {"in_features": 8, "out_features": 4} | changes,
        }
    )
    with pytest.raises(ModelUnsupported, match=named):
        read_pooling(where)


@pytest.mark.parametrize(
    "kinds",
    [("Transformer", "Pooling", "LayerNorm"), ("Pooling",), ("Transformer", "Dense"), ("WordBag",)],
)
def test_other_modules_and_other_orders_are_refused(folder: Folder, kinds: tuple[str, ...]) -> None:
    with pytest.raises(ModelUnsupported, match=r"modules\.json"):
        read_pooling(folder({"modules.json": modules(*kinds), "1_Pooling/config.json": {}}))


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/../../b"])
def test_modules_lie_within_the_folder(folder: Folder, path: str) -> None:
    listed = modules("Transformer", "Pooling")
    listed[1]["path"] = path
    with pytest.raises(ModelUnsupported, match="out of the folder"):
        read_pooling(folder({"modules.json": listed}))


@pytest.mark.parametrize("listed", [{"idx": 0}, [1], [{"type": "x"}]])
def test_a_broken_list_of_modules_is_told(folder: Folder, listed: Any) -> None:
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_pooling(folder({"modules.json": listed}))


def test_the_model_may_lie_in_a_folder_of_its_own(folder: Folder) -> None:
    listed = modules("Transformer", "Pooling")
    listed[0]["path"] = "0_Transformer"
    where = folder(
        {
            "modules.json": listed,
            "0_Transformer/config.json": {"matryoshka_dimensions": [64, 32]},
            "0_Transformer/sentence_bert_config.json": {"max_seq_length": None},
            "1_Pooling/config.json": {},
        }
    )
    spec = read_pooling(where)
    assert spec.folder == "0_Transformer" and spec.dimensions == (32, 64)
    assert spec.max_length is None


def test_prompts_are_read_by_name(folder: Folder) -> None:
    ours = {
        "prompts": {"query": "query: ", "document": ""},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
    }
    spec = read_pooling(folder({"config_sentence_transformers.json": ours}))
    assert dict(spec.prompts) == {"query": "query: ", "document": ""}
    assert spec.default_prompt == "query" and spec.similarity == "dot"
    for default in ("passage", ["query"]):
        changed = ours | {"default_prompt_name": default}
        with pytest.raises(ModelUnsupported, match="default_prompt_name"):
            read_pooling(folder({"config_sentence_transformers.json": changed}))


@pytest.mark.parametrize(
    ("config", "labels", "rule"),
    [
        ({}, 1, "sigmoid"),
        ({}, 3, "softmax"),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            1,
            "identity",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            3,
            "sigmoid",
        ),
    ],
)
def test_what_a_classifiers_logits_become(
    folder: Folder, config: dict[str, Any], labels: int, rule: str
) -> None:
    assert read_pooling(folder({"config.json": config})).score_rule(labels) == rule


@pytest.mark.parametrize("named", ["torch.nn.modules.activation.Softmax", "os.system", "Sigmoid"])
def test_another_activation_is_refused_and_nothing_is_imported(folder: Folder, named: str) -> None:
    config = {"sentence_transformers": {"activation_fn": named}}
    with pytest.raises(ModelUnsupported, match="activation_fn"):
        read_pooling(folder({"config.json": config}))
