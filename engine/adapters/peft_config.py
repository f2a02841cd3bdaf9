"""adapter_config.json: what it says about the arithmetic, or why lorad does not serve it.

Goes in: the file's bytes.  Comes out: LoraSettings, which give rank and scaling of every module by
PEFT's own rule.  Every field is either used, known not to matter, or refused: PEFT drops unknown
fields in silence, and a field that changes the arithmetic must not be dropped.  The base model's
name and all paths in the file are never looked at.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from engine.adapters.adapter_folder import refuse_pointer
from engine.adapters.alora import read_invocation
from engine.adapters.config_values import (
    read_alpha,
    read_flag,
    read_names,
    read_pattern,
    read_rank,
    read_targets,
)
from engine.adapters.manifest import CONFIG_FILE, Limits
from engine.adapters.patterns import Budget, PatternRefused, PatternTable
from engine.adapters.reasons import refuse, shown, shown_list
from engine.adapters.strict_json import read_object

#: Fields that change nothing about serving one adapter unmerged, whatever their value.
#: The configs of loftq, eva, corda and lora_ga are among them: init_lora_weights says the rest.
#: bias and modules_to_save too: if such weights exist, they are tensors, and those are refused.
_WITHOUT_EFFECT = frozenset(
    [
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "fan_in_fan_out",
        "bias",
        "modules_to_save",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "velora_config",
        "runtime_config",
        "qalora_group_size",
        "merge_weights",
        "lora_dtype",
        "lorap_lr_ratio",
        "lorap_emb_lr",
    ]
)
#: Fields that `parse_config` reads itself.
_READ = frozenset(
    [
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "lora_bias",
        "use_dora",
        "alora_invocation_tokens",
        "ensure_weight_tying",
        "trainable_token_indices",
    ]
)

#: Starting values of A and B that leave the base as it is.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")

_RETRAIN = "train or convert it as plain LoRA"
#: field -> (code, what it means, hint), refused unless the value is neutral.
_VARIETIES: dict[str, tuple[str, str, str]] = {
    "use_qalora": ("E_QALORA", "QA-LoRA", _RETRAIN + ": use_qalora=False"),
    "layer_replication": (
        "E_LAYER_REPLICATION",
        "a base with replicated layers",
        "serve the deeper model itself as the base, and train on that",
    ),
    "target_parameters": (
        "E_MOE",
        "LoRA on the parameters of MoE experts",
        "serve it on the mixture-of-experts base that it was trained on",
    ),
    "use_bdlora": ("E_BDLORA", "block-diagonal LoRA", _RETRAIN + ": without use_bdlora"),
    "monteclora_config": ("E_MONTECLORA", "MonteCLoRA", _RETRAIN),
    "arrow_config": ("E_ARROW", "Arrow routing", "add the routed adapters one by one"),
    "kasa_config": ("E_KASA", "KaSA", _RETRAIN),
}


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The arithmetic of one adapter.  `rank` None: not said, so the tensors must agree."""

    rank: int | None
    alpha: float
    rslora: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: list[str] | str | None
    modules_to_save: tuple[str, ...]
    lora_bias: bool = False
    dora: bool = False
    alora_tokens: tuple[int, ...] = ()
    tying: bool = False  # the head of a tied base takes the embedding's factors
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)  # trained ones, by end
    mlx: bool = False  # alpha is the scaling itself, and tensors have MLX's names and layout
    remarks: tuple[str, ...] = ()  # what the operator should know
    budget: Budget = field(default_factory=Budget, compare=False)

    @property
    def semantic(self) -> dict[str, Any]:
        """What decides the arithmetic, for the digest.  Patterns keep their order: it matters."""
        known: dict[str, Any] = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "rank_pattern": [list(pair) for pair in self.rank_pattern],
            "alpha_pattern": [list(pair) for pair in self.alpha_pattern],
        }
        # Absent where false: what was registered before they were served keeps its revision.
        later = {"lora_bias": self.lora_bias, "use_dora": self.dora, "mlx": self.mlx}
        later["ensure_weight_tying"] = self.tying
        known |= {name: True for name, value in later.items() if value}
        if self.tokens:
            known["trainable_token_indices"] = {k: list(v) for k, v in self.tokens.items()}
        tokens = {"alora_invocation_tokens": list(self.alora_tokens)}
        return known | (tokens if self.alora_tokens else {})


def read_config(data: bytes) -> dict[str, Any]:
    """The JSON object in adapter_config.json, whoever wrote it.  Raises AdapterInvalid."""
    refuse_pointer(CONFIG_FILE, data)
    return read_object(
        data,
        what=CONFIG_FILE,
        code="E_CONFIG_INVALID",
        hint="save the adapter again with save_pretrained",
    )


