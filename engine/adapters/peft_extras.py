"""What stands beside a module's A and B: biases, and whether config and tensors agree on them.

Goes in: the pairs, their shapes checked, and the config's settings.  Comes out: warnings, or
AdapterInvalid.  PEFT builds what the config says and drops other tensors in silence; here a tensor
that PEFT would drop is refused, as nobody can say which of the two is meant.
"""

from engine.adapters.peft_config import LoraSettings
from engine.adapters.peft_keys import Pair
from engine.adapters.reasons import refuse, shown_list


def check_extras(pairs: tuple[Pair, ...], settings: LoraSettings) -> list[str]:
    """Every pair has its bias or none has, as the config says.  Raises AdapterInvalid."""
    biases = [pair.tensors.bias for pair in pairs if pair.tensors.bias is not None]
    without = [pair.name for pair in pairs if pair.tensors.bias is None]
    if biases and not settings.lora_bias:
        raise refuse(
            "E_LORA_BIAS",
            f"lora_bias is not set, but there are biases: {shown_list(b.name for b in biases)}",
            "set lora_bias to true, if it was so in training",
        )
    if biases and without:
        raise refuse(
            "E_HALF_PAIR",
            f"lora_bias is set, but there is no lora_B.bias of {shown_list(without)}",
            "the file is incomplete: save the adapter again",
        )
    if settings.lora_bias and not biases:  # PEFT starts them at zero and loads what there is
        return ["lora_bias is set, but the file holds no biases: they are taken as zero"]
    return []
