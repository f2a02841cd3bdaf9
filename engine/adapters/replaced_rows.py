"""Rows of the embedding or the head that an adapter replaces: modules_to_save of these two, and
trainable_token_indices.

Goes in: the file's tensors, the config's settings, the base's spec.  Comes out: the tensors that
are such rows, as modules of their own, and all the others.  A tensor that the config does not speak
of stays among those, for whoever reads names to refuse.  Torch-free; looks at no values.

Where head and embedding of the base are one tensor, PEFT lets trained tokens change both, unless
the head has some of its own; saved weights change one alone, unless ensure_weight_tying is set.
"""

import re

from engine.adapters.manifest import FLOAT_DTYPES, PairTensors, TensorRef
from engine.adapters.peft_config import LoraSettings
from engine.adapters.peft_keys import Pair, refuse_resized
from engine.adapters.reasons import refuse, shown
from engine.messages import PackedModule
from engine.models.bases import BaseSpec

_PREFIX = r"(?:base_model\.)?(?:(?:model|language_model|text_model)\.)*"
_WHOLE = re.compile(rf"{_PREFIX}(embed_tokens|lm_head)\.weight")
_TOKENS = re.compile(
    rf"{_PREFIX}(embed_tokens|lm_head)\.token_adapter\.trainable_tokens_delta(?:\.default)?"
)

#: End -> its tensor and the ids that it has rows for, () = all.
Found = dict[str, tuple[TensorRef, tuple[int, ...]]]


def take_replaced(
    refs: tuple[TensorRef, ...], settings: LoraSettings, spec: BaseSpec
) -> tuple[Found, tuple[TensorRef, ...]]:
    """What replaces rows, and the other tensors.  Raises AdapterInvalid."""
    found: Found = {}
    rest = []
    saved = {name.rpartition(".")[2] for name in settings.modules_to_save}
    if settings.tying and spec.tied and "embed_tokens" in saved:  # PEFT takes it off the list
        saved.add("lm_head")
    for ref in refs:
        whole, tokens = _WHOLE.fullmatch(ref.name), _TOKENS.fullmatch(ref.name)
        if whole and whole[1] in saved:
            ids: tuple[int, ...] = ()
            end = whole[1]
            refuse_resized(ref, spec)
        elif tokens and tokens[1] in settings.tokens:
            ids, end = settings.tokens[tokens[1]], tokens[1]
        else:
            rest.append(ref)
            continue
        if end in found:
            raise _twice(found[end][0], ref, end)
        _check(ref, ids, spec)
        found[end] = (ref, ids)
    for end, ids in settings.tokens.items():
        absent = end not in found or found[end][1] != ids
        tied = end == "lm_head" and spec.tied and settings.tokens.get("embed_tokens") == ids
        if absent and not tied:
            raise refuse(
                "E_TRAINABLE_TOKENS",
                f"trainable_token_indices lists {len(ids)} tokens of {end}, the file has no rows",
                "the file is incomplete: save the adapter again",
            )
    embedding = found.get("embed_tokens") if spec.tied else None
    if embedding is not None and (settings.tying or embedding[1]):
        found.setdefault("lm_head", embedding)
    return found, tuple(rest)


def modules_of(
    found: Found, pairs: tuple[Pair, ...], spec: BaseSpec
) -> tuple[tuple[PackedModule, PairTensors], ...]:
    """In stream order, behind every pair.  Raises AdapterInvalid for an end that has both."""
    made = []
    for end in sorted(found):
        ref, ids = found[end]
        both = [pair.tensors.a for pair in pairs if pair.module == end]
        if both:
            raise _twice(both[0], ref, end)
        module = PackedModule(spec.num_layers, f"{end}.rows", ref.shape[0], 1.0, tokens=ids)
        made.append((module, PairTensors(ref, None)))
    return tuple(made)


def _check(ref: TensorRef, ids: tuple[int, ...], spec: BaseSpec) -> None:
    rows = len(ids) or spec.vocab_size
    if ref.dtype not in FLOAT_DTYPES:
        raise refuse(
            "E_DTYPE",
            f"{shown(ref.name)} has dtype {ref.dtype}",
            "save the adapter as float32, bfloat16 or float16",
        )
    if ref.shape != (rows, spec.hidden_size):
        raise refuse(
            "E_SHAPE",
            f"{shown(ref.name)} is {list(ref.shape)}, wanted [{rows}, {spec.hidden_size}]",
            "it was probably made for another model: serve it on that one",
        )
    if ids and (len(set(ids)) < len(ids) or max(ids) >= spec.vocab_size):
        raise refuse(
            "E_TRAINABLE_TOKENS",
            f"trainable_token_indices names a token twice, or one of {spec.vocab_size} or above",
            "list the base's own token ids, each once",
        )


def _twice(one: TensorRef, other: TensorRef, end: str) -> Exception:
    return refuse(
        "E_DUPLICATE_MODULE",
        f"{shown(one.name)} and {shown(other.name)} both change {end}",
        "keep the one of the two that was trained",
    )
