"""What `loractl plan` computes is what an engine allocates and an adapter takes."""

import pytest

from lorad import capacity
from lorad.capacity_speed import H200_BANDWIDTH, Machine


def planned(core, *ranks, **wish):
    machine = core.machine
    arena = capacity.known_arena(
        machine.spec,
        machine.layout,
        core.config.block_size,
        core.config.num_blocks,
        "blocks",
        max_model_len=core.config.max_model_len,
    )
    wanted = capacity.Wish(ranks=ranks, **wish)
    return capacity.plan(machine.spec, machine.layout, arena, wanted, Machine(H200_BANDWIDTH))


def test_weights_and_arena_are_the_memory_plans(start_core):
    core = start_core(num_blocks=100).core
    done, plan = planned(core, (16, 1)), core.machine.memory
    turns = 4 * core.machine.spec.head_dim // 2  # the rotary frequencies, in fp32
    assert done.model.weight_bytes == plan.weights - turns
    assert done.arena.num_bytes == plan.arena and done.arena.num_tokens == plan.num_tokens
    assert done.adapters[0].num_blocks == plan.adapter_blocks
    assert done.adapters[0].fit_alone == plan.num_adapters


@pytest.mark.parametrize("num_blocks", [8, 40, 512])
def test_the_floor_of_kv_is_the_schedulers(start_core, num_blocks):
    core = start_core(num_blocks=num_blocks).core
    assert planned(core, (4, 1)).arena.kv_floor_blocks == core.scheduler.memory.kv_floor


def test_an_adapter_and_a_request_take_the_blocks_that_were_planned(
    start_core, make_adapter, prompt
):
    driver = start_core(num_blocks=100)
    adapter = make_adapter("planned", rank=8)
    done = planned(driver.core, (8, 1), requests=1, tokens=70)
    driver.add(adapter)
    story = driver.submit("one", prompt(60), adapter.rev, max_tokens=10, ignore_eos=True)
    taken = []
    while not story.finish:
        driver.step()
        counts = driver.core.machine.pool.counts
        taken.append((counts.adapter, counts.kv_active + counts.kv_cached))
    assert max(taken)[0] == done.adapters[0].num_blocks == adapter.manifest.num_blocks
    assert max(kv for _, kv in taken) == done.kv.num_blocks
    assert adapter.manifest.true_bytes == done.adapters[0].true_bytes
