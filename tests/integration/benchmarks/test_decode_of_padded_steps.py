"""The part of `decode.py` that only padded steps have, which are a card's; in plain torch."""

import json
from itertools import pairwise

import pytest
import torch

from engine import assembly
from engine.graphs import StepGraphs


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card has the real thing")
def test_the_forward_pass_of_one_step_is_timed_by_itself(tiny, capsys, monkeypatch):
    import decode

    monkeypatch.setattr(assembly, "is_card", lambda device: True)
    # Plain torch computes the rows of nobody and reads their blocks, which the kernels do not: in
    # memory that was somebody else's there may be NaN.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(decode, "REPLAYS", 3)
    seen, plain = [], StepGraphs.run

    def noted(self, batch, *others):
        seen.append(batch.attn.seq_lens)
        return plain(self, batch, *others)

    monkeypatch.setattr(StepGraphs, "run", noted)
    asked = ["--prompt", "16", "--tokens", "6", "--cases", "2:0", "--device", "cpu"]
    assert decode.main(["--model", str(tiny), *asked]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["forward_ms"] > 0
    again = [a for a, b in pairwise(seen) if a and a == b]  # mixed steps tell no lengths
    assert len(again) == 3  # one step, and three times more: none other is repeated
    prompt = 16 + 6 // 2 + 1
    assert set(again[0]) == {prompt + 1 + decode.SETTLING}
