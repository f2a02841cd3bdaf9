"""How much a draw asks of a card: launches, copies, and never a wait.  The kernels are counted, not
run: what they compute is `tests/kernels/test_sample_kernels.py`'s."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import upload
from engine.kernels import backend, sample_change, sample_filter, sample_race, sample_tell
from engine.messages import SamplingParams
from engine.sampler import Sampler, SamplerLimits
from engine.sequence import Sequence

VOCAB, ROWS = 300, 4
KERNELS = {
    "entries": (sample_change, "_entries"),
    "mask": (sample_change, "_mask"),
    "race": (sample_race, "_race"),
    "filtered": (sample_filter, "_filtered"),
    "tell": (sample_tell, "_tell"),
}
#: Torch ops that put nothing on a device's queue.
FREE = (
    "empty",
    "empty_strided",
    "slice",
    "view",
    "select",
    "as_strided",
    "_unsafe_view",
    "alias",
    "lift_fresh",
)


class Fake:
    """A kernel that only counts its launches."""

    def __init__(self, name: str, seen: Counter[str]) -> None:
        self._name, self._seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)

        def launch(*args: Any, **kwargs: Any) -> None:
            self._seen[self._name] += 1

        return launch


class Ops(TorchDispatchMode):
    """Counts what torch itself would launch or copy."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self._seen[name] += 1
        return func(*args, **(kwargs or {}))


def counted(real: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        seen[real.__name__] += 1
        return real(*args)

    return call


@pytest.fixture
def work(monkeypatch) -> Callable[..., Counter[str]]:
    """work({...}, ...) -> what one draw of rows with these wishes launches and copies."""
    seen: Counter[str] = Counter()
    monkeypatch.setattr(backend, "use_kernels", lambda x: True)
    for name, (module, kernel) in KERNELS.items():
        monkeypatch.setattr(module, kernel, Fake(name, seen))
    for owner, method in ((upload.Parcel, "send"), (upload.DownloadRing, "fetch")):
        monkeypatch.setattr(owner, method, counted(getattr(owner, method), seen))
    sampler = Sampler(SamplerLimits(VOCAB, (2,)), max_rows=ROWS)
    ids = torch.zeros(ROWS, dtype=torch.int64)

    def draw(*wishes: dict[str, Any]) -> Counter[str]:
        rows = [
            Sequence(
                request_id=str(n),
                tokens=[1, 2, 3, 4],
                num_prompt=2,
                sampling=SamplingParams(**{"temperature": 0.0, **wishes[n % len(wishes)]}),
                rev=None,
                identity="base",
                salt="",
                priority=50,
                order=n,
            )
            for n in range(ROWS)
        ]
        sampler.launch(torch.zeros(ROWS, VOCAB), rows, tokens=ids)  # memory is reserved here
        seen.clear()
        logits = torch.zeros(ROWS, VOCAB)
        with Ops(seen):
            sampler.launch(logits, rows, tokens=ids)
        return Counter(seen)

    return draw


GREEDY, HOT, FILTERED = {}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}
CHANGED = {"repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "min_tokens": 9}
TOLD, ALLOWED = {"logprobs": 3}, {"allowed_token_ids": (1, 2)}

CASES = {
    "all greedy": ([GREEDY], ["race", "fetch"]),
    "all at a temperature": ([HOT], ["send", "race", "fetch"]),
    "all filtered": ([FILTERED], ["send", "filtered", "fetch"]),
    "mixed": ([GREEDY, HOT, FILTERED], ["send", "race", "filtered", "fetch"]),
    "greedy with log-probabilities": ([TOLD, GREEDY], ["send", "race", "tell", "fetch"]),
    "penalties, bias and bans": ([CHANGED], ["send", "entries", "race", "fetch"]),
    "allowed tokens": ([ALLOWED, GREEDY], ["send", "mask", "race", "fetch"]),
    "changed rows beside told ones": (
        [CHANGED, TOLD],
        ["send", "entries", "race", "tell", "fetch"],
    ),
    "everything": (
        [{**FILTERED, **CHANGED, **TOLD, **ALLOWED}, GREEDY],
        ["send", "copy_", "entries", "mask", "race", "filtered", "tell", "fetch"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_draw_launches_and_copies_no_more_than_this(work, case) -> None:
    wishes, expected = CASES[case]
    assert work(*wishes) == Counter(expected)
