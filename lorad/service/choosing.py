"""Choosing: which of several models an adapter is for.

Goes in: a staged folder, and what is known of its name and from whoever brings it.  Comes out: the
model, and what its inspection found.  Said is better than read, and read better than guessed: what
an operator names, what the name was before, the only base that it fits, and of several that one
which its adapter_config.json names.  Never a guess: else it is refused with the next step.
"""

import json
from pathlib import Path, PurePath

from lorad.errors import LoradError
from lorad.registry.records import AdapterRecord
from lorad.registry.store import StagingDir
from lorad.service.intake import Found
from lorad.service.lineup import Lineup, ModelAdapters
from lorad.service.names import Names, model_of

#: A config of an adapter is no longer.
_MAX_CONFIG_BYTES = 1 << 20


async def choose(
    lineup: Lineup,
    names: Names,
    staging: StagingDir,
    name: str,
    told: str,
    before: AdapterRecord | None,
) -> tuple[ModelAdapters, Found | None]:
    """`told` "": nobody said; `before`: what the registry has under `name`.  None: only one model
    comes into question, which has not looked yet.  Raises invalid_value, name_taken, and
    adapter_invalid for what fits none, or several."""
    names.check_model(told)
    wanted = lineup[told] if told else None
    owner = _owner(lineup, names, before)
    if owner is not None and wanted not in (None, owner):
        assert wanted is not None
        raise LoradError(
            "name_taken",
            f"{name!r} is an adapter of {owner.model}, and not of {wanted.model}",
            hint=f"loractl rm {name}, or choose another name",
            details={"reason": "E_NAME_TAKEN"},
        )
    only = wanted or owner or (lineup.first if len(lineup) == 1 else None)
    if only is not None:
        return only, None
    fits: dict[str, Found] = {}
    refusals: dict[str, LoradError] = {}
    for one in lineup:
        try:
            fits[one.model] = await one.intake.find(staging)
        except LoradError as error:
            if error.code != "adapter_invalid":
                raise
            refusals[one.model] = error
    if len(fits) > 1:
        named = _named_base(staging.path)
        fits = {model: f for model, f in fits.items() if named and model in named} or fits
    if len(fits) == 1:
        ((model, found),) = fits.items()
        return lineup[model], found
    raise _ambiguous(name, list(fits)) if fits else _unfit(refusals)


def _owner(lineup: Lineup, names: Names, before: AdapterRecord | None) -> ModelAdapters | None:
    """The model that a name with content is bound to.  Raises name_taken for one that is not served
    any more: until the flip, or for good, another base would run that content."""
    if before is None or not (before.serving_rev or before.candidate_rev):
        return None
    owner = lineup.get(model_of(before, names.models))
    if owner is None:
        raise LoradError(
            "name_taken",
            f"{before.name!r} is an adapter of {before.model!r}, which is not served here",
            hint=f"loractl rm {before.name}, or choose another name",
            details={"reason": "E_NAME_TAKEN"},
        )
    return owner


def _named_base(folder: Path) -> tuple[str, ...]:
    """How the base may be called that its config names: "org/name" is "name" too."""
    try:
        with open(folder / "adapter_config.json", "rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
        base = str(config.get("base_model_name_or_path") or "")
    except (OSError, ValueError, RecursionError, AttributeError):
        return ()
    return (base, PurePath(base).name) if base else ()


def _ambiguous(name: str, models: list[str]) -> LoradError:
    return LoradError(
        "adapter_invalid",
        f"it fits {', '.join(models)}, and nobody said which it is for",
        details={"reason": "E_MODEL"},
        hint=f"loractl add DIR --name {name} --model {models[0]}; "
        f'in the inbox: model = "{models[0]}" in its lorad.toml',
    )


def _unfit(refusals: dict[str, LoradError]) -> LoradError:
    """The reason that all of them have, or else that it fits none."""
    errors = list(refusals.values())
    if len({(e.message, e.details.get("reason")) for e in errors}) == 1:
        return errors[0]  # a truncated file, say, is no question of the model
    words = "; ".join(f"{model}: {error.message}" for model, error in refusals.items())
    return LoradError(
        "adapter_invalid",
        f"it fits no model that is served ({words})",
        details={"reason": "E_MODEL"},
        hint="--model NAME tells what that model has against it",
    )
