"""Tokens of adapters' own on the way that steps take on a card, on Triton's interpreter: padded
steps from graphs, kernels that draw, tokens that only the device knows."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine.kernels import lora_own, sample_device
from engine.messages import Evict
from engine.models import decoder
from tests.fakes.resized_llama import Judge, own_prompt

EXTRA = 40


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_mixed_batches_say_what_resized_models_say(
    start_core, make_adapter, model_dir, request, deterministic
) -> None:
    few, many = (5, 12, 99, 256, 257, 258), (0, *range(240, 290))
    own = [
        make_adapter(
            "few",
            rows={"embed_tokens": few, "lm_head": few},
            num_tokens=259,
            extra_vocab=EXTRA,
            seed=1,
        ),
        make_adapter(
            "many",
            modules=("q_proj", "v_proj"),
            rows={"embed_tokens": many, "lm_head": many},
            num_tokens=290,
            extra_vocab=EXTRA,
            seed=2,
        ),
        make_adapter(
            "whole",
            modules=("o_proj",),
            rows={"embed_tokens": (), "lm_head": ()},
            num_tokens=270,
            extra_vocab=EXTRA,
            seed=3,
            strength=0.3,
        ),
        # What no kernel takes, and has to be there ahead of the step.
        make_adapter(
            "factors", modules=(), ends=("embed_tokens", "lm_head"), extra_vocab=EXTRA, seed=5
        ),
        None,
    ]
    judge = Judge(model_dir)
    asked = [(adapter, own_prompt(adapter, 6 + 9 * n, n)) for n, adapter in enumerate(own)]
    for adapter, prompt in asked:
        judge(adapter, prompt, 1)  # before the way is switched
    request.getfixturevalue("on_card_path")
    driver = start_core(
        lookahead=not deterministic,
        deterministic=deterministic,
        extra_vocab=EXTRA,
        max_num_seqs=4,
        max_rank=16,
        slots=3,
        max_batch_tokens=40,
    )
    graphs = driver.core.runner.graphs
    if graphs is not None:
        graphs.use_graphs = True
        driver.core.runner.capture()
    driver.add(*own[:-1])
    for round in range(2):
        stories = [
            driver.submit(
                f"{round}{n}",
                prompt,
                adapter and adapter.rev,
                max_tokens=5,
                logprobs=0,
                prompt_logprobs=0,
                ignore_eos=True,
            )
            for n, (adapter, prompt) in enumerate(asked)
        ]
        driver.finish()
        for story, (adapter, prompt) in zip(stories, asked, strict=True):
            judge.check(story, adapter, prompt, within=2e-3)
        for adapter in own[:2]:
            driver.call(lambda i, rev=adapter.rev: Evict(command_id=i, rev=rev, to="disk"))
    assert max(stories[1].tokens) >= 256 or max(stories[0].tokens) >= 256


@pytest.mark.slow
def test_a_step_launches_one_thing_more_where_somebody_has_ids_of_its_own_and_else_nothing(
    start_core, make_adapter, on_card_path, monkeypatch
) -> None:
    closed, joined, apart = [], [], []
    close, logits = sample_device.close, lora_own.replace_logits
    monkeypatch.setattr(lora_own, "replace_logits", lambda y, *r: (joined.append(1), logits(y, *r)))
    for name in ("replace_head", "replace_embedding", "replace_embeddings"):
        monkeypatch.setattr(decoder, name, lambda *_, **__: apart.append(1))
    monkeypatch.setattr(decoder.Decoder, "embed", lambda *_, **__: apart.append(1))
    monkeypatch.setattr(
        sample_device, "close", lambda x, *rest: (closed.append(len(x)), close(x, *rest))
    )
    few = (5, 256, 257)
    own = make_adapter(
        "own", rows={"embed_tokens": few, "lm_head": few}, num_tokens=258, extra_vocab=EXTRA
    )
    plain = make_adapter("plain", extra_vocab=EXTRA, seed=5)
    driver = start_core(
        lookahead=True,
        deterministic=False,
        extra_vocab=EXTRA,
        max_num_seqs=4,
        max_rank=16,
        slots=3,
        max_batch_tokens=40,
    )
    driver.add(own, plain)
    for rev, wish in ((None, {}), (plain.rev, {"logprobs": 2, "temperature": 1.0, "seed": 1})):
        driver.submit(f"{rev}", [7, 8, 9], rev, max_tokens=3, **wish)
    driver.finish()
    assert not closed
    driver.submit("own", [7, 256, 9], own.rev, max_tokens=3)
    driver.finish()
    assert closed == joined == [1, 1, 1] and not apart
