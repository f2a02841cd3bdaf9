"""The benchmark of ranks, on two of them: every size and case has a line, and none an error."""

import json

import pytest


@pytest.mark.slow
def test_sizes_are_measured_and_held_against_each_other(tiny, capfd):
    from tensor_parallel import ANSWER, main

    asked = ["--cases", "2:0,2:1", "--prompts", "40", "--context", "16", "--repeats", "1"]
    status = main(["--model", str(tiny), "--device", "cpu", "--sizes", "1,2", *asked])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert not [line["error"] for line in lines if "error" in line]
    assert status == 0
    for size, collectives in ((1, 0), (2, 6)):  # embeddings, two a layer, logits
        own = [line for line in lines if line["tensor_parallel"] == size]
        steps = [line for line in own if "step_ms" in line]
        assert [(line["batch"], line["adapters"]) for line in steps] == [(2, 0), (2, 1)]
        counted = [line["collectives"] for line in own if "collectives" in line]
        assert counted == [collectives] * 4
    [messages] = [line["messages"] for line in lines if "messages" in line]
    assert min(messages.values()) > 0
    last = lines[-1]
    assert last["against"] == 1 and list(last["speedup"]) == [
        "2:0",
        "2:1",
        "prefill 40:0",
        "prefill 40:1",
    ]
    for name in ("base", "adapter"):
        assert last[name]["same_tokens"] == [ANSWER] * 4
        assert last[name]["max_logprob_error"] < 1e-4
