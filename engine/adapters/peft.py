"""Inspection of an adapter folder: folder -> AdapterManifest, or AdapterInvalid with its reason.

Goes in: a folder with adapter_config.json and adapter_model.safetensors, or, as mlx-lm writes it,
adapters.safetensors; and the base's spec.
Comes out: everything that registry and packer need to know, or a refusal that says what was found,
what is allowed and what to do next.  Torch-free; runs no code from the folder, opens nothing
outside it, and never looks at the base model's name.

The order is from cheap to dear: names in the folder, config, header, tensor names, shapes, scaling,
and only then every byte.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.adapter_text import AdapterText, base_text, read_text
from engine.adapters.alora import check_invocation
from engine.adapters.base_copies import modules_without, without_copies
from engine.adapters.config_values import rank_too_large
from engine.adapters.digest import revision_digest
from engine.adapters.end_tensors import Ends, take_ends
from engine.adapters.heads import OwnHead, head_modules, take_head
from engine.adapters.manifest import (
    CONFIG_FILE,
    FLOAT_DTYPES,
    TEXT_FILES,
    WEIGHTS_FILE,
    AdapterManifest,
    Limits,
    PairTensors,
    TensorRef,
)
from engine.adapters.mlx_config import is_mlx, mlx_settings
from engine.adapters.patterns import MAX_TARGET_CHARS, Pattern, PatternRefused
from engine.adapters.peft_config import (
    LoraSettings,
    Scaling,
    peft_settings,
    read_config,
)
from engine.adapters.peft_extras import check_extras, with_tied_head
from engine.adapters.peft_keys import Pair, find_pairs, shape_of
from engine.adapters.reasons import REASONS, refuse, shown, shown_list
from engine.adapters.replaced_rows import replaced_rows
from engine.adapters.safetensors_header import read_header
from engine.adapters.value_scan import Scanner
from engine.adapters.vocabulary import vocabulary_of
from engine.errors import AdapterInvalid
from engine.layout import MODULE_ID, MODULES
from engine.messages import PackedModule
from engine.models.bases import BaseSpec, namer

__all__ = [
    "CONFIG_FILE",
    "REASONS",
    "TEXT_FILES",
    "WEIGHTS_FILE",
    "AdapterInvalid",
    "AdapterManifest",
    "Limits",
    "TensorRef",
    "base_text",
    "inspect",
    "inspect_text",
    "revision_digest",
]

_DEFAULT_LIMITS = Limits()
_KV_MODULES = ("k_proj", "v_proj", "embed_tokens", "embed_tokens.rows")


def inspect(
    folder: Path,
    spec: BaseSpec,
    limits: Limits = _DEFAULT_LIMITS,
    *,
    served_dtype: str = "auto",
    base: Path | None = None,
) -> AdapterManifest:
    """Read and check a whole adapter.  `served_dtype` is the arena's, to find values that overflow
    in it; "auto" leaves that check out.  `base` is the base model's folder: copies of its weights
    beside the adapter are ignored if they equal them, and without it refused; of a resized
    vocabulary they are looked through for rows that differ.  Raises AdapterInvalid."""
    with AdapterFolder(folder) as opened:
        settings, weights_file = _settings(opened, spec, limits)
        fd = opened.open(weights_file)
        try:
            held = _held(fd, weights_file, settings, spec, limits, base)
            ends, pairs, head = held.ends, held.pairs, held.head
            _check_shapes(pairs, spec, limits)
            warnings = [*settings.remarks, *check_extras(pairs, settings)]
            modules = _scale(pairs, settings, warnings)
            vocabulary = vocabulary_of(ends, pairs, spec)
            if settings.alora_tokens and vocabulary > spec.vocab_size:
                raise refuse(
                    "E_ALORA",
                    f"an aLoRA with {vocabulary - spec.vocab_size} tokens of its own: up to its"
                    " invocation it is the base, which has no such tokens",
                    "train it without added tokens, or as plain LoRA",
                )
            replaced = replaced_rows(ends, pairs, spec, fd, base)
            more = (*replaced.modules, *head_modules(head, spec))
            text = read_text(opened, vocabulary, spec, limits, base)
            warnings += _scan(fd, pairs, modules, served_dtype, more)
            file_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
    warnings += _target_warnings(pairs, settings, spec)
    warnings += [*replaced.warnings, *text.warnings]
    there = {module.module.removesuffix(".rows") for module, _ in replaced.modules}
    equal = held.copied | frozenset(replaced.equal)
    warnings += _saved_warnings(settings, {*there, *head.saved}, equal)
    ranks = _largest_ranks(modules)
    modules += tuple(module for module, _ in more)
    tensors = (*(pair.tensors for pair in pairs), *(held for _, held in more))
    dtypes = {FLOAT_DTYPES[ref.dtype] for held in tensors for ref in held.every}
    semantic = settings.semantic
    if vocabulary != spec.vocab_size:  # what is not listed is written into the base, and both ends
        semantic = semantic | {"modules_to_save": sorted(settings.modules_to_save)}
    return AdapterManifest(
        rank=max(ranks.values()),
        ranks=ranks,
        alpha=settings.alpha,
        rslora=settings.rslora,
        targets=(*ranks, *(module.module for module, _ in more)),
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        num_layers=len({pair.layer for pair in pairs} - {spec.num_layers}),
        file_bytes=file_bytes,
        modules=modules,
        tensors=tensors,
        changes_kv=changes_kv(modules, spec),
        warnings=tuple(warnings),
        semantic=semantic,
        text_files=text.files,
        weights_file=weights_file,
        num_tokens=text.num_tokens,
        own_tokenizer=text.own,
        base_text=text.base_text,
        alora_tokens=settings.alora_tokens,
    )


def inspect_text(
    folder: Path, spec: BaseSpec, limits: Limits = _DEFAULT_LIMITS, *, base: Path | None = None
) -> AdapterText:
    """Of a folder that passed once, what `inspect` says of its tokenizer: a fraction of the work,
    as no weights are looked through but copies of the base's.  Raises AdapterInvalid."""
    with AdapterFolder(folder) as opened:
        settings, weights_file = _settings(opened, spec, limits)
        fd = opened.open(weights_file)
        try:
            held = _held(fd, weights_file, settings, spec, limits, base)
        finally:
            os.close(fd)
        _check_shapes(held.pairs, spec, limits)
        return read_text(opened, vocabulary_of(held.ends, held.pairs, spec), spec, limits, base)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a weights file holds: `copied` are modules of which it has equal copies."""

    head: OwnHead
    ends: Ends
    pairs: tuple[Pair, ...]
    copied: frozenset[str]


def _settings(opened: AdapterFolder, spec: BaseSpec, limits: Limits) -> tuple[LoraSettings, str]:
    """And the name of the weights file."""
    opened.need_both_files()
    config = read_config(
        opened.read(CONFIG_FILE, limits.max_config, too_large="E_CONFIG_TOO_LARGE")
    )
    settings = (mlx_settings if is_mlx(config) else peft_settings)(config, limits)
    check_invocation(settings.alora_tokens, spec.vocab_size, generates=spec.generates)
    return settings, opened.weights_file(mlx=settings.mlx)


def _held(
    fd: int,
    weights_file: str,
    settings: LoraSettings,
    spec: BaseSpec,
    limits: Limits,
    base: Path | None,
) -> _Held:
    # Of a head and of ends all is taken, equal to the base's or not.
    head, others = take_head(read_header(fd, limits, weights_file), settings, spec)
    ends, others = take_ends(others, settings, spec)
    refs = without_copies(others, fd, base, namer(spec))
    pairs = find_pairs(refs, spec, mlx_names=settings.mlx)
    if settings.tying and spec.tied:
        pairs = with_tied_head(pairs)
    return _Held(head, ends, pairs, modules_without(others, refs))


def _check_shapes(pairs: tuple[Pair, ...], spec: BaseSpec, limits: Limits) -> None:
    """A is [r, d_in], B is [d_out, r], all else is [d_out], all of a float dtype."""
    _refuse_shards(pairs)
    wrong = []
    for pair in pairs:
        d_in, d_out = spec.shapes.of(pair.module)
        a, b, *rows = pair.tensors.every
        if pair.module == "embed_tokens":  # as many tokens as it says
            d_in = a.shape[-1]
        elif pair.module == "lm_head":
            d_out = b.shape[0]
        for ref in pair.tensors.every:
            if ref.dtype not in FLOAT_DTYPES:
                raise refuse(
                    "E_DTYPE",
                    f"{shown(ref.name)} has dtype {ref.dtype}",
                    "save the adapter as float32, bfloat16 or float16",
                )
        if len(a.shape) != 2 or a.shape[1] != d_in:
            wrong.append((a, f"[r, {d_in}]"))
        elif len(b.shape) != 2 or b.shape[0] != d_out:
            wrong.append((b, f"[{d_out}, r]"))
        elif b.shape[1] != a.shape[0]:
            wrong.append((b, f"[{d_out}, {a.shape[0]}] as lora_A has that rank"))
        wrong += [(ref, f"[{d_out}]") for ref in rows if ref.shape != (d_out,)]
    if wrong:
        ref, wanted = wrong[0]
        raise refuse(
            "E_SHAPE",
            f"{shown(ref.name)} is {shape_of(ref)}, wanted {wanted};"
            f" {len(wrong)} of {len(pairs)} pairs do not fit the base",
            "it was probably made for another model: serve it on that one",
        )
    for pair in pairs:
        if pair.rank > limits.max_rank:
            name = shown(pair.tensors.a.name)
            raise rank_too_large(f"{name} has rank {pair.rank}", limits)


def _refuse_shards(pairs: tuple[Pair, ...]) -> None:
    found = [
        f"{ref.name} {list(ref.shape)}"
        for pair in pairs
        for ref in pair.tensors.every[:2]
        if len(ref.shape) < 2 or 0 in ref.shape
    ]
    if found:
        raise refuse(
            "E_ZERO_SHARD",
            f"saved from a sharded run: {shown_list(found)}",
            "gather the parameters before saving (ZeRO-3: zero_to_fp32.py; FSDP: full state dict)",
        )


def _scale(
    pairs: tuple[Pair, ...], settings: LoraSettings, warnings: list[str]
) -> tuple[PackedModule, ...]:
    """Rank and scaling of every module; what is to be said about them is added to `warnings`."""
    rule = Scaling(settings)
    modules, unsaid = [], set()
    for pair in pairs:
        rank, said = pair.rank, rule.rank(pair.name)
        if said is None:
            unsaid.add(rank)
        elif said != rank:
            raise refuse(
                "E_RANK_MISMATCH",
                f"{shown(pair.name)} has rank {rank}, {CONFIG_FILE} says {said}",
                "put the config of the same training run beside the weights",
            )
        scaling = rule.scaling(pair.name, rank)
        bias, gain = pair.tensors.bias is not None, pair.tensors.magnitude is not None
        modules.append(PackedModule(pair.layer, pair.module, rank, scaling, bias, gain))
    if len(unsaid) > 1:
        raise refuse(
            "E_RANK_MISMATCH",
            f"{CONFIG_FILE} has no r, and the tensors' ranks differ: {shown_list(sorted(unsaid))}",
            "set r and rank_pattern to the values of training",
        )
    warnings += [
        f"{CONFIG_FILE} has no r: rank {rank} is taken from the tensors" for rank in unsaid
    ]
    return tuple(modules)


def _scan(
    fd: int,
    pairs: tuple[Pair, ...],
    modules: tuple[PackedModule, ...],
    served_dtype: str,
    more: tuple[tuple[PackedModule, PairTensors], ...],
) -> list[str]:
    """Look at every byte; warn of an adapter that adds nothing."""
    scanner, unserved = Scanner(fd, served_dtype), Scanner(fd, "auto")
    idle = not more
    for ref in dict.fromkeys(ref for _, held in more for ref in held.every):
        scanner.is_zero(ref)
    for pair, module in zip(pairs, modules, strict=True):
        held = pair.tensors
        served = [scanner.is_zero(ref) for ref in (held.a, held.b, held.bias) if ref is not None]
        idle &= (any(served[:2]) and all(served[2:])) or module.scaling == 0.0
        if held.magnitude is not None:  # no magnitude is served, but what it is to a norm
            unserved.is_zero(held.magnitude)
            idle = False
    return ["this adapter changes nothing: every lora_B (or scaling) is zero"] if idle else []


def _target_warnings(pairs: tuple[Pair, ...], settings: LoraSettings, spec: BaseSpec) -> list[str]:
    """Listed targets without any tensor.  The tensors decide what is served, not the list."""
    targets, names = settings.target_modules, {pair.name for pair in pairs}
    warnings = []
    absent: list[str] = []
    if isinstance(targets, list):
        absent = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    elif targets == "all-linear":
        present = {pair.module for pair in pairs}
        there = [module for module in MODULES if spec.shapes.of(module)[1]]
        absent = [module for module in there if module not in present]
    elif targets is not None:
        warnings += _regex_warning(targets, names, settings)
    if absent:
        warnings.append(f"target_modules lists {shown_list(absent)}, without any tensor")
    return warnings


def _saved_warnings(
    settings: LoraSettings, replaced: Iterable[str], copied: frozenset[str]
) -> list[str]:
    """Of modules_to_save, those that replace nothing, and why."""
    idle = [s for s in settings.modules_to_save if s.rpartition(".")[2] not in replaced]
    equal = [s for s in idle if any(f".{module}".endswith(f".{s}") for module in copied)]
    absent = [s for s in idle if s not in equal]
    warnings = []
    if equal:
        said = "its weights are equal to the base's, ignored"
        warnings.append(f"modules_to_save lists {shown_list(equal)}: {said}")
    if absent:
        said = "but the file holds no such weights"
        warnings.append(f"modules_to_save lists {shown_list(absent)}, {said}")
    return warnings


def _regex_warning(target: str, names: set[str], settings: LoraSettings) -> list[str]:
    try:
        if len(target) > MAX_TARGET_CHARS:
            raise PatternRefused(f"longer than {MAX_TARGET_CHARS} characters")
        pattern = Pattern(target, settings.budget)
        if any(pattern.covers(name) for name in sorted(names)):
            return []
        return ["the regular expression in target_modules matches no module that has tensors"]
    except PatternRefused as error:
        return [f"target_modules was not compared with the tensors: {shown(str(error))}"]


def _largest_ranks(modules: tuple[PackedModule, ...]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for module in sorted(modules, key=lambda m: MODULE_ID[m.module]):
        ranks[module.module] = max(module.rank, ranks.get(module.module, 0))
    return ranks


def changes_kv(modules: Iterable[PackedModule], spec: BaseSpec) -> bool:
    """Whether an adapter can change any K or V: those of a module's own layer, or of a later one
    through the hidden states.  If not, it shares the base's prefix cache."""
    last = spec.num_layers - 1
    return any(m.layer < last or m.module in _KV_MODULES for m in modules)
