"""The tokenizer files of an adapter folder: do their ids fit, and do they say something else than
the base's?

Goes in: an open folder, how many tokens the adapter's tensors know, the base's spec and folder.
Comes out: which text files there are, whether the tokenizer is the adapter's own, and how many ids
its requests may hold; or AdapterInvalid.  A chat template of its own is normal and not looked into
here.  Knows no tokenizer library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.manifest import TEXT_FILES, Limits
from engine.adapters.own_tokenizer import differs
from engine.adapters.reasons import refuse
from engine.adapters.tokenizer_files import (
    CONFIG,
    TOKENIZER,
    UNREADABLE,
    BaseTokenizer,
    digest,
    highest_id,
)
from engine.models.bases import BaseSpec

#: Raise it when whose a tokenizer is is told by other rules: registered adapters are asked anew.
RULES = 1

_BESIDE = "put the tokenizer files that it was trained with beside the weights"


@dataclass(frozen=True, slots=True)
class AdapterText:
    """`files`: those of TEXT_FILES that are there.  `num_tokens` 0: as many as the base.
    `base_text`: of the function of that name."""

    files: tuple[str, ...]
    own: bool = False
    num_tokens: int = 0
    warnings: tuple[str, ...] = ()
    base_text: str = ""


def base_text(spec: BaseSpec, base: Path | None) -> str:
    """All that decides whose tokenizer an adapter has beside its own files: as long as it is the
    same, so is what was said of the adapter.  16 hex digits."""
    kinds = (RULES, spec.vocab_size, spec.generates, *BaseTokenizer(base).digests)
    return digest("|".join(map(str, kinds)).encode())[:16]


def read_text(
    folder: AdapterFolder, vocabulary: int, spec: BaseSpec, limits: Limits, base: Path | None
) -> AdapterText:
    """`vocabulary`: ids below it have rows in embedding and head.  Without a base's folder any
    tokenizer is the adapter's own.  Raises AdapterInvalid."""
    beside = base_text(spec, base)  # before: of files that change meanwhile it is asked anew
    return replace(_read_text(folder, vocabulary, spec, limits, base), base_text=beside)


def _read_text(
    folder: AdapterFolder, vocabulary: int, spec: BaseSpec, limits: Limits, base: Path | None
) -> AdapterText:
    files = tuple(name for name in TEXT_FILES if folder.has(name))
    theirs, resized = BaseTokenizer(base), vocabulary != spec.vocab_size
    # Copies of the base's files may have ids that it has no rows for: no new vocabulary.
    known = max(vocabulary, 0 if resized or not files else theirs.size)
    held, last = {}, 0
    for name in files:
        data = folder.read(name, limits.max_text)
        highest = _highest(name, data, known, theirs)
        if highest >= known:
            whose = "its own" if resized else "the base's"
            raise refuse(
                "E_TOKENIZER_TOO_LARGE",
                f"{name} has token ids up to {highest}, {whose} embedding has {vocabulary} rows",
                _more_rows(spec),
            )
        if name in (TOKENIZER, CONFIG):
            held[name], last = data, max(last, highest)
    if not spec.generates:  # texts are cut into the base's tokens
        return AdapterText(files)
    if held and _is_own(held, theirs):
        last = last if TOKENIZER in held else max(last, theirs.size - 1)
        return AdapterText(files, True, min(last + 1, vocabulary))
    if resized and not theirs.size:  # ids are all that there is
        return AdapterText(files, num_tokens=vocabulary)
    if vocabulary < spec.vocab_size:
        return AdapterText(files, num_tokens=_of_the_base(theirs.size, vocabulary))
    more = vocabulary - spec.vocab_size
    said = f"it has rows for {more} more tokens than the base, and no tokenizer that knows them"
    warnings = (f"{said}: they can be neither written nor drawn; {_BESIDE}",) if more else ()
    return AdapterText(files, warnings=warnings)


def _more_rows(spec: BaseSpec) -> str:
    """A model that only pools reads by its own tokenizer, and has no room for rows."""
    of_the_base = "remove the tokenizer files to use the base's"
    if not spec.generates:
        return of_the_base
    return f"train it with rows for them (model.resize_token_embeddings), or {of_the_base}"


def _highest(name: str, data: bytes, most: int, theirs: BaseTokenizer) -> int:
    found = theirs.highest_in(name, data)  # most are copies
    try:
        return highest_id(name, data, most) if found is None else found
    except UNREADABLE as error:
        raise _unreadable(name, error) from None


def _is_own(held: Mapping[str, bytes], theirs: BaseTokenizer) -> bool:
    try:
        return differs(held, theirs)
    except UNREADABLE as error:
        raise _unreadable(TOKENIZER, error) from None


def _of_the_base(size: int, vocabulary: int) -> int:
    if size > vocabulary:
        raise refuse(
            "E_VOCAB_RESIZED",
            f"its embedding has {vocabulary} rows, and the base's tokenizer has {size} ids",
            _BESIDE,
        )
    return size


def _unreadable(name: str, error: Exception) -> Exception:
    return refuse(
        "E_TOKENIZER_INVALID",
        f"{name} cannot be read: {str(error)[:100]}",
        f"copy {name} again, or remove the tokenizer files to use the base's",
    )
