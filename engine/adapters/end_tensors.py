"""What an adapter's file holds of the embedding and the head, beside pairs: whole weights, copies
of the base as it was trained on, trained tokens.

Goes in: the file's tensors, the config's settings, the base's spec.  Comes out: an `End` for each
of the two, and all the other tensors.  What the config does not speak of stays among those, for
whoever reads names to refuse.  Torch-free; looks at names and shapes, at no values.

As PEFT has it (0.21): weights that modules_to_save lists are the adapter's alone.  All others are
written into the base, so they are what the adapter's factors and trained tokens stand on; it saves
them where the embedding has another size than the base's.  With modules_to_save it saves an end up
to three times: by its name, as `modules_to_save` and as `original_module`.

Where head and embedding of the base are one tensor, what is written into one is written into both,
and trained tokens change both, unless the head has some of its own; listed weights change one
alone, unless ensure_weight_tying is set.
"""

import re
from dataclasses import dataclass

from engine.adapters.manifest import FLOAT_DTYPES, TensorRef
from engine.adapters.peft_config import LoraSettings
from engine.adapters.reasons import refuse, shown
from engine.layout import PAIRED_ENDS
from engine.models.bases import BaseSpec

_PREFIX = r"(?:base_model\.)?(?:(?:model|language_model|text_model)\.)*"
_END = re.compile(rf"{_PREFIX}(embed_tokens|lm_head)\.([a-z_.]+)")
_AGAIN = ("modules_to_save.weight", "modules_to_save.default.weight")
_COPIES = ("base_layer.weight", "original_module.weight", "token_adapter.base_layer.weight")
_TRAINED = tuple(f"token_adapter.trainable_tokens_delta{name}" for name in ("", ".default"))


@dataclass(slots=True)
class End:
    """Tensors of one end.  Of several that stand for the same, all must be equal."""

    own: tuple[TensorRef, ...] = ()  # [tokens, hidden]: the adapter's alone
    under: tuple[TensorRef, ...] = ()  # [tokens, hidden]: the base as it was trained on, resized
    trained: TensorRef | None = None  # [len(ids), hidden]
    ids: tuple[int, ...] = ()

    @property
    def whole(self) -> tuple[TensorRef, ...]:
        """Those that have a row for each token."""
        return self.own or self.under


Ends = dict[str, End]


def take_ends(
    refs: tuple[TensorRef, ...], settings: LoraSettings, spec: BaseSpec
) -> tuple[Ends, tuple[TensorRef, ...]]:
    """What replaces rows, and the other tensors.  Raises AdapterInvalid."""
    ends = {name: End() for name in PAIRED_ENDS}
    saved = {name.rpartition(".")[2] for name in settings.modules_to_save}
    if settings.tying and spec.tied and "embed_tokens" in saved:  # PEFT takes it off the list
        saved.add("lm_head")
    rest = tuple(ref for ref in refs if not _take(ref, ends, saved, settings, spec))
    _check_trained(ends, settings, spec)
    for end in ends.values():
        for ref in (*end.own, *end.under, *([end.trained] if end.trained else ())):
            _check(ref, len(end.ids) if ref is end.trained else 0, spec)
    if spec.tied:
        _share(ends, settings)
    return ends, rest


def _take(
    ref: TensorRef, ends: Ends, saved: set[str], settings: LoraSettings, spec: BaseSpec
) -> bool:
    """Whether it was one of these; then it is in `ends`."""
    match = _END.fullmatch(ref.name)
    if match is None:
        return False
    name, kind = match[1], match[2]
    end, listed = ends[name], name in saved
    if listed and kind == "weight":
        if end.own and end.own[0].name.endswith(f"{name}.weight"):
            raise twice(end.own[0], ref, name)
        end.own = (ref, *end.own)
        return True
    if listed and kind in _AGAIN:
        end.own += (ref,)
        return True
    if kind in ("weight", *_COPIES):
        # One of the base's own size is a copy of it, or of another base's.
        resized = len(ref.shape) == 2 and ref.shape[0] != spec.vocab_size
        if resized:
            end.under += (ref,)
        return resized
    if kind in _TRAINED and (ids := _ids_of(name, settings, spec)):
        if end.trained is not None:
            raise twice(end.trained, ref, name)
        end.trained, end.ids = ref, ids
        return True
    return False


def _ids_of(name: str, settings: LoraSettings, spec: BaseSpec) -> tuple[int, ...]:
    """Of a tied base PEFT may save the embedding's tokens as the head's too."""
    ids = settings.tokens.get(name, ())
    tied = name == "lm_head" and spec.tied
    return ids or (settings.tokens.get("embed_tokens", ()) if tied else ())


def _check_trained(ends: Ends, settings: LoraSettings, spec: BaseSpec) -> None:
    for name, ids in settings.tokens.items():
        tied = name == "lm_head" and spec.tied and settings.tokens.get("embed_tokens") == ids
        if ends[name].trained is None and not tied:
            raise refuse(
                "E_TRAINABLE_TOKENS",
                f"trainable_token_indices lists {len(ids)} tokens of {name}, the file has no rows",
                "the file is incomplete: save the adapter again",
            )
        if len(set(ids)) < len(ids):
            raise refuse(
                "E_TRAINABLE_TOKENS",
                f"trainable_token_indices names a token of {name} twice",
                "list each token id once",
            )
    for name, end in ends.items():
        if end.own and not end.own[0].name.endswith(f"{name}.weight"):
            raise refuse(  # PEFT does not read it
                "E_MODULES_TO_SAVE",
                f"the file has {shown(end.own[0].name)} without {name}.weight",
                "the file is incomplete: save the adapter again",
            )
        if end.own and end.trained is not None:
            raise twice(end.own[0], end.trained, name)


def _check(ref: TensorRef, rows: int, spec: BaseSpec) -> None:
    """`rows` 0: as many as it has."""
    if ref.dtype not in FLOAT_DTYPES:
        raise refuse(
            "E_DTYPE",
            f"{shown(ref.name)} has dtype {ref.dtype}",
            "save the adapter as float32, bfloat16 or float16",
        )
    wanted = rows or (ref.shape[0] if len(ref.shape) == 2 else spec.vocab_size)
    if ref.shape != (wanted, spec.hidden_size):
        raise refuse(
            "E_SHAPE",
            f"{shown(ref.name)} is {list(ref.shape)}, wanted [{wanted}, {spec.hidden_size}]",
            "it was probably made for another model: serve it on that one",
        )
    if not wanted:
        raise refuse(
            "E_ZERO_SHARD",
            f"saved from a sharded run: {shown(ref.name)} {list(ref.shape)}",
            "gather the parameters before saving (ZeRO-3: zero_to_fp32.py; FSDP: full state dict)",
        )


def _share(ends: Ends, settings: LoraSettings) -> None:
    """The two are one tensor in the base."""
    embedding, head = ends["embed_tokens"], ends["lm_head"]
    embedding.under = head.under = (*embedding.under, *head.under)
    if head.own or head.trained is not None:
        return
    if settings.tying:
        head.own = embedding.own
    head.trained, head.ids = embedding.trained, embedding.ids


def twice(one: TensorRef, other: TensorRef, end: str) -> Exception:
    """The refusal of two that both change `end`; the caller raises it."""
    return refuse(
        "E_DUPLICATE_MODULE",
        f"{shown(one.name)} and {shown(other.name)} both change {end}",
        "keep the one of the two that was trained",
    )