def peft_settings(config: dict[str, Any], limits: Limits) -> LoraSettings:
    """The arithmetic of a PEFT adapter.  Raises AdapterInvalid."""
    _check_type(config)
    _check_varieties(config)
    _check_init(config)
    _check_unknown(config)
    settings = LoraSettings(
        rank=read_rank(config.get("r"), "r", limits) if config.get("r") is not None else None,
        alpha=read_alpha(config.get("lora_alpha"), "lora_alpha"),
        rslora=read_flag(config, "use_rslora"),
        rank_pattern=read_pattern(
            config, "rank_pattern", lambda v, name: read_rank(v, name, limits)
        ),
        alpha_pattern=read_pattern(config, "alpha_pattern", read_alpha),
        target_modules=read_targets(config.get("target_modules")),
        modules_to_save=read_names(config.get("modules_to_save")),
        lora_bias=read_flag(config, "lora_bias"),
        dora=read_flag(config, "use_dora"),
        alora_tokens=read_invocation(config),
        tying=read_flag(config, "ensure_weight_tying"),
        tokens=_read_tokens(config.get("trainable_token_indices")),
    )
    if settings.lora_bias and settings.dora:  # PEFT refuses the pair too
        raise refuse(
            "E_LORA_BIAS",
            "both lora_bias and use_dora are set",
            _RETRAIN + " with one of the two",
        )
    return settings


def _read_tokens(value: Any) -> dict[str, tuple[int, ...]]:
    """Ids by "embed_tokens" and "lm_head"; a list is the embedding's.  Raises AdapterInvalid."""
    if is_neutral(value):
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in (value if isinstance(value, dict) else {"embed_tokens": value}).items():
        end = str(name).rpartition(".")[2]
        fit = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        if not fit or end not in ("embed_tokens", "lm_head") or end in found:
            raise refuse(
                "E_TRAINABLE_TOKENS",
                f"trainable_token_indices is {shown(value)}: served are lists of token ids, of"
                " embed_tokens and lm_head",
                _RETRAIN + ": without trainable_token_indices",
            )
        found[end] = tuple(ids)
    return found


class Scaling:
    """The one place where rank and scaling of a module are computed.

    PEFT's rule: r and alpha come from the first pattern key that matches the module's name in the
    model that was trained, else from the config; scaling is alpha / r, with rsLoRA alpha / sqrt(r).
    """

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings
        try:
            self._ranks = PatternTable(settings.rank_pattern, settings.budget)
            self._alphas = PatternTable(settings.alpha_pattern, settings.budget)
        except PatternRefused as error:
            raise _bad_pattern(error) from None

    def rank(self, name: str) -> int | None:
        """The rank that the config gives to the module `name`; None if it gives none."""
        try:
            own = self._ranks.get(name)
        except PatternRefused as error:
            raise _bad_pattern(error) from None
        return self._settings.rank if own is None else own

    def scaling(self, name: str, rank: int) -> float:
        """What the pair's product is multiplied by, finite in float32.  Raises AdapterInvalid."""
        try:
            own = self._alphas.get(name)
        except PatternRefused as error:
            raise _bad_pattern(error) from None
        alpha = self._settings.alpha if own is None else own
        if self._settings.mlx:
            return alpha
        return alpha / math.sqrt(rank) if self._settings.rslora else alpha / rank


def _check_type(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind == "LORA":
        return
    if kind is None:
        raise refuse(
            "E_NO_PEFT_TYPE",
            f"{CONFIG_FILE} has no peft_type; its fields are {shown_list(config) or 'none'}",
            'if it is a PEFT LoRA, add "peft_type": "LORA"; else convert it to one',
        )
    raise refuse(
        "E_PEFT_TYPE", f"peft_type is {shown(kind)}; served is LORA", _RETRAIN + ' ("LORA")'
    )


def _check_varieties(config: dict[str, Any]) -> None:
    for name, (code, meaning, hint) in _VARIETIES.items():
        value = config.get(name)
        if not is_neutral(value):
            raise refuse(code, f"{name} is {shown(value)}: {meaning}", hint)


def _check_init(config: dict[str, Any]) -> None:
    value = config.get("init_lora_weights")
    if any(value is plain for plain in _PLAIN_INITS[:3]) or (
        isinstance(value, str) and value in _PLAIN_INITS
    ):
        return
    raise refuse(
        "E_INIT",
        f"init_lora_weights is {shown(value)}: B A is relative to a base changed when training"
        " began, allowed are true, false, gaussian, eva, orthogonal, mica",
        "convert it: save_pretrained(folder, path_initial_model_for_weight_conversion=...)",
    )


def _check_unknown(config: dict[str, Any]) -> None:
    known = _WITHOUT_EFFECT | _READ | _VARIETIES.keys()
    for name, value in config.items():
        if name not in known and not is_neutral(value):
            version = config.get("peft_version")
            said = (
                f"peft_version {shown(version)}" if version else "a peft_version that is not given"
            )
            raise refuse(
                "E_UNKNOWN_FIELD",
                f"the field {shown(name)} is {shown(value)}, and lorad does not know it ({said})",
                "if it does not change the arithmetic, remove it; else a newer lorad is needed",
            )


def is_neutral(value: Any) -> bool:
    """Whether a field may be there, whatever it means."""
    return value is None or value is False or value in ({}, [], "")


def _bad_pattern(error: PatternRefused) -> Exception:
    return refuse(
        "E_PATTERN",
        f"rank_pattern or alpha_pattern: {shown(str(error))}",
        "write the patterns as plain module names",
    )
