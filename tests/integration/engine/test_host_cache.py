"""HostCache and the copier: files into host memory, host memory into the arena."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.adapters.copier import ThreadCopier, runs
from engine.adapters.host import ExtentAllocator, HostCache
from engine.memory.arena import Arena
from engine.models.spec import read_spec

BLOCK = 1024
MakeFile = Callable[..., str]


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    def make(name: str, blocks: int, *, spare: int = 0) -> str:
        path = tmp_path / name
        body = bytes((len(name) + i) % 251 for i in range(blocks * BLOCK + spare))
        path.write_bytes(body)
        return str(path)

    return make


@pytest.fixture
def make_cache() -> Iterator[Callable[..., HostCache]]:
    caches = []

    def make(budget_blocks: int, **settings: int) -> HostCache:
        cache = HostCache(block_bytes=BLOCK, budget_bytes=budget_blocks * BLOCK, **settings)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.close()


def read(cache: HostCache, rev: str, path: str, blocks: int) -> str:
    """Want `rev`, wait for the read's end, and return its error."""
    assert cache.want(rev, path, blocks * BLOCK)
    return wait(cache)[rev]


def wait(cache: HostCache) -> dict[str, str]:
    limit = time.monotonic() + 10
    done: dict[str, str] = {}
    while cache.in_flight:
        assert time.monotonic() < limit, "the reader did not answer"
        done |= {d.rev: d.error for d in cache.poll()}
    return done


def test_a_read_brings_exactly_the_files_bytes(make_cache, make_file) -> None:
    cache, path = make_cache(4), make_file("a", 3)
    assert read(cache, "a", path, 3) == ""
    assert cache.ready("a")
    address, held = cache.hold("a"), cache.held("a")
    assert held.numpy().tobytes() == Path(path).read_bytes()
    assert address == held.data_ptr(), "what holds it by its address finds the same bytes"
    assert cache.used_bytes == 3 * BLOCK


def test_those_that_made_room_for_others_are_told_once(make_cache, make_file) -> None:
    cache = make_cache(4)
    for name in "abc":
        read(cache, name, make_file(name, 2), 2)
    assert cache.take_lost() == ["a"] and cache.take_lost() == []
    cache.drop("b")
    assert cache.take_lost() == [], "whoever drops one knows"
    assert cache.used_bytes == 2 * BLOCK


def test_wanting_twice_reads_once(make_cache, make_file) -> None:
    cache, path = make_cache(4), make_file("a", 2)
    assert cache.want("a", path, 2 * BLOCK) and cache.want("a", path, 2 * BLOCK)
    assert cache.in_flight == 1
    assert wait(cache) == {"a": ""}
    assert cache.want("a", path, 2 * BLOCK) and cache.in_flight == 0


@pytest.mark.parametrize("spare", [-1, 1])
def test_a_file_of_another_size_is_an_error_and_takes_no_room(make_cache, make_file, spare) -> None:
    cache, path = make_cache(4), make_file("a", 2, spare=spare)
    error = read(cache, "a", path, 2)
    assert error.startswith("a: expected 2048 bytes, found")
    assert not cache.ready("a") and cache.used_bytes == 0


def test_a_missing_file_is_an_error_and_can_be_tried_again(make_cache, make_file) -> None:
    cache = make_cache(4)
    path = make_file("a", 2)
    Path(path).rename(path + ".away")
    assert "No such file" in read(cache, "a", path, 2)
    Path(path + ".away").rename(path)
    assert read(cache, "a", path, 2) == ""


def test_the_least_recently_used_entry_gives_way_and_a_protected_one_does_not(
    make_cache, make_file
) -> None:
    cache = make_cache(4)
    paths = {rev: make_file(rev, 2) for rev in "abcd"}
    for rev in "ab":
        read(cache, rev, paths[rev], 2)
    cache.want("a", paths["a"], 2 * BLOCK)  # used again: b is the older one now
    read(cache, "c", paths["c"], 2)
    assert [cache.ready(rev) for rev in "abc"] == [True, False, True]
    cache.protect("a", True)
    read(cache, "d", paths["d"], 2)
    assert [cache.ready(rev) for rev in "acd"] == [True, False, True]
    cache.protect("d", True)
    assert not cache.want("b", paths["b"], 2 * BLOCK)


def test_an_entry_in_a_copy_keeps_its_bytes_until_the_copy_lets_go(make_cache, make_file) -> None:
    cache, path, other = make_cache(2), make_file("a", 2), make_file("bb", 2)
    read(cache, "a", path, 2)
    cache.hold("a")
    held = cache.held("a")
    cache.drop("a")
    assert not cache.ready("a")
    assert not cache.want("bb", other, 2 * BLOCK), "its room is still being copied"
    assert held.numpy().tobytes() == Path(path).read_bytes()
    cache.let_go("a")
    assert read(cache, "bb", other, 2) == ""


