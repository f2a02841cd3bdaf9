"""Under which identity KV is cached: an adapter shares the base's only if it changes none of it.

`changes_kv` is asked, then the arena itself is looked at: the same prompt, computed by the base and
by the adapter, layer by layer.
"""

from dataclasses import replace

import msgspec
import pytest
import torch

from engine.adapters.peft import changes_kv
from engine.models.spec import read_spec

MLP = ("gate_proj", "up_proj", "down_proj")
PROMPT_TOKENS = 48


@pytest.fixture
def filed(make_adapter, model_dir):
    """filed(name, ...): an adapter whose manifest says of `changes_kv` what the rule says."""
    spec = read_spec(model_dir)

    def make(name, **shape):
        adapter = make_adapter(name, **shape)
        changes = changes_kv(adapter.manifest.modules, spec)
        return replace(
            adapter, manifest=msgspec.structs.replace(adapter.manifest, changes_kv=changes)
        )

    return make


def run(driver, name, ids, adapter=None):
    story = driver.submit(name, ids, adapter and adapter.rev, logprobs=0)
    driver.finish()
    return story


def kv(driver, ids, identity, layer) -> torch.Tensor:
    """Of the prompt's full blocks, as they lie in the arena."""
    blocks = driver.core.prefix.find(ids, identity)
    assert len(blocks) == len(ids) // driver.core.config.block_size
    return driver.core.machine.arena.kv(layer)[blocks]


def test_an_adapter_of_the_first_layers_mlp_alone_changes_later_kv_and_is_partitioned(
    start_core, filed, prompt
) -> None:
    adapter = filed("mlp of layer 0", modules=MLP, layers=(0,))
    assert adapter.manifest.changes_kv
    driver, ids = start_core(), [*prompt(PROMPT_TOKENS), 5]
    driver.add(adapter)
    run(driver, "base", ids)
    adapted = run(driver, "adapted", ids, adapter)
    assert adapted.cached == 0
    bases, own = ([kv(driver, ids, name, n) for n in range(2)] for name in ("base", adapter.rev))
    assert torch.equal(bases[0], own[0]), "its own layer's K and V come before its MLP"
    assert not torch.equal(bases[1], own[1])
    assert run(driver, "adapted again", ids, adapter).cached == PROMPT_TOKENS


def test_shared_blocks_would_give_such_an_adapter_other_answers(start_core, filed, prompt) -> None:
    """Why it is partitioned: told to share, it answers on the base's K and V, and differs."""
    adapter = filed("mlp of layer 0", modules=MLP, layers=(0,))
    ids = [*prompt(PROMPT_TOKENS), 5]
    told = []
    for changes in (True, False):
        driver = start_core()
        driver.add(
            replace(adapter, manifest=msgspec.structs.replace(adapter.manifest, changes_kv=changes))
        )
        run(driver, "base", ids)
        story = run(driver, "adapted", ids, adapter)
        assert story.cached == (0 if changes else PROMPT_TOKENS)
        told.append(story.logprobs)
    assert told[0] != told[1]


@pytest.mark.parametrize("modules", [MLP, ("q_proj", "o_proj", *MLP)])
def test_an_adapter_of_the_last_layers_q_o_and_mlp_shares_the_bases_blocks_and_answers_the_same(
    start_core, filed, prompt, modules
) -> None:
    adapter = filed(f"last {len(modules)}", modules=modules, layers=(1,))
    assert not adapter.manifest.changes_kv
    ids = [*prompt(PROMPT_TOKENS), 5]
    cold = start_core()
    cold.add(adapter)
    alone = run(cold, "alone", ids, adapter)
    warm = start_core()
    warm.add(adapter)
    run(warm, "base", ids)
    shared = run(warm, "adapted", ids, adapter)
    assert (alone.cached, shared.cached) == (0, PROMPT_TOKENS)
    assert (alone.tokens, alone.logprobs) == (shared.tokens, shared.logprobs)
    for layer in range(2):
        assert torch.equal(kv(cold, ids, "base", layer), kv(warm, ids, "base", layer))
