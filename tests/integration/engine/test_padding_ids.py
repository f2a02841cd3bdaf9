"""Ids of which the embedding has rows and the base's tokenizer has none: in prompts, and where a
revision's requests may draw them and the base's may not."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from msgspec import structs

from engine.messages import SamplingParams, Submit

DRAWN = 200  # ids of the tokenizer; the model has 256 rows


@pytest.fixture
def padded_dir(model_dir: Path, tmp_path: Path) -> Path:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = {f"w{n}": n for n in range(DRAWN)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return tmp_path


def test_a_prompt_that_holds_one_is_told_what_the_model_thinks_of_it(
    start_core, padded_dir
) -> None:
    """It ended the engine: the reference looked for it among the tokenizer's ids."""
    driver = start_core(padded_dir)
    story = driver.submit("p", [5, 230, 8], prompt_logprobs=2, max_tokens=2)
    plain = driver.submit("q", [5, 9, 8], prompt_logprobs=2, max_tokens=2)
    driver.finish()
    _, odd, after = story.prompt_logprobs
    assert odd.token == 230 and math.isfinite(odd.logprob) and after.logprob <= 0
    # Both stand behind the same token, and its alternatives are the tokenizer's alone.
    assert odd.top == plain.prompt_logprobs[1].top and all(t < DRAWN for t, _ in odd.top)


def test_a_request_that_falls_back_on_the_base_names_ids_that_both_have(
    start_core, make_adapter, padded_dir
) -> None:
    """An aLoRA's tokenizer may have more of them: that ended the engine when the base drew."""
    driver = start_core(padded_dir)
    own = make_adapter("own", num_tokens=240, seed=6)
    own = dataclasses.replace(own, manifest=structs.replace(own.manifest, alora_tokens=(7, 9)))
    driver.add(own)
    said = {}
    for name, prompt, token, fallback in (
        ("refused", [5, 6], 239, "base"),
        ("base", [5, 6], 199, "base"),
        ("invoked", [5, 7, 9], 239, ""),
    ):
        wish = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=(token,))
        asked = Submit(
            request_id=name, prompt=prompt, sampling=wish, rev=own.rev, alora_fallback=fallback
        )
        said[name] = driver.follow(asked)
    driver.finish()
    assert said["refused"].code == "invalid_value"
    assert said["refused"].message == "allowed_token_ids holds 239, which is outside 0..199"
    assert said["base"].tokens == [199] and said["invoked"].tokens == [239]
