"""The names of an adapter's tensors: which pair of which layer each one is.

Names are parsed by structure, segment by segment, never by string replacement.  Many tools write
them in many ways (prefixes, wrappers, the adapter's own name left in); whatever maps to a module of
the base without doubt is taken, everything else is refused by the name of what it is.

Goes in: the header's tensors and the base's spec.  Comes out: a Pair for each module, or
AdapterInvalid.  Knows nothing of ranks, scaling or bytes.
"""

import re
from dataclasses import dataclass, replace

from msgspec import structs

from engine.adapters.adapter_folder import mlx
from engine.adapters.fused_base import module_names, parts_of
from engine.adapters.manifest import PairTensors, TensorRef
from engine.adapters.reasons import refuse, shown, shown_list
from engine.layout import ENDS, FUSED_NAMES, HEAD_DENSE, MODULE_ID, PAIRED_ENDS
from engine.models.bases import BaseSpec
from engine.models.encoder_spec import EncoderSpec

#: Segments that training wrappers (DDP, torch.compile, FSDP, checkpointing) put anywhere in a name.
_WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_TARGET = re.compile(
    r"(?:(?:model|language_model|text_model)\.)*layers\.(0|[1-9][0-9]{0,5})"
    r"\.(self_attn\.(?:[qkvo]|qkv)_proj|mlp\.(?:gate|up|down|gate_up)_proj)"
)
#: What is at the model's ends, by the names that tools give it.
_ENDS = {"lm_head": "lm_head", "unembed_tokens": "lm_head", "embed_tokens": "embed_tokens"}
_END = re.compile(rf"(?:(?:model|language_model|text_model)\.)*({'|'.join(_ENDS)})")
_VISION = frozenset(
    [
        "visual",
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "multi_modal_projector",
        "mm_projector",
        "embed_vision",
        "audio_tower",
        "embed_audio",
    ]
)
_EXPERTS = frozenset(
    [
        *("experts", "block_sparse_moe", "shared_expert", "shared_experts"),
        *("shared_expert_gate", "gate", "router"),  # what picks them
    ]
)
#: Projections to and from the latents of DeepSeek's attention, and of those that took it over.
_LATENTS = frozenset(
    ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "fused_qkv_a_proj_with_mqa"]
)
_HEADS = frozenset(["lm_head", "unembed_tokens", "embed_out"])
_EMBEDDINGS = frozenset(["embed_tokens", "wte", "word_embeddings", "tok_embeddings"])
#: Buffers that old checkpoints and converters carry along; they say nothing about the adapter.
_BUFFERS = frozenset(["inv_freq", "rope_freqs", "position_ids"])

