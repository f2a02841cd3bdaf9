"""Mutated adapters: every one is read or refused, nothing else, and never slowly.

Seeded by the case's number, so a failure names the number that repeats it.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

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


def run_case(number: int, draft: Any, folder: Path, spec: ModelSpec) -> str:
    """Mutate config, weights or both; "" if the folder was read, else the reason."""
    rng = random.Random(number)
    config, weights = json.dumps(draft.config).encode(), draft.weights()
    if rng.random() < 0.4:
        config = (mutate_tree if rng.random() < 0.6 else mutate_bytes)(rng, config)
    if rng.random() < 0.8:
        weights = mutate_header(rng, weights)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    started = time.process_time()
    reason = ""
    try:
        revision_digest(folder, inspect(folder, spec))
    except AdapterInvalid as error:
        reason = error.reason
        assert "\n" not in error.message and len(error.message) < 1000 and error.hint
    assert time.process_time() - started < SECONDS
    return reason


def run_cases(numbers: range, draft: Any, spec: ModelSpec) -> set[str]:
    draft.config |= {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"up_proj": 3.5}}
    folder = draft.write()
    reasons = set()
    for number in numbers:
        try:
            reasons.add(run_case(number, draft, folder, spec))
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
    return reasons


def test_a_few_hundred_mutations_are_read_or_refused(draft: Any, spec: ModelSpec) -> None:
    reasons = run_cases(range(500), draft, spec)
    assert "" in reasons  # some mutations do no harm
    assert len(reasons) > 12  # and the others are found in many places


@pytest.mark.slow
def test_a_hundred_thousand_mutations_are_read_or_refused(draft: Any, spec: ModelSpec) -> None:
    assert len(run_cases(range(1000, 101_000), draft, spec)) > 20
