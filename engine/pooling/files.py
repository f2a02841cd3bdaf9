"""The files of sentence-transformers → PoolingSpec.  Torch-free.

Goes in: a model's folder.  Comes out: how its vectors are made, in either schema of those files;
or ModelUnsupported with the name of what is not computed.  A folder without them is a plain encoder
and gets the mean, which is what sentence-transformers gives it, or a plain decoder and gets the
last row, which alone has seen all of an input.  Where a Dense follows the model with nothing that
pools between them, or the checkpoint is one of ColBERT's own code, each token has a vector
(`late.py`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from engine.errors import FETCH_AGAIN, OTHER_BASE, ConfigError, ModelUnsupported
from engine.models.encoder_families import COLBERT, is_encoder
from engine.models.hf_config import Fields, read_json, short
from engine.pooling import late
from engine.pooling.spec import DenseSpec, LateSpec, PoolingKind, PoolingSpec, ScoreRule

MODULES_FILE = "modules.json"
SERVED = "served are Transformer, Pooling, Dense, Normalize and LogitScore"
#: The old schema's fields, in the order in which several are put side by side.
_OLD: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_length",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_NEW: dict[str, PoolingKind] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
#: The names of the vector, and of those of all tokens, in the files of a Dense or a Normalize.
_VECTOR, _TOKENS = "sentence_embedding", "token_embeddings"
_TASKS = (None, "feature-extraction", "sequence-classification")
#: Of a decoder that scores by words of its output head; and where their logits are put.
_WORDS_TASK, _WORDS_INPUT = "text-generation", "causal_logits"
_DENSE_ACTIVATIONS = {
    "Tanh": "tanh",
    "Identity": "identity",
    "GELU": "gelu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
}
_SCORE_RULES: dict[str, ScoreRule] = {"Sigmoid": "sigmoid", "Identity": "identity"}


def read_pooling(folder: Path) -> PoolingSpec:
    """How the model in `folder` makes vectors and scores.

    Raises ConfigError for files that cannot be read, ModelUnsupported for what is not computed.
    """
    modules, found = _modules(folder), dict[str, Any]()
    ours = read_json(folder / late.PYLATE, required=False)
    lacks = f"{MODULES_FILE} has no Pooling" if modules else f"no {MODULES_FILE}"
    steps: list[DenseSpec | Literal["normalize"]] = []
    marks = late.MARKS in ours  # each token has a vector, of a query and of a document its own
    each = marks and [kind for kind, _ in modules][1:2] == ["Dense"]
    for place, (kind, path) in enumerate(modules):
        if kind == "Transformer" and place == 0:
            found["folder"] = path
        elif kind == "Pooling" and place == 1:
            found |= _pooling(folder / path, path)
        elif kind == "LogitScore" and place == 1 and len(modules) == 2:
            found["score_tokens"] = _score_tokens(folder / path, path)
        elif kind == "Dense" and (place > 1 or each):
            steps.append(_dense(folder / path, path, _TOKENS if each else _VECTOR))
        elif kind == "Normalize" and each:
            pass  # they have length 1 whether it is there or not
        elif kind == "Normalize" and place > 0:
            config = Fields(read_json(folder / path / "config.json", required=False), path)
            _only(config, _VECTOR)
            steps.append("normalize")
        else:
            raise ModelUnsupported(
                f"{MODULES_FILE} has {short(kind)} as its module {place}", hint=SERVED
            )
    model = read_json(folder / found.get("folder", "") / "config.json", required=True)
    found |= _transformer(folder / found.get("folder", ""), words="score_tokens" in found)
    found |= _prompts(ours)
    if each:
        return _each_token(found, model, late.pylate(ours), steps, late.PYLATE)
    if marks:
        why = f"{MODULES_FILE} has no Dense behind its Transformer"
        raise Fields(ours, late.PYLATE).refusal(late.MARKS, why)
    if COLBERT in (model.get("architectures") or ()):
        if modules:
            raise ModelUnsupported(
                f"{MODULES_FILE} beside a checkpoint of the class {COLBERT}", hint=OTHER_BASE
            )
        size = Fields(model, "config.json").integer("hidden_size")
        late_spec, dense = late.colbert(folder, size)
        return _each_token(found, model, late_spec, [dense], late.METADATA)
    if "kinds" not in found:
        usual: PoolingKind = "mean" if is_encoder(model) else "last"
        found |= {"kinds": (usual,), "origin": f"{lacks}: {usual}"}
    return PoolingSpec(
        **found,
        steps=tuple(steps),
        similarity=str(ours.get("similarity_fn_name") or "cosine"),
        dimensions=_dimensions(model),
        score=_score(model, ours),
    )


def _each_token(
    found: Mapping[str, Any],
    model: Mapping[str, Any],
    told: LateSpec,
    steps: Sequence[DenseSpec | Literal["normalize"]],
    origin: str,
) -> PoolingSpec:
    """Of late interaction.  Its own lengths stand in the place of the one that it was saved with,
    which is that of whatever it had read last."""
    if not is_encoder(model):
        raise ModelUnsupported("late interaction of a decoder", hint="encoders are served so")
    more = {"kinds": (), "origin": origin, "late": told, "similarity": "MaxSim", "max_length": None}
    return PoolingSpec(**{**found, **more}, steps=(*steps, "normalize"))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(last word of the type, folder) of each module, in order."""
    path = folder / MODULES_FILE
    try:
        listed = json.loads(path.read_bytes())
        rows = [(str(row["type"]).rpartition(".")[2], str(row["path"])) for row in listed]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is no list of modules: {error!r}", hint=FETCH_AGAIN) from None
    for kind, where in rows:
        if PurePosixPath(where).is_absolute() or ".." in PurePosixPath(where).parts:
            raise ModelUnsupported(
                f"{MODULES_FILE} leads out of the folder: {kind} in {where}", hint=OTHER_BASE
            )
    return rows


