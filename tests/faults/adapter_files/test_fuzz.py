"""Mutated adapters: every one is read or refused, nothing else, and never slowly.

Seeded by the case's number, so a failure names the number that repeats it.
"""

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.peft import inspect, revision_digest
from engine.errors import AdapterInvalid
from engine.models.spec import ModelSpec

SCRAPS: list[bytes] = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\0", b"-1", b"9" * 30]
SCRAPS += [
    b"1e9",
    b"null",
    b"true",
    b"NaN",
    b'"shape"',
    b"data_offsets",
    b"\xff",
    b"\xf0\x9f\x98\x80",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2.5,
    10**30,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    "(a+)+$",
]
SECONDS = 5.0  # for a folder of 4 KiB: it takes a millisecond, and this machine may be very busy


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few random edits: flips, cuts, repeats, scraps of JSON."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at:at] = rng.choice(SCRAPS)
            case 2:
                del out[at : at + rng.randint(1, 40)]
            case 3:
                out[at:at] = out[at : at + rng.randint(1, 60)]
            case _:
                scrap = rng.choice(SCRAPS)
                out[at : at + len(scrap)] = scrap
    return bytes(out)


def mutate_header(rng: random.Random, weights: bytes) -> bytes:
    """Edit the header's bytes, and mostly keep its length right, so that parsing goes deeper."""
    length = int.from_bytes(weights[:8], "little")
    header, body = weights[8 : 8 + length], weights[8 + length :]
    header = mutate_tree(rng, header) if rng.random() < 0.5 else mutate_bytes(rng, header)
    claimed = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63, 2**64 - 1])
    if rng.random() < 0.2:
        body = mutate_bytes(rng, body)
    return claimed.to_bytes(8, "little") + header + body


def mutate_tree(rng: random.Random, data: bytes) -> bytes:
    """Replace, drop or rename something in the parsed JSON."""
    tree = json.loads(data)
    node = tree
    while isinstance(node, dict) and node:
        key = rng.choice(list(node))
        if isinstance(node[key], dict) and rng.random() < 0.7:
            node = node[key]
            continue
        match rng.randrange(4):
            case 0:
                node[key] = rng.choice(VALUES)
            case 1:
                del node[key]
            case 2:
                node[rng.choice(["r", "lora_alpha", "rank_pattern", key + ".x"])] = node.pop(key)
            case _ if isinstance(node[key], list) and node[key]:
                node[key][rng.randrange(len(node[key]))] = rng.choice(VALUES)
        break
    return json.dumps(tree).encode()


def run_case(
    number: int, draft: Any, folder: Path, spec: ModelSpec, base: Path | None = None
) -> str:
    """Mutate config, weights or both, and other files; "" if the folder was read, else why not."""
    rng = random.Random(number)
    config, weights = json.dumps(draft.config).encode(), draft.weights()
    if rng.random() < 0.4:
        config = (mutate_tree if rng.random() < 0.6 else mutate_bytes)(rng, config)
    if rng.random() < 0.8:
        weights = mutate_header(rng, weights)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    for name, data in draft.files.items():
        if rng.random() < 0.5:
            data = (mutate_tree if rng.random() < 0.6 else mutate_bytes)(rng, data)
        (folder / name).write_bytes(data)
    started = time.process_time()
    reason = ""
    try:
        revision_digest(folder, inspect(folder, spec, base=base))
    except AdapterInvalid as error:
        reason = error.reason
        assert "\n" not in error.message and len(error.message) < 1000 and error.hint
    assert time.process_time() - started < SECONDS
    return reason


def run_cases(numbers: range, draft: Any, spec: ModelSpec, base: Path | None = None) -> set[str]:
    draft.config |= {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"up_proj": 3.5}}
    folder = draft.write()
    reasons = set()
    for number in numbers:
        try:
            reasons.add(run_case(number, draft, folder, spec, base))
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
    return reasons


def test_a_few_hundred_mutations_are_read_or_refused(draft: Any, spec: ModelSpec) -> None:
    reasons = run_cases(range(500), draft, spec)
    assert "" in reasons  # some mutations do no harm
    assert len(reasons) > 12  # and the others are found in many places


TOKENIZER = {
    "added_tokens": [{"id": 100, "content": "<a>", "special": True}],
    "normalizer": {"type": "NFC"},
    "model": {"type": "BPE", "vocab": {f"w{i}": i for i in range(9)}, "merges": [["a", '"']]},
}


def test_mutated_ends_of_another_vocabulary_are_read_or_refused(
    draft: Any, spec: ModelSpec, tmp_path: Path
) -> None:
    """Beside a base and its tokenizer, of which nothing is mutated."""
    prefix, base = "base_model.model.", tmp_path / "base"
    ends = {"embed_tokens": f"{prefix}model.embed_tokens", "lm_head": f"{prefix}lm_head"}
    base.mkdir()
    rows = np.random.default_rng(0).standard_normal((130, 64))
    whole = type(draft)(base)
    whole.tensors = {}
    for end, name in ends.items():
        whole.put(f"{end}.weight", rows[:128])
        draft.put(f"{name}.base_layer.weight" if end == "embed_tokens" else f"{name}.weight", rows)
    (base / "model.safetensors").write_bytes(whole.weights())
    (base / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    draft.put(f"{ends['embed_tokens']}.lora_embedding_A", np.ones((4, 130)))
    draft.put(f"{ends['embed_tokens']}.lora_embedding_B", np.ones((64, 4)))
    draft.put(f"{ends['lm_head']}.token_adapter.trainable_tokens_delta", np.ones((2, 64)))
    draft.config["trainable_token_indices"] = {"lm_head": [129, 5]}
    draft.files["tokenizer.json"] = json.dumps(TOKENIZER, indent=2).encode()
    draft.files["tokenizer_config.json"] = b'{"added_tokens_decoder": {"101": {}}}'
    reasons = run_cases(range(300), draft, replace(spec, extra_vocab=2), base)
    assert reasons >= {"", "E_TOKENIZER_INVALID", "E_TRAINABLE_TOKENS"} and len(reasons) > 12


@pytest.mark.slow
def test_a_hundred_thousand_mutations_are_read_or_refused(draft: Any, spec: ModelSpec) -> None:
    assert len(run_cases(range(1000, 101_000), draft, spec)) > 20
