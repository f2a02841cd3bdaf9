"""What stands beside a module's A and B, and whether config and tensors agree on it; and what the
config adds at the model's ends.

Goes in: the pairs, their shapes checked, and the config's settings.  Comes out: warnings, or
AdapterInvalid.  PEFT builds what the config says and drops other tensors in silence; here a tensor
that PEFT would drop is refused, as nobody can say which of the two is meant.
"""

from msgspec import structs

from engine.adapters.manifest import PairTensors, TensorRef
from engine.adapters.peft_config import LoraSettings
from engine.adapters.peft_keys import Pair
from engine.adapters.reasons import refuse, shown_list
from engine.layout import ENDS


def check_extras(pairs: tuple[Pair, ...], settings: LoraSettings) -> list[str]:
    """Biases and magnitudes are with every pair or with none, as the config says.  Raises
    AdapterInvalid."""
    biases = [pair.tensors.bias for pair in pairs]
    magnitudes = [pair.tensors.magnitude for pair in pairs]
    if settings.alora_tokens and any(pair.module == "embed_tokens" for pair in pairs):
        raise refuse(  # PEFT refuses the pair too
            "E_ALORA",
            "an aLoRA has factors on the embedding",
            "train it without the embedding as a target",
        )
    if settings.lora_bias and not any(biases):  # PEFT starts them at zero and loads what there is
        return ["lora_bias is set, but the file holds no biases: they are taken as zero"]
    _agree("lora_bias", "E_LORA_BIAS", "lora_B.bias", settings.lora_bias, pairs, biases)
    _agree("use_dora", "E_DORA", "magnitude", settings.dora, pairs, magnitudes)
    return []


def with_tied_head(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """The pairs of an adapter with ensure_weight_tying on a tied base: the head has the embedding's
    factors, each for the other, also where the file holds them once.  What PEFT saves of the head
    is the same numbers."""
    ends = {pair.module: pair for pair in pairs if pair.module in ENDS}
    if "embed_tokens" not in ends or "lm_head" in ends:
        return pairs
    embedding = ends["embed_tokens"]
    assert embedding.tensors.b is not None
    tensors = PairTensors(_turned(embedding.tensors.b), _turned(embedding.tensors.a))
    return (*pairs, Pair(embedding.layer, "lm_head", "lm_head", tensors))


def _turned(ref: TensorRef) -> TensorRef:
    return structs.replace(ref, shape=ref.shape[::-1], transposed=True)


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