def module_kinds(folder: Path) -> tuple[str, ...]:
    """What modules.json lists, () without one.  Raises as `read_pooling` does."""
    return tuple(kind for kind, _ in _modules(folder))


def _transformer(folder: Path, *, words: bool) -> dict[str, Any]:
    told = Fields(read_json(folder / "sentence_bert_config.json", required=False), str(folder))
    length = told.take("max_seq_length", None)
    task = told.take("transformer_task", None)
    if task not in _TASKS and not (words and task == _WORDS_TASK):
        raise told.refusal("transformer_task", "served are feature extraction and classification")
    return {
        "max_length": None if length is None else told.integer("max_seq_length"),
        "lower_case": told.flag("do_lower_case"),
    }


def _pooling(folder: Path, path: str) -> dict[str, Any]:
    told = Fields(read_json(folder / "config.json", required=True), f"{path}/config.json")
    for name in ("word_embedding_dimension", "embedding_dimension"):
        told.take(name, None)
    old = [kind for name, kind in _OLD.items() if told.flag(name)]
    named = told.take("pooling_mode", None)
    words = [named] if isinstance(named, str) else named
    if words is None:
        kinds = tuple(old) or ("mean",)
    elif isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        kinds = tuple(_kind(word, told) for word in words)
    else:
        raise told.refusal("pooling_mode", f"expected one or several of {', '.join(_NEW)}")
    include = told.flag("include_prompt", True)
    told.refuse_rest()
    return {"kinds": kinds, "include_prompt": include, "origin": f"{path}/config.json"}


def _kind(word: str, told: Fields) -> PoolingKind:
    if word.lower() == "step":
        raise told.refusal(
            "pooling_mode", "STEP pooling needs marks in the text that rewards stand behind"
        )
    if word not in _NEW:
        raise told.refusal("pooling_mode", f"served are {', '.join(_NEW)}")
    return _NEW[word]


