"""An encoder's config.json: what is read, in which dialect, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelUnsupported
from engine.models.encoder_spec import read_encoder_spec

Folder = Callable[..., Path]

BERT: dict[str, Any] = {"model_type": "bert", "architectures": ["BertModel"]}
ROBERTA = {"model_type": "roberta", "architectures": ["RobertaModel"]}
MODERN = {"model_type": "modernbert", "architectures": ["ModernBertModel"]}
NOMIC = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}
GENERATES = {"num_key_value_heads": ..., "rms_norm_eps": ...}  # fields of the folder's own


@pytest.fixture
def encoder(folder: Folder) -> Folder:
    def make(**changes: Any) -> Path:
        return folder(**GENERATES | {"hidden_act": "gelu"} | changes)

    return make


def test_bert_has_learned_positions_biases_and_norms_behind(encoder: Folder) -> None:
    spec = read_encoder_spec(encoder(**BERT))
    assert spec.max_length == spec.position_rows == 256 and spec.num_types == 2
    assert spec.attention_bias and spec.mlp_bias and spec.norm_bias and spec.post_norm
    assert spec.norm_eps == 1e-12 and spec.activation == "gelu" and not spec.gated
    assert spec.shapes.of("gate_proj") == (64, 0) and spec.shapes.of("up_proj") == (64, 128)
    assert spec.position_ids([5, 0, 7]) == [0, 1, 2] and spec.ropes == (None,) * 4


def test_roberta_begins_to_count_behind_its_padding(encoder: Folder) -> None:
    spec = read_encoder_spec(encoder(**ROBERTA, pad_token_id=1, type_vocab_size=1))
    assert spec.position_rows == 256 and spec.max_length == 254 and spec.num_types == 1
    assert spec.position_ids([5, 1, 7]) == [2, 1, 3]


def test_modernbert_has_two_rotations_and_windows_to_both_sides(encoder: Folder) -> None:
    spec = read_encoder_spec(encoder(**MODERN, hidden_act=..., local_attention=20))
    assert spec.windows == (0, 10, 10, 0) and not spec.post_norm and spec.gated
    full, near = spec.ropes[0], spec.ropes[1]
    assert full is not None and near is not None
    assert (full.theta, near.theta) == (160_000.0, 10_000.0)
    assert spec.position_rows == spec.num_types == 0
    assert not (spec.attention_bias or spec.mlp_bias or spec.norm_bias)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        (BERT | {"is_decoder": True}, "is_decoder"),
        (BERT | {"hidden_act": "mish"}, "hidden_act"),
        (BERT | {"hidden_act": ["gelu"]}, "hidden_act"),
        (BERT | {"model_type": ["bert"]}, "model_type"),
        (BERT | {"architectures": "BertForQuestionAnswering"}, "BertForQuestionAnswering"),
        (BERT | {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        (BERT | {"architectures": ["RobertaModel"]}, "RobertaModel"),
        (BERT | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (BERT | {"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
        (BERT | {"embedding_size": 32}, "embedding_size"),
        (ROBERTA | {"pad_token_id": None}, "pad_token_id"),
        (MODERN | {"hidden_act": ..., "local_attention": 1}, "local_attention"),
        (MODERN | {"hidden_act": ..., "layer_types": ["full_attention"]}, "layer_types"),
        (MODERN | {"hidden_act": ..., "layer_types": [["full_attention"]] * 4}, "layer_types"),
        (MODERN | {"hidden_act": ..., "rope_scaling": {"type": "linear"}}, "rope_scaling"),
        (MODERN | {"hidden_act": ..., "classifier_pooling": "last"}, "classifier_pooling"),
        (NOMIC | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "distilbert", "architectures": ["DistilBertModel"]}, "distilbert"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    encoder: Folder, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        read_encoder_spec(encoder(**changes))


@pytest.mark.parametrize(
    "config",
    [
        BERT
        | {  # as MiniLM's, and as Google's first ones
            "gradient_checkpointing": False,
            "attention_probs_dropout_prob": 0.1,
            "hidden_dropout_prob": 0.1,
            "classifier_dropout": None,
            "position_embedding_type": "absolute",
            "directionality": "bidi",
            "pooler_fc_size": 768,
            "pooler_num_attention_heads": 12,
            "pooler_type": "first_token_transform",
        },
        {
            "model_type": "xlm-roberta",
            "architectures": ["XLMRobertaForSequenceClassification"],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "layer_norm_eps": 1e-5,
            "output_past": True,
            "pad_token_id": 1,
            "type_vocab_size": 1,
            "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
        },
        MODERN
        | {
            "architectures": ["ModernBertForMaskedLM"],
            "hidden_act": ...,
            "hidden_activation": "gelu",
            "classifier_activation": "gelu",
            "classifier_pooling": "mean",
            "cls_token_id": 1,
            "decoder_bias": True,
            "deterministic_flash_attn": False,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "initializer_cutoff_factor": 2.0,
            "layer_norm_eps": 1e-5,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "norm_eps": 1e-5,
            "position_embedding_type": "absolute",
            "reference_compile": True,
            "repad_logits_with_grad": False,
            "sparse_pred_ignore_index": -100,
            "sparse_prediction": False,
            "tie_word_embeddings": True,
        },
    ],
)
def test_fields_of_published_configs_that_change_nothing_are_let_pass(
    encoder: Folder, config: dict[str, Any]
) -> None:
    assert read_encoder_spec(encoder(**config)).num_layers == 4


def test_a_classifier_has_the_labels_that_id2label_names(encoder: Folder) -> None:
    classifier = BERT | {"architectures": ["BertForSequenceClassification"]}
    spec = read_encoder_spec(encoder(**classifier, id2label={"0": "no", "1": "yes", "2": "so"}))
    assert spec.num_labels == 3 and spec.labels == ("no", "yes", "so")
    assert read_encoder_spec(encoder(**classifier)).num_labels == 2
    assert read_encoder_spec(encoder(**BERT)).num_labels == 0
    with pytest.raises(ModelUnsupported, match="id2label"):
        read_encoder_spec(encoder(**classifier, id2label={"1": "no", "2": "yes"}))


@pytest.mark.parametrize(
    ("family", "published", "place"),
    [
        (BERT, "encoder.layer.2.attention.self.query", (2, "q_proj")),
        (BERT, "bert.encoder.layer.0.attention.output.dense", (0, "o_proj")),
        (BERT, "encoder.layer.3.intermediate.dense", (3, "up_proj")),
        (BERT, "encoder.layer.3.output.dense", (3, "down_proj")),
        (BERT, "encoder.layer.9.output.dense", (9, "down_proj")),
        (BERT, "bert.pooler.dense", (4, "head.dense")),
        (BERT, "classifier", None),
        (BERT, "embeddings.word_embeddings", None),
        (BERT, "layers.0.gate_proj", None),
        (ROBERTA | {"pad_token_id": 1}, "roberta.encoder.layer.1.output.dense", (1, "down_proj")),
        (MODERN | {"hidden_act": ...}, "model.layers.1.attn.Wqkv", (1, "qkv_proj")),
        (MODERN | {"hidden_act": ...}, "layers.1.mlp.Wi", (1, "gate_up_proj")),
        (NOMIC, "encoder.layers.0.mlp.fc12", (0, "gate_proj")),
        (NOMIC, "layers.0.self_attn.v_proj", (0, "v_proj")),
    ],
)
def test_published_names_lead_to_the_engines_modules(
    encoder: Folder, family: dict[str, Any], published: str, place: tuple[int, str] | None
) -> None:
    assert read_encoder_spec(encoder(**family)).place_of(published) == place


def test_a_block_holds_some_of_the_widest_rows_whatever_the_block_size(encoder: Folder) -> None:
    spec = read_encoder_spec(encoder(**BERT, intermediate_size=5000))
    small, large = (spec.block_layout(block_size=size, dtype="float32") for size in (8, 64))
    assert small == large and small.block_bytes == 131072
    assert read_encoder_spec(encoder(**BERT)).block_layout(dtype="float32").block_bytes == 65536