_RETRAIN = "train without it, or merge it into the base"
#: code -> (what the tensors are, hint), for refusals that need no more than the names.
_KINDS: dict[str, tuple[str, str]] = {
    "E_VISION": (
        "the vision or audio part cannot be applied to a text base",
        "train with the text layers as the only targets",
    ),
    "E_MOE": (
        "LoRA on MoE experts, the base is dense",
        "serve it on the mixture-of-experts base that it was trained on",
    ),
    "E_MLA": (
        "LoRA on multi-head latent attention (MLA), the base has keys and values of its own width",
        "serve it on the base that it was trained on, or train q_proj, k_proj and v_proj of this",
    ),
    "E_EMBEDDING_LORA": (
        "on the embedding, and no factors that PEFT saves there",
        "train without the embedding as a target, or with PEFT and neither DoRA nor lora_bias",
    ),
    "E_HEAD_LORA": ("LoRA on another family's output head", "serve it on the base of its training"),
    "E_TRAINABLE_TOKENS": ("trained token rows", "train without trainable_token_indices"),
    "E_KOHYA": ("LoRA for an image model", "serve it with an image pipeline"),
    "E_LYCORIS": ("LyCORIS factors (LoHa, LoKr)", "train or convert it as plain LoRA"),
    "E_PEFT_TYPE": ("AdaLoRA factors, not LoRA", "train or convert it as plain LoRA"),
    "E_KASA": ("KaSA diagonals", "train or convert it as plain LoRA"),
    "E_MONTECLORA": ("MonteCLoRA samplers", "train or convert it as plain LoRA"),
    "E_BIAS": ("trained biases", 'train with bias="none"'),
    "E_BASE_COPY": (
        "copies of base weights, which differ from this base's",
        "serve it on the base that it was trained on, or train without changing that",
    ),
    "E_MODULES_TO_SAVE": ("whole replacement weights", _RETRAIN),
    "E_UNKNOWN_TENSOR": ("tensors of an unknown kind", "save the adapter again with PEFT"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One LoRA pair.  `name` is the module's name in the model that was trained, which is what
    PEFT matches patterns against."""

    layer: int
    module: str
    name: str
    tensors: PairTensors

    @property
    def rank(self) -> int:
        """The tensors' own; known to be there once shapes are checked."""
        return self.tensors.a.shape[0]


#: What a module's tensors can be, and how each is called in a message.
_SIDES = {
    "A": "lora_A",
    "B": "lora_B",
    "bias": "lora_B.bias",
    "magnitude": "lora_magnitude_vector",
}
_BARE = {  # these stand at a name's end, or ahead of the adapter's
    "lora_magnitude_vector": "magnitude",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
}
_FACTORS = ("lora_A", "lora_B", *_BARE)
_MLX_SIDES = {"lora_a": "A", "lora_b": "B", "m": "magnitude"}
_ENDINGS = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_B.bias": "bias"}


@dataclass(frozen=True, slots=True)
class _Factor:
    ref: TensorRef
    side: str  # one of _SIDES
    name: str  # of the module, wrappers and PEFT's prefix stripped
    adapter: str | None  # the adapter's name, where it was left in


def shape_of(ref: TensorRef) -> str:
    """A tensor's shape, for messages."""
    return f"{list(ref.shape)} (transposed)" if ref.transposed else f"{list(ref.shape)}"


def find_pairs(
    refs: tuple[TensorRef, ...], spec: BaseSpec, *, mlx_names: bool = False
) -> tuple[Pair, ...]:
    """Every pair, in stream order; `mlx_names`: the config is mlx-lm's, and so must names be.
    Raises AdapterInvalid unless all tensors are accounted for."""
    factors: list[_Factor] = []
    others: dict[str, list[TensorRef]] = {}
    for ref in refs:
        found = _classify(ref, mlx_names)
        if isinstance(found, _Factor):
            factors.append(found)
        elif found is not None:
            others.setdefault(found, []).append(ref)
    _refuse_others(others, spec, mlx_names)
    _refuse_mixture(factors)
    return _pair_up(factors, spec)


def _classify(ref: TensorRef, mlx_names: bool) -> _Factor | str | None:
    """A factor, or the code to refuse the tensor with, or None for one without meaning."""
    segments = [s for s in ref.name.split(".") if s not in _WRAPPERS]
    while segments[:2] == ["base_model", "model"]:
        del segments[:2]
    factors = _MLX_SIDES if mlx_names else _FACTORS
    place = next((i for i, s in enumerate(segments) if s in factors), None)
    if place is None:
        return _kind_without_factor(ref.name, segments)
    path, tail = segments[:place], segments[place + 1 :]
    if not _VISION.isdisjoint(path):
        return "E_VISION"
    if not _EXPERTS.isdisjoint(path):
        return "E_MOE"
    if path and path[-1] in _LATENTS:
        return "E_MLA"
    if path and path[-1] in _HEADS - _ENDS.keys():
        return "E_HEAD_LORA"
    of_embedding = segments[place].startswith("lora_embedding_")
    if of_embedding != bool(path and path[-1] in _EMBEDDINGS):
        return "E_EMBEDDING_LORA"
    if mlx_names:
        side, names = _MLX_SIDES[segments[place]], tail
        if side in ("A", "B"):
            ref = structs.replace(ref, shape=ref.shape[::-1], transposed=True)
    elif segments[place] in _BARE:
        side, names = _BARE[segments[place]], tail[:-1] if tail[-1:] == ["weight"] else tail
    else:
        side, names = _ENDINGS.get(".".join((segments[place], *tail[-1:])), ""), tail[:-1]
    if not side or len(names) > (0 if mlx_names else 1):
        return "E_UNKNOWN_TENSOR"
    return _Factor(ref, side, ".".join(path), names[0] if names else None)


def _kind_without_factor(name: str, segments: list[str]) -> str | None:
    """The code for a tensor that is neither lora_A nor lora_B; None if it may be ignored."""
    last = segments[-1] if segments else ""
    there = _MARKED.intersection(segments)
    if there:
        return next((code for code, marks in _MARKS if not there.isdisjoint(marks)), None)
    if name.startswith(("lora_unet_", "lora_te")) or last == "alpha":
        return "E_KOHYA"
    if any(segment.startswith(("hada_", "lokr_")) for segment in segments):
        return "E_LYCORIS"
    if "base_layer" in segments:
        return "E_BIAS" if last == "bias" else "E_BASE_COPY"
    return {"bias": "E_BIAS", "weight": "E_MODULES_TO_SAVE"}.get(last, "E_UNKNOWN_TENSOR")


#: code -> segments of which one is enough; looked through in this order.
_MARKS: tuple[tuple[str | None, frozenset[str]], ...] = (
    (None, _BUFFERS),
    ("E_VISION", _VISION),
    ("E_MOE", _EXPERTS),
    ("E_TRAINABLE_TOKENS", frozenset(("trainable_tokens_delta", "token_adapter"))),
    ("E_MLX", frozenset(("lora_a", "lora_b"))),  # or PEFT's, where the config is MLX's
    ("E_MLX", frozenset(_FACTORS)),
    ("E_KOHYA", frozenset(("lora_down", "lora_up", "dora_scale"))),
    ("E_PEFT_TYPE", frozenset(("lora_E", "ranknum"))),
    ("E_KASA", frozenset(("lora_diag",))),
    ("E_MONTECLORA", frozenset(("lora_monteclora_sampler",))),
    ("E_MODULES_TO_SAVE", frozenset(("modules_to_save", "classifier", "score", "v_head"))),
)
_MARKED = frozenset().union(*(marks for _, marks in _MARKS))


def _refuse_others(others: dict[str, list[TensorRef]], spec: BaseSpec, mlx_names: bool) -> None:
    if "E_MLX" in others:
        names = shown_list(ref.name for ref in others["E_MLX"])
        whose, other = ("MLX", "PEFT") if mlx_names else ("PEFT", "MLX")
        raise mlx(f"the config is {whose}'s, but the tensors are {other}'s: {names}")
    if "E_MODULES_TO_SAVE" in others:
        for ref in others["E_MODULES_TO_SAVE"]:
            _refuse_resized(ref, spec)
    for code, (meaning, hint) in _KINDS.items():
        if code in others:
            named = (f"{ref.name} {list(ref.shape)}" for ref in others[code])
            raise refuse(code, f"{meaning}: {shown_list(named)}", hint)


def _refuse_resized(ref: TensorRef, spec: BaseSpec) -> None:
    """Refuse weights of another family's head or embedding that are of another vocabulary."""
    ends = _HEADS | _EMBEDDINGS
    if ends.isdisjoint(ref.name.split(".")) or len(ref.shape) != 2:
        return
    if ref.shape[0] != spec.vocab_size:
        raise refuse(
            "E_VOCAB_RESIZED",
            f"{shown(ref.name)} is for {ref.shape[0]} tokens, the base has {spec.vocab_size}",
            "train without added tokens, or serve the resized model itself as the base",
        )


def _refuse_mixture(factors: list[_Factor]) -> None:
    # Old versions left the name in magnitudes alone.
    marked = {f.adapter for f in factors if f.side == "magnitude" and f.adapter}
    plain = {f.adapter for f in factors if f.side != "magnitude"}
    if len(marked) == 1 and plain == {None}:
        return
    names = sorted(name or "(none)" for name in marked | plain)
    if len(names) > 1:
        raise refuse(
            "E_MIXED_ADAPTERS",
            f"the tensors belong to {len(names)} adapters: {shown_list(names)}",
            "save each adapter into a folder of its own",
        )


def _pair_up(factors: list[_Factor], spec: BaseSpec) -> tuple[Pair, ...]:
    halves: dict[tuple[int, str], dict[str, _Factor]] = {}
    unknown: list[str] = []
    beyond: list[str] = []
    for factor in factors:
        place = _place_of(factor.name, spec)
        if place is None:
            unknown.append(factor.ref.name)
            continue
        layer, module = place
        if layer >= spec.num_layers and module not in ENDS:
            beyond.append(factor.ref.name)
            continue
        for part, ref in parts_of(module, factor.side, factor.ref, spec).items():
            sides = halves.setdefault((layer, part), {})
            if factor.side in sides:
                raise refuse(
                    "E_DUPLICATE_MODULE",
                    f"{shown(sides[factor.side].ref.name)} and {shown(factor.ref.name)} are both"
                    f" {_SIDES[factor.side]} of {_where(layer, part)}",
                    "keep the one of the two that was trained",
                )
            sides[factor.side] = replace(factor, ref=ref)
    _refuse_unmatched(unknown, beyond, bool(halves), spec)
    broken = [
        f"{next(iter(sides.values())).ref.name} has no {_SIDES[side]}"
        for sides in halves.values()
        for side in ("A", "B")
        if side not in sides
    ]
    if broken:
        raise refuse(
            "E_HALF_PAIR",
            f"half a pair: {shown_list(dict.fromkeys(broken))}",
            "the file is incomplete: save the adapter again",
        )
    order = sorted(halves, key=lambda key: (key[0], MODULE_ID[key[1]]))
    return tuple(
        Pair(layer, module, sides["A"].name, _tensors(sides))
        for layer, module in order
        for sides in (halves[layer, module],)
    )


def _where(layer: int, module: str) -> str:
    return module if module in ENDS else f"{module} in layer {layer}"


def _place_of(name: str, spec: BaseSpec) -> tuple[int, str] | None:
    """Layer and module, whether there is such a layer or not; None if there is no such module."""
    if isinstance(spec, EncoderSpec):
        return spec.place_of(name)
    if end := _END.fullmatch(name):
        return spec.num_layers, _ENDS[end[1]]
    match = _TARGET.fullmatch(name)
    module = match[2].rpartition(".")[2] if match else ""
    if match is None or (module in FUSED_NAMES and not spec.fused_names):
        return None
    return int(match[1]), module


def _tensors(sides: dict[str, _Factor]) -> PairTensors:
    refs = {side: factor.ref for side, factor in sides.items()}
    return PairTensors(refs["A"], refs["B"], refs.get("bias"), refs.get("magnitude"))


def _refuse_unmatched(
    unknown: list[str], beyond: list[str], any_match: bool, spec: BaseSpec
) -> None:
    ends = (HEAD_DENSE,) if isinstance(spec, EncoderSpec) else PAIRED_ENDS
    has = (
        f"the base has {', '.join(module_names(spec))} in layers 0 to {spec.num_layers - 1},"
        f" and {', '.join(ends)}"
    )
    if not any_match and not beyond:
        hidden, out = spec.shapes.dims[0]
        found = f"such as {shown(unknown[0])}" if unknown else "the file holds no LoRA tensor"
        raise refuse(
            "E_NO_MATCH",
            f"none of {len(unknown)} LoRA tensors belongs to the base, {found}; {has},"
            f" q_proj is [{out}, {hidden}]",
            "it was made for another model: serve it on that one",
        )
    if unknown:
        raise refuse(
            "E_UNKNOWN_MODULE",
            f"{len(unknown)} LoRA tensors are for modules that the base lacks:"
            f" {shown_list(unknown)}; {has}",
            "train with the base's own modules as targets",
        )
    if beyond:
        raise refuse(
            "E_LAYER_RANGE",
            f"{len(beyond)} LoRA tensors are for layers that the base lacks:"
            f" {shown_list(beyond)}; {has}",
            "it was made for a deeper model: serve it on that one",
        )
