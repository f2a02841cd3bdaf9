"""What stands beside a module's A and B, and whether config and tensors agree on it.

Goes in: the pairs, their shapes checked, and the config's settings.  Comes out: warnings, or
AdapterInvalid.  PEFT builds what the config says and drops other tensors in silence; here a tensor
that PEFT would drop is refused, as nobody can say which of the two is meant.
"""

from engine.adapters.manifest import TensorRef
from engine.adapters.peft_config import LoraSettings
from engine.adapters.peft_keys import Pair
from engine.adapters.reasons import refuse, shown_list


def check_extras(pairs: tuple[Pair, ...], settings: LoraSettings) -> list[str]:
    """Biases and magnitudes are with every pair or with none, as the config says.  Raises
    AdapterInvalid."""
    biases = [pair.tensors.bias for pair in pairs]
    magnitudes = [pair.tensors.magnitude for pair in pairs]
    if settings.lora_bias and not any(biases):  # PEFT starts them at zero and loads what there is
        return ["lora_bias is set, but the file holds no biases: they are taken as zero"]
    _agree("lora_bias", "E_LORA_BIAS", "lora_B.bias", settings.lora_bias, pairs, biases)
    _agree("use_dora", "E_DORA", "magnitude", settings.dora, pairs, magnitudes)
    return []


def _agree(
    field: str,
    code: str,
    word: str,
    said: bool,
    pairs: tuple[Pair, ...],
    found: list[TensorRef | None],
) -> None:
    there = [ref.name for ref in found if ref is not None]
    without = [pair.name for pair, ref in zip(pairs, found, strict=True) if ref is None]
    if there and not said:
        raise refuse(
            code,
            f"{field} is not set, but the file holds {shown_list(there)}",
            f"set {field} to true, if it was so in training",
        )
    if said and without:
        raise refuse(
            "E_HALF_PAIR",
            f"{field} is set, but there is no {word} of {shown_list(without)}",
            "the file is incomplete: save the adapter again",
        )
