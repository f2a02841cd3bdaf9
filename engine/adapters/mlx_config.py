"""The adapter_config.json that mlx-lm writes: what it says about the arithmetic.

It is a dump of all options of a training run, of which mlx-lm itself reads three when it loads an
adapter: the kind of fine-tuning, `num_layers` and `lora_parameters`.  The tensors say in which
layers and modules there is something; the rest is taken from `lora_parameters`.  `scale` is what
the product is multiplied by, and is not divided by the rank.

Goes in: the file's JSON object.  Comes out: LoraSettings, or AdapterInvalid.
"""

from typing import Any

from engine.adapters.adapter_folder import mlx
from engine.adapters.config_values import bad_value, read_alpha, read_rank
from engine.adapters.manifest import CONFIG_FILE, Limits
from engine.adapters.peft_config import LoraSettings, is_neutral
from engine.adapters.reasons import refuse, shown

#: mlx-lm's own, where lora_parameters does not say it.
DEFAULT_SCALE = 20.0
_WITHOUT_EFFECT = frozenset(("dropout",))
_READ = frozenset(("rank", "scale", "keys", "alpha"))


def is_mlx(config: dict[str, Any]) -> bool:
    """Whether mlx-lm wrote it."""
    return config.get("peft_type") is None and (
        "fine_tune_type" in config or "lora_parameters" in config
    )


def mlx_settings(config: dict[str, Any], limits: Limits) -> LoraSettings:
    """The arithmetic of an MLX adapter.  Raises AdapterInvalid."""
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise mlx(f"{CONFIG_FILE} has fine_tune_type {shown(kind)}, served are lora and dora")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise bad_value("lora_parameters", parameters, "an object with rank and scale")
    _check_unknown(parameters)
    scale = parameters.get("scale", DEFAULT_SCALE)
    keys = parameters.get("keys")
    rank = parameters.get("rank")
    return LoraSettings(
        rank=read_rank(rank, "lora_parameters.rank", limits) if rank is not None else None,
        alpha=read_alpha(scale, "lora_parameters.scale"),
        rslora=False,
        rank_pattern=(),
        alpha_pattern=(),
        target_modules=[key for key in keys if isinstance(key, str)]
        if isinstance(keys, list)
        else None,
        modules_to_save=(),
        dora=kind == "dora" or config.get("use_dora") is True,
        mlx=True,
        remarks=()
        if "scale" in parameters
        else (f"lora_parameters has no scale: it is taken as mlx-lm's default, {DEFAULT_SCALE}",),
    )


def _check_unknown(parameters: dict[str, Any]) -> None:
    if parameters.get("alpha") is not None:
        raise refuse(
            "E_ALPHA",
            f"lora_parameters has alpha {shown(parameters['alpha'])}, which old versions of mlx-lm"
            " multiply scale by, over the rank, and new ones ignore",
            "put the product into scale and remove alpha, or remove it if a new version trained",
        )
    for name, value in parameters.items():
        if name not in _WITHOUT_EFFECT | _READ and not is_neutral(value):
            raise refuse(
                "E_UNKNOWN_FIELD",
                f"lora_parameters has {shown(name)} = {shown(value)}, and lorad does not know it",
                "if it does not change the arithmetic, remove it; else a newer lorad is needed",
            )
