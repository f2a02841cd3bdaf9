"""A classification head of an adapter's own: modules_to_save of `classifier` or `score`, and what
else of the head was trained.

Goes in: the file's tensors, the config's settings, the base's spec.  Comes out: the head's parts as
modules of their own, and all the other tensors.  A part is a tensor that stands in the place of the
base's; what an adapter lacks is taken from there.  Torch-free; looks at no values.
"""

from dataclasses import dataclass

from engine.adapters.manifest import FLOAT_DTYPES, PairTensors, TensorRef
from engine.adapters.peft_config import LoraSettings
from engine.adapters.reasons import refuse, shown
from engine.messages import PackedModule
from engine.models.bases import BaseSpec, namer
from engine.models.head_spec import HeadSpec

#: What PEFT lists for every classifier, whichever of them the model has.
USUAL = frozenset(("classifier", "score"))


@dataclass(frozen=True, slots=True)
class OwnHead:
    """Parts by the engine's names, and which of modules_to_save brought them."""

    parts: dict[str, TensorRef]
    saved: frozenset[str]


def take_head(
    refs: tuple[TensorRef, ...], settings: LoraSettings, spec: BaseSpec
) -> tuple[OwnHead, tuple[TensorRef, ...]]:
    """An adapter's head, and the other tensors.  Raises AdapterInvalid."""
    if spec.head is None:
        return OwnHead({}, frozenset()), refs
    rename = namer(spec)
    parts: dict[str, TensorRef] = {}
    rest, saved = [], set[str]()
    for ref in refs:
        name = _published(ref.name)
        listed = [s for s in settings.modules_to_save if f".{s}." in f".{name}"]
        part = rename(name)
        if not listed or part not in spec.head.parts:
            rest.append(ref)
            continue
        if part in parts:
            raise refuse(
                "E_DUPLICATE_MODULE",
                f"{shown(parts[part].name)} and {shown(ref.name)} are both the head's {part}",
                "keep the one of the two that was trained",
            )
        parts[part] = ref
        saved.update(s.rpartition(".")[2] for s in listed)
    _check(parts, spec.head, spec.hidden_size)
    return OwnHead(parts, frozenset(saved | USUAL if parts else saved)), tuple(rest)


def head_modules(head: OwnHead, spec: BaseSpec) -> tuple[tuple[PackedModule, PairTensors], ...]:
    """In stream order, behind every pair.  A vector is as many rows of the hidden size as hold it,
    the last one filled up with zeros."""
    if spec.head is None:
        return ()
    made = []
    for part in spec.head.parts:
        if part in head.parts:
            ref = head.parts[part]
            rows = ref.shape[0] if len(ref.shape) == 2 else -(-ref.shape[0] // spec.hidden_size)
            module = PackedModule(spec.num_layers, f"{part}.rows", rows, 1.0)
            made.append((module, PairTensors(ref, None)))
    return tuple(made)


def _published(name: str) -> str:
    segments = name.split(".")
    while segments[:2] == ["base_model", "model"]:
        del segments[:2]
    return ".".join(s for s in segments if s != "modules_to_save")


def _check(parts: dict[str, TensorRef], spec: HeadSpec, hidden: int) -> None:
    absent = [part for part in spec.scores if part not in parts]
    if absent and len(absent) < len(spec.scores):
        raise refuse(
            "E_HALF_PAIR",
            f"the file has a head of its own without {absent[0]}",
            "the file is incomplete: save the adapter again",
        )
    labels = parts["score.weight"].shape[0] if "score.weight" in parts else 0
    for part, ref in parts.items():
        rows = labels if part in spec.scores else hidden
        square = part in ("head.dense.weight", "score.weight")
        wanted = (rows, hidden) if square else (rows,)
        if ref.dtype not in FLOAT_DTYPES:
            raise refuse(
                "E_DTYPE",
                f"{shown(ref.name)} has dtype {ref.dtype}",
                "save the adapter as float32, bfloat16 or float16",
            )
        if ref.shape != wanted or not rows:
            raise refuse(
                "E_SHAPE",
                f"{shown(ref.name)} is {list(ref.shape)}, wanted {list(wanted)}",
                "it was probably made for another model: serve it on that one",
            )