def _score_tokens(folder: Path, path: str) -> tuple[int, ...]:
    told = Fields(read_json(folder / "config.json", required=True), f"{path}/config.json")
    ids = [told.take("true_token_id"), told.take("false_token_id", None)]
    for name, value in zip(("true_token_id", "false_token_id"), ids, strict=True):
        absent = value is None and name == "false_token_id"
        if not absent and (type(value) is not int or value < 0):
            raise told.refusal(name, "expected a token id")
    if told.take("module_input_name", _WORDS_INPUT) != _WORDS_INPUT:
        raise told.refusal("module_input_name", f"only {_WORDS_INPUT} is read")
    told.refuse_rest()
    return tuple(value for value in ids if value is not None)


def _dense(folder: Path, path: str, changed: str) -> DenseSpec:
    """`changed` is the name of what it takes and gives.  One that says nothing of its activation
    has that of whose class it is: PyLate's, of tokens, has none."""
    told = Fields(read_json(folder / "config.json", required=True), f"{path}/config.json")
    _only(told, changed)
    usual = "Tanh" if changed == _VECTOR else "Identity"
    word = _last_word(told, "activation_function", f"torch.nn.{usual}")
    if word not in _DENSE_ACTIVATIONS:
        raise told.refusal("activation_function", f"served are {', '.join(_DENSE_ACTIVATIONS)}")
    spec = DenseSpec(
        path,
        told.integer("in_features"),
        told.integer("out_features"),
        told.flag("bias", True),
        _DENSE_ACTIVATIONS[word],  # type: ignore[arg-type]
    )
    told.refuse_rest()
    return spec


def _only(told: Fields, changed: str) -> None:
    for name in ("module_input_name", "module_output_name"):
        if told.take(name, None) not in (None, changed):
            raise told.refusal(name, f"only {changed} is changed")


def _last_word(told: Fields, name: str, default: str) -> str:
    """Of a class of torch's; code from elsewhere is not imported, so its name says nothing."""
    value = told.take(name, None) or default
    module, _, word = str(value).rpartition(".")
    return word if module.partition(".")[0] == "torch" else ""


def _prompts(ours: Mapping[str, Any]) -> dict[str, Any]:
    told = Fields(ours, "config_sentence_transformers.json")
    prompts = told.take("prompts", None) or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise told.refusal("prompts", "expected texts by name")
    default = told.take("default_prompt_name", None)
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise told.refusal("default_prompt_name", f"prompts has {', '.join(prompts) or 'none'}")
    return {"prompts": prompts, "default_prompt": default}


def _dimensions(model: Mapping[str, Any]) -> tuple[int, ...]:
    told = Fields(model, "config.json")
    values = told.take("matryoshka_dimensions", None) or []
    if not isinstance(values, list) or not all(type(v) is int and v > 0 for v in values):
        raise told.refusal("matryoshka_dimensions", "expected whole numbers")
    return tuple(sorted(values))


def _score(model: Mapping[str, Any], ours: Mapping[str, Any]) -> ScoreRule | None:
    """What sentence-transformers wrote of a cross-encoder, in its three places; else what the
    problem's type says."""
    nested = model.get("sentence_transformers")
    places = (
        Fields(nested if isinstance(nested, dict) else {}, "config.json sentence_transformers"),
        Fields(ours, "config_sentence_transformers.json"),
        Fields(model, "config.json"),
    )
    names = ("activation_fn", "activation_fn", "sbert_ce_default_activation_function")
    for told, name in zip(places, names, strict=True):
        if told.take(name, None) is None:
            continue
        word = _last_word(told, name, "")
        if word not in _SCORE_RULES:
            raise told.refusal(name, f"served are torch's {', '.join(_SCORE_RULES)}")
        return _SCORE_RULES[word]
    return "sigmoid" if model.get("problem_type") == "multi_label_classification" else None