def test_an_entry_dropped_while_it_is_read_gives_its_room_back_after_the_read(
    make_cache, make_file
) -> None:
    cache, path = make_cache(2, slow_seconds=0.05), make_file("a", 2)
    cache.want("a", path, 2 * BLOCK)
    cache.drop("a")
    assert cache.used_bytes == 2 * BLOCK
    wait(cache)
    assert cache.used_bytes == 0 and not cache.ready("a")


def test_without_a_budget_a_load_passes_through_the_staging_room_and_does_not_stay(
    make_cache, make_file
) -> None:
    cache, path = make_cache(0, staging_bytes=4 * BLOCK), make_file("a", 2)
    assert read(cache, "a", path, 2) == "" and cache.ready("a")
    cache.hold("a")
    cache.let_go("a")
    assert not cache.ready("a") and cache.used_bytes == 0


def test_an_adapter_larger_than_everything_is_refused_at_once(make_cache, make_file) -> None:
    cache = make_cache(2)
    assert not cache.want("a", make_file("a", 3), 3 * BLOCK)
    assert cache.limit_bytes == 2 * BLOCK


def test_extents_grow_together_again() -> None:
    extents = ExtentAllocator(10)
    starts = [extents.take(n) for n in (3, 3, 4)]
    assert starts == [0, 3, 6] and extents.take(1) is None
    extents.give(0, 3)
    extents.give(6, 4)
    assert extents.take(5) is None, "seven are free, but not in a row"
    extents.give(3, 3)
    assert extents.take(10) == 0


def test_the_copier_puts_every_block_in_its_place_and_says_so_once(
    make_cache, make_file, model_dir
) -> None:
    spec = read_spec(model_dir)
    layout = spec.block_layout(block_size=16, dtype="float32")
    arena = Arena(spec, layout, block_size=16, num_blocks=6, device=torch.device("cpu"))
    cache = HostCache(block_bytes=layout.block_bytes, budget_bytes=4 * layout.block_bytes)
    copier = ThreadCopier(arena, cache)
    per_block = layout.block_bytes // BLOCK
    path = make_file("a", 2 * per_block)
    assert cache.want("a", path, 2 * layout.block_bytes)
    assert wait(cache) == {"a": ""}
    copier.start("a", [5, 1])
    assert copier.busy("a")
    done: list[str] = []
    limit = time.monotonic() + 10
    while not done and time.monotonic() < limit:
        done = copier.poll()
    assert done == ["a"] and copier.poll() == [] and not copier.busy("a")
    body = Path(path).read_bytes()
    assert arena.bytes[5].numpy().tobytes() + arena.bytes[1].numpy().tobytes() == body
    assert not arena.bytes[[0, 2, 3, 4]].any()
    copier.close()
    cache.close()


def test_arena_views_of_layers_tile_a_block_without_overlap(model_dir) -> None:
    spec = read_spec(model_dir)
    layout = spec.block_layout(block_size=16, dtype="float32")
    arena = Arena(spec, layout, block_size=16, num_blocks=3, device=torch.device("cpu"))
    for layer in range(spec.num_layers):
        view = arena.kv(layer)
        assert view.shape == (3, 2, 16, spec.num_kv_heads, spec.head_dim)
        view[1] += layer + 1
    block = arena.bytes.view(torch.float32)
    assert not block[[0, 2]].any()
    half = block.shape[1] // 2
    assert (block[1, :half] == 1).all() and (block[1, half:] == 2).all()


@pytest.mark.parametrize(
    ("blocks", "most", "found"),
    [
        ([], 4, []),
        ([7], 4, [(0, 7, 1)]),
        ([7, 8, 9, 3], 4, [(0, 7, 3), (3, 3, 1)]),
        ([0, 1, 2, 3, 4], 2, [(0, 0, 2), (2, 2, 2), (4, 4, 1)]),
        ([5, 4, 3], 4, [(0, 5, 1), (1, 4, 1), (2, 3, 1)]),
    ],
)
def test_blocks_in_a_row_are_one_copy_up_to_a_size(blocks, most, found) -> None:
    assert runs(blocks, most) == found


def test_what_is_worth_least_makes_room_first_and_of_equals_the_least_recently_used(
    make_cache, make_file
) -> None:
    cache = make_cache(8)
    for rev in ("old", "dear", "used", "cheap"):
        read(cache, rev, make_file(rev, 2), 2)
    cache.appraise("dear", 90)
    cache.appraise("cheap", 10)
    cache.touch("old")
    left = []
    for n in range(4):
        read(cache, f"new{n}", make_file(f"new{n}", 2), 2)
        cache.protect(f"new{n}", True)
        left += [
            r for r in ("old", "dear", "used", "cheap") if not cache.ready(r) and r not in left
        ]
    assert left == ["cheap", "used", "old", "dear"]


def test_a_read_says_how_long_it_took(make_cache, make_file) -> None:
    cache = make_cache(4, slow_seconds=0.02)
    assert cache.want("a", make_file("a", 2), 2 * BLOCK)
    limit, done = time.monotonic() + 10, []
    while not done and time.monotonic() < limit:
        done = cache.poll()
    assert done[0].seconds >= 0.02
