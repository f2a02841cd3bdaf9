"""How many tokens an adapter knows, by its tensors: do all of them agree, and does it fit?

Goes in: what the file holds of embedding and head, the pairs, the base's spec.  Comes out: that
number, the base's own unless the file says otherwise; or AdapterInvalid.  Torch-free; looks at
shapes alone.

A file may know fewer tokens than the base, as a base with unused rows is often cut down to its
tokenizer's size; then nothing is lacking.  If it knows more, each of the new ones needs a row in
the embedding and one in the head.  PEFT saves both, except where one of the two is a target of
LoRA: the other one's new rows are lost then, and loaded again it answers otherwise.
"""

from engine.adapters.end_tensors import End, Ends
from engine.adapters.manifest import TensorRef
from engine.adapters.peft_keys import Pair
from engine.adapters.reasons import refuse, shown
from engine.config import MOST_EXTRA_VOCAB
from engine.models.bases import BaseSpec

#: What is proposed for the setting is a multiple of this, as rows of logits are.
_STEP = 64


def _train_with(end: str) -> str:
    """What PEFT left out of the file is in no file: nothing helps but to train it again."""
    return f"train it with {end} in trainable_token_indices or modules_to_save, too"


def vocabulary_of(ends: Ends, pairs: tuple[Pair, ...], spec: BaseSpec) -> int:
    """Token ids 0 to it, which embedding and head have rows for.  Raises AdapterInvalid."""
    said = {}
    for name, end in ends.items():
        counts = _counts(name, end, pairs)
        for ref, count in counts:
            if not _fits(count, spec):
                raise _too_many(ref, count, spec)
            if count != counts[0][1]:
                raise _disagree(*counts[0], ref, count)
        if end.ids and counts and max(end.ids) >= counts[0][1]:
            raise refuse(
                "E_TRAINABLE_TOKENS",
                f"trainable_token_indices names token {max(end.ids)} of {name}, which has"
                f" {counts[0][1]} rows in {shown(counts[0][0].name)}",
                "list the ids of its own tokens, each once",
            )
        if not counts and end.trained is not None and max(end.ids) >= spec.vocab_size:
            counts.append((end.trained, max(end.ids) + 1))
            if not _fits(counts[0][1], spec):
                raise _too_many(*counts[0], spec)
        if counts:
            said[name] = counts[0]
            _check_new_rows(name, end, *counts[0], spec)
    return _agreed(said, spec)


def _fits(count: int, spec: BaseSpec) -> bool:
    """A base that only pools has no text but its own, and no use for another vocabulary."""
    return count <= spec.num_ids if spec.generates else count == spec.vocab_size


def _counts(name: str, end: End, pairs: tuple[Pair, ...]) -> list[tuple[TensorRef, int]]:
    """Tensors of one end that say how many tokens there are."""
    counts = [(ref, ref.shape[0]) for ref in (*end.own, *end.under)]
    for pair in pairs:
        if pair.module == name == "embed_tokens":
            counts.append((pair.tensors.a, pair.tensors.a.shape[1]))
        elif pair.module == name:
            assert pair.tensors.b is not None
            counts.append((pair.tensors.b, pair.tensors.b.shape[0]))
    return counts


def _check_new_rows(name: str, end: End, ref: TensorRef, count: int, spec: BaseSpec) -> None:
    """Behind the base's own there is nothing that factors could stand on."""
    absent = () if end.whole else set(range(spec.vocab_size, count)).difference(end.ids)
    if absent:
        raise _resized(
            f"{shown(ref.name)} is for {count} tokens, the base has {spec.vocab_size}, and the"
            f" file has no row of {name} for token {min(absent)}",
            _train_with(name),
        )


def _agreed(said: dict[str, tuple[TensorRef, int]], spec: BaseSpec) -> int:
    if len(said) == 2:
        one, other = said.values()
        if one[1] != other[1]:
            raise _disagree(*one, *other)
    for ref, count in said.values():
        if len(said) == 1 and count > spec.vocab_size:
            other_end = "lm_head" if "embed_tokens" in said else "embed_tokens"
            raise _resized(
                f"{shown(ref.name)} is for {count} tokens, and the file has no rows of {other_end}"
                f" for those beyond the base's {spec.vocab_size}",
                _train_with(other_end),
            )
        return count
    return spec.vocab_size


def _disagree(one: TensorRef, count: int, other: TensorRef, another: int) -> Exception:
    return _resized(
        f"{shown(one.name)} is for {count} tokens, {shown(other.name)} for {another}",
        "save the adapter again: embedding and head of one model have the same tokens",
    )


def _too_many(ref: TensorRef, count: int, spec: BaseSpec) -> Exception:
    found = f"{shown(ref.name)} is for {count} tokens, the base has {spec.vocab_size}"
    need = count - spec.vocab_size
    if not spec.generates or need > MOST_EXTRA_VOCAB:
        return _resized(
            found, "train without added tokens, or serve the resized model itself as the base"
        )
    if room := spec.num_ids - spec.vocab_size:
        found += f", and room for {room} more"
    enough = min(-(-need // _STEP) * _STEP, MOST_EXTRA_VOCAB)
    return _resized(found, f"set `[lora] extra_vocab` = {enough} ({need} or more) and restart")


def _resized(found: str, hint: str) -> Exception:
    return refuse("E_VOCAB_RESIZED", found, hint)
