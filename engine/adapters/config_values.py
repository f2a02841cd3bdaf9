"""Single values of an adapter_config.json, of the kind that they must be or refused by name.

Goes in: a value and the field's name.  Comes out: the value, or AdapterInvalid.  Knows no field.
"""

from collections.abc import Callable
from typing import Any

from engine.adapters.manifest import CONFIG_FILE, Limits
from engine.adapters.reasons import refuse, shown


def read_flag(config: dict[str, Any], name: str) -> bool:
    """true or false; absent and null are false.  Raises AdapterInvalid."""
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise bad_value(name, value, "true or false")


def read_rank(value: Any, name: str, limits: Limits) -> int:
    """A whole number from 1 to the limit.  Raises AdapterInvalid, naming the field."""
    if type(value) is not int or value < 1:
        raise bad_value(name, value, "a whole number above 0")
    if value > limits.max_rank:
        raise rank_too_large(f"{name} is {shown(value)}", limits)
    return int(value)


def rank_too_large(found: str, limits: Limits) -> Exception:
    """The refusal of a rank above the limit, naming the setting."""
    return refuse(
        "E_RANK_TOO_LARGE",
        f"{found}, allowed are {limits.max_rank}",
        "raise `[lora] max_rank` and restart, or train with a smaller rank",
    )


def read_alpha(value: Any, name: str) -> float:
    """A number that is finite in float32.  Raises AdapterInvalid, naming the field."""
    if value is None:
        raise refuse(
            "E_ALPHA", f"{name} is absent or null", f"set {name} to the value used in training"
        )
    if type(value) not in (int, float):
        raise bad_value(name, value, "a number")
    if not -3e38 < value < 3e38:
        raise refuse("E_ALPHA", f"{name} is {shown(value)}", f"set {name} to the value of training")
    return float(value)


def read_pattern(
    config: dict[str, Any], name: str, read: Callable[[Any, str], Any]
) -> tuple[tuple[str, Any], ...]:
    """(key, value) of an object, in file order, each value by `read`.  Raises AdapterInvalid."""
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad_value(name, value, "an object of pattern: number")
    for key in value:
        if not key.isprintable():  # lone surrogates too, which no encoder takes
            raise bad_value(name, key, "a pattern of printable characters")
    return tuple((key, read(each, f"{name}[{shown(key)}]")) for key, each in value.items())


def read_targets(value: Any) -> list[str] | str | None:
    """Only good for a warning, so a strange value is as good as none."""
    if isinstance(value, list):
        return [each for each in value if isinstance(each, str)]
    return value if isinstance(value, str) else None


def read_names(value: Any) -> tuple[str, ...]:
    """The words of a list, each once; () for anything else."""
    if not isinstance(value, list):
        return ()
    return tuple(dict.fromkeys(each for each in value if isinstance(each, str)))


def bad_value(name: str, value: Any, wanted: str) -> Exception:
    """The refusal of a field's value; the caller raises it."""
    return refuse(
        "E_CONFIG_VALUE",
        f"{name} is {shown(value)}, wanted is {wanted}",
        f"correct {name} in {CONFIG_FILE}",
    )
