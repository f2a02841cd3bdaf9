"""Verification: every silent kind of damage is found, and named."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from engine import assembly
from engine.adapters.manifest import AdapterManifest, Limits
from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.adapters.rows import BaseRows
from engine.adapters.verify import main, write_probe
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.layout import GROUPS, MODULES, BlockLayout, place
from engine.messages import AddRevision, Answer, Evict, Load, PackedManifest, SamplingParams, Submit
from engine.models.base_files import BaseFiles
from engine.models.spec import read_spec
from engine.verify_messages import Verified, VerifyReport, VerifyRevision

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = {m: "mlp" if m in ("gate_proj", "up_proj", "down_proj") else "self_attn" for m in MODULES}


@dataclass(frozen=True)
class Stored:
    """An adapter as the store has it, and what the engine is told."""

    folder: Path
    source: AdapterManifest
    layout: BlockLayout
    packed: PackedManifest

    def probe(self) -> str:
        path = self.folder / f"probe-{time.monotonic_ns()}"
        rev = self.packed.rev
        write_probe(self.folder, self.source, self.layout, path, rev, Path(self.packed.path))
        return str(path)


@pytest.fixture
def store(model_dir: Path, tmp_path: Path) -> Callable[..., Stored]:
    """store("name", rank=4, ...): a PEFT folder, packed."""
    spec = read_spec(model_dir)

    def make(
        name: str,
        *,
        dtype: str = "float32",
        rank: int = 4,
        modules: tuple[str, ...] = MODULES,
        head: bool = False,
        seed: int = 0,
        bias: bool = False,
        dora: bool = False,
        file_dtype: str = "float32",
    ) -> Stored:
        folder = tmp_path / name
        folder.mkdir()
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        paths = {
            f"model.layers.{layer}.{NAMES[module]}.{module}": module
            for layer in range(spec.num_layers)
            for module in modules
        }
        for path, module in (paths | ({"lm_head": "lm_head"} if head else {})).items():
            d_in, d_out = spec.shapes.of(module)
            shapes = {"lora_A.weight": (rank, d_in), "lora_B.weight": (d_out, rank)}
            shapes |= {"lora_B.bias": (d_out,)} if bias else {}
            shapes |= {"lora_magnitude_vector": (d_out,)} if dora else {}
            for suffix, shape in shapes.items():
                value = torch.randn(shape, generator=generator) * 0.1
                tensors[f"base_model.model.{path}.{suffix}"] = value.to(DTYPES[file_dtype])
        words = f'"peft_type": "LORA", "r": {rank}, "lora_alpha": 8, "target_modules": null'
        words += f', "lora_bias": {str(bias).lower()}, "use_dora": {str(dora).lower()}'
        (folder / "adapter_config.json").write_text(f"{{{words}}}")
        save_file(tensors, folder / "adapter_model.safetensors")
        layout = spec.block_layout(block_size=16, dtype=dtype)
        source = inspect(folder, spec, Limits(), served_dtype=dtype)
        rev = revision_digest(folder, source)
        with BaseFiles(model_dir) as files:
            base = BaseRows(files, spec) if dora else None
            packed = pack_folder(folder, source, layout, folder, rev, base=base)
        return Stored(folder, source, layout, packed)

    return make


@pytest.fixture
def core_of(model_dir: Path) -> Iterator[Callable[..., EngineCore]]:
    cores = []

    def make(dtype: str = "float32", **settings: object) -> EngineCore:
        config = EngineConfig(
            model=str(model_dir), device="cpu", dtype=dtype, num_blocks=96, slots=4, max_rank=64
        )
        cores.append(EngineCore(replace(config, **settings)))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def answer(core: EngineCore, command_id: int) -> Answer:
    """Step until the command is answered."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        for found in core.step().answers:
            if found.command_id == command_id:
                return found
        if core.idle:
            core.wait()
    raise AssertionError("no answer")


def bring(core: EngineCore, packed: PackedManifest) -> None:
    core.take(AddRevision(command_id=1, manifest=packed))
    core.take(Load(command_id=2, rev=packed.rev))
    assert not answer(core, 2).code


def verified(core: EngineCore, stored: Stored) -> VerifyReport:
    core.take(VerifyRevision(3, stored.packed.rev, stored.probe()))
    found = answer(core, 3)
    assert found.report is not None, found
    core.residency.check()
    return found.report


def block_of(core: EngineCore, stored: Stored, layer: int, module: str) -> tuple[int, int]:
    """The arena's block, and a byte in it, in which the module's B begins."""
    placed = next(
        m
        for m in place(stored.packed.modules, stored.layout).modules
        if (m.layer, m.module) == (layer, module)
    )
    row = core.slots.find(stored.packed.rev)
    assert row is not None
    piece = placed.b.pieces[0]
    return row.blocks[piece.block], piece.offset


def flip_in_file(path: Path, at: int, bit: int = 6) -> None:
    path.chmod(0o640)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# --------------------------------------------------------------------- healthy
@pytest.mark.parametrize("file_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 16])
def test_a_healthy_adapter_of_every_dtype_is_well(store, core_of, dtype, file_dtype, rank) -> None:
    core, stored = core_of(dtype), store("a", dtype=dtype, file_dtype=file_dtype, rank=rank)
    bring(core, stored.packed)
    report = verified(core, stored)
    assert not report.findings
    assert report.modules == len(stored.packed.modules)
    assert 0 < report.worst_error < report.tolerance / 2, "the tolerance is close"
    assert report.bytes_checked == stored.packed.num_blocks * stored.layout.block_bytes


def test_a_head_is_held_against_its_bytes_though_its_effect_is_not_probed(store, core_of) -> None:
    core, stored = core_of(), store("a", head=True)
    bring(core, stored.packed)
    report = verified(core, stored)
    assert not report.findings
    assert report.modules == len(stored.packed.modules) - 1
    layer = stored.layout.shapes.num_layers
    block, offset = block_of(core, stored, layer, "lm_head")
    core.machine.arena.bytes[block, offset] ^= 1
    [finding] = verified(core, stored).findings
    assert (finding.what, finding.layer, finding.module) == ("resident", layer, "lm_head")


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_belong_to_the_effect(store, core_of, dtype) -> None:
    core, stored = core_of(dtype), store("a", dtype=dtype, bias=True)
    bring(core, stored.packed)
    assert not verified(core, stored).findings


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_verifier_process_says_what_a_dora_does(
    store, core_of, dtype, tmp_path, monkeypatch, capsys
) -> None:
    """It packs anew for the gains, and holds the packed file against that."""
    monkeypatch.setattr(os, "nice", lambda by: 0)
    core, stored = core_of(dtype), store("a", dtype=dtype, dora=True)
    bring(core, stored.packed)
    told = run_verifier(core, stored, tmp_path / "out", capsys)
    assert (told.rev, told.findings) == (stored.packed.rev, ())
    assert told.bytes_checked == stored.packed.num_blocks * stored.layout.block_bytes
    core.take(VerifyRevision(3, stored.packed.rev, str(tmp_path / "out" / "probe")))
    report = answer(core, 3).report
    assert not report.findings and report.modules == len(stored.packed.modules)

    flip_in_file(Path(stored.packed.path), stored.layout.block_bytes + 1)
    told = run_verifier(core, stored, tmp_path / "again", capsys)
    [finding] = told.findings
    assert (told.bytes_different, finding.what, finding.layer >= 0) == (1, "packed", True)


def run_verifier(core: EngineCore, stored: Stored, out: Path, capsys) -> Verified:
    out.mkdir()
    words = {
        "folder": stored.folder,
        "model": core.config.model,
        "block-size": 16,
        "dtype": stored.layout.dtype,
        "out": out,
        "probe": out / "probe",
        "packed": stored.packed.path,
    }
    capsys.readouterr()
    assert main([f"--{key}={value}" for key, value in words.items()]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=Verified)


def test_what_mlx_saved_is_read_as_it_is(store, core_of) -> None:
    """Its factors lie in the file as their transposes."""
    core, stored = core_of(), store("a", modules=("q_proj", "down_proj"))
    weights = load_file(stored.folder / "adapter_model.safetensors")
    (stored.folder / "adapter_model.safetensors").unlink()
    mlx = {
        key.removeprefix("base_model.model.")
        .replace("lora_A.weight", "lora_a")
        .replace("lora_B.weight", "lora_b"): value.T.contiguous()
        for key, value in weights.items()
    }
    save_file(mlx, stored.folder / "adapters.safetensors")
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    config = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys},
    }
    (stored.folder / "adapter_config.json").write_text(json.dumps(config))
    spec = read_spec(Path(core.config.model))
    source = inspect(stored.folder, spec, Limits(), served_dtype="float32")
    assert source.weights_file == "adapters.safetensors"
    bring(core, stored.packed)
    report = verified(core, Stored(stored.folder, source, stored.layout, stored.packed))
    assert not report.findings and report.modules == len(stored.packed.modules)


def test_a_gain_that_changed_is_found_in_its_module(store, core_of) -> None:
    core, stored = core_of(), store("a", modules=("k_proj",), dora=True)
    bring(core, stored.packed)
    assert not verified(core, stored).findings
    placed = place(stored.packed.modules, stored.layout).modules[1]
    piece, row = placed.b.pieces[-1], core.slots.find(stored.packed.rev)
    high = piece.offset + (piece.rows - 2) * placed.b.stride
    core.machine.arena.bytes[row.blocks[piece.block], high + 2] ^= 64
    assert named(verified(core, stored), "effect") == {(1, "k_proj")}


# --------------------------------------------------------------------- damage
def named(report: VerifyReport, what: str) -> set[tuple[int, str]]:
    return {(f.layer, f.module) for f in report.findings if f.what == what}


def test_a_bit_that_flips_in_the_arena_is_named_with_its_module(store, core_of) -> None:
    core, stored = core_of(), store("a")
    bring(core, stored.packed)
    block, offset = block_of(core, stored, 1, "up_proj")
    core.machine.arena.bytes[block, offset + 3] ^= 64
    report = verified(core, stored)
    assert named(report, "resident") == {(1, "up_proj")}
    assert named(report, "effect") == {(1, "up_proj")}
    assert report.bytes_different == 1
    assert (report.worst_layer, report.worst_module) == (1, "up_proj")
    assert not named(report, "packed")


def test_the_lowest_bit_of_a_weight_is_found_too(store, core_of) -> None:
    core, stored = core_of(), store("a")
    bring(core, stored.packed)
    block, offset = block_of(core, stored, 0, "k_proj")
    core.machine.arena.bytes[block, offset] ^= 1
    report = verified(core, stored)
    assert (named(report, "resident"), named(report, "effect")) == ({(0, "k_proj")}, set())


def test_a_bit_that_flips_in_the_packed_file_after_it_was_loaded_is_found(store, core_of) -> None:
    core, stored = core_of(), store("a")
    bring(core, stored.packed)
    probe = stored.probe()
    flip_in_file(Path(stored.packed.path), 5)
    core.take(VerifyRevision(3, stored.packed.rev, probe))
    report = answer(core, 3).report
    assert [f.what for f in report.findings] == ["packed", "resident"]
    assert "block 0 of" in report.findings[0].message


def test_scaling_that_is_not_the_files_is_found_in_every_module(store, core_of) -> None:
    core, stored = core_of(), store("a", modules=("q_proj", "down_proj"))
    wrong = [replace(m, scaling=m.scaling * 1.01) for m in stored.packed.modules]
    bring(core, replace(stored.packed, modules=tuple(wrong)))
    report = verified(core, stored)
    assert named(report, "effect") == {(m.layer, m.module) for m in wrong}
    assert report.worst_error == pytest.approx(0.01, rel=0.01)
    assert report.bytes_different == 0


def test_two_modules_that_changed_places_are_found(store, core_of) -> None:
    """k and v have one shape: only what they do tells them apart."""
    core, stored = core_of(), store("a", modules=("q_proj", "k_proj", "v_proj"))
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    path = "adapter_model.safetensors"
    weights = load_file(stored.folder / path)
    swapped = {
        key.replace(module, other.get(module, module)): value
        for key, value in weights.items()
        for module in [next(m for m in MODULES if m in key)]
    }
    bring(core, stored.packed)
    save_file(swapped, stored.folder / path)
    spec = read_spec(Path(core.config.model))
    source = inspect(stored.folder, spec, Limits(), served_dtype="float32")
    report = verified(core, Stored(stored.folder, source, stored.layout, stored.packed))
    assert named(report, "effect") == {(la, m) for la in (0, 1) for m in other}


def test_a_module_that_the_file_lacks_is_found_where_it_acts(store, core_of) -> None:
    core, stored = core_of(), store("a", modules=("k_proj",))
    wrong = tuple(replace(m, module="v_proj") for m in stored.packed.modules)
    bring(core, replace(stored.packed, modules=wrong))
    found = {f.module: f.message for f in verified(core, stored).findings if f.what == "effect"}
    assert "should not" in found["v_proj"] and "off by" in found["k_proj"]


def test_a_table_that_points_to_another_adapters_blocks_is_found(store, core_of) -> None:
    """The views that requests go through were made from a row that is not the slot's."""
    core, stored, other = core_of(), store("a", seed=1), store("b", seed=2)
    bring(core, stored.packed)
    bring(core, other.packed)
    mine, theirs = (core.slots.find(s.packed.rev) for s in (stored, other))
    planner = core.verifier._planner
    planner._views[mine.slot] = (mine.generation, planner._pairs(stored.packed, theirs.blocks))
    report = verified(core, stored)
    assert named(report, "effect") and not named(report, "resident")
    assert not verified(core, other).findings


def test_a_packed_file_of_other_weights_is_found_though_its_checksums_agree(store, core_of) -> None:
    core, stored, other = core_of(), store("a", seed=1), store("b", seed=2)
    stale = replace(stored.packed, path=other.packed.path)
    bring(core, stale)
    report = verified(core, replace_packed(stored, stale))
    assert report.bytes_different == 0
    assert len(named(report, "effect")) == min(16, len(stale.modules))


def replace_packed(stored: Stored, packed: PackedManifest) -> Stored:
    return Stored(stored.folder, stored.source, stored.layout, packed)


def test_a_stored_file_of_another_revision_is_found(store, core_of) -> None:
    core, stored = core_of(), store("a")
    bring(core, stored.packed)
    probe = stored.folder / "probe"
    write_probe(stored.folder, stored.source, stored.layout, probe, "f" * 64)
    core.take(VerifyRevision(3, stored.packed.rev, str(probe)))
    [finding] = answer(core, 3).report.findings
    assert finding.what == "stored" and "f" * 12 in finding.message


# --------------------------------------------------------------------- beside traffic
def test_a_step_does_one_slice_at_most_and_requests_go_on(store, core_of, monkeypatch) -> None:
    core, stored = core_of(), store("a", rank=16)
    bring(core, stored.packed)
    core.take(
        Submit(
            request_id="r",
            prompt=[5, 6, 7],
            rev=stored.packed.rev,
            sampling=SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
        )
    )
    done: list[object] = []
    probe, bring_back = core.verifier._probe, core.verifier._bring
    monkeypatch.setattr(core.verifier, "_probe", lambda *a: (done.append(a), probe(*a)))
    monkeypatch.setattr(core.verifier, "_bring", lambda *a: (done.append(a), bring_back(*a)))
    core.take(VerifyRevision(3, stored.packed.rev, stored.probe()))
    report, tokens, limit = None, 0, time.monotonic() + 60
    while report is None and time.monotonic() < limit:
        before = len(done)
        frame = core.step()
        assert len(done) - before <= 1
        assert not frame.deltas or all(d.finish_reason is None for d in frame.deltas)
        tokens += sum(len(d.tokens) for d in frame.deltas)
        report = next((a.report for a in frame.answers if a.command_id == 3), None)
    slices = 2 * len(GROUPS) + stored.packed.num_blocks
    assert report is not None and report.slices == len(done) == slices
    assert tokens >= slices and not report.findings


def test_one_that_has_to_leave_is_not_held_up(store, core_of) -> None:
    core, stored = core_of(), store("a")
    bring(core, stored.packed)
    core.take(VerifyRevision(3, stored.packed.rev, stored.probe()))
    core.step()
    core.step()
    core.take(Evict(command_id=4, rev=stored.packed.rev))
    found = {}
    limit = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < limit:
        found |= {a.command_id: a for a in core.step().answers}
    assert found[3].code == "conflict" and not found[4].code
    core.residency.check()


def test_one_that_is_not_on_the_gpu_is_a_conflict_and_an_unknown_one_is_not_found(
    store, core_of
) -> None:
    core, stored = core_of(), store("a")
    core.take(VerifyRevision(3, stored.packed.rev, "nowhere"))
    assert answer(core, 3).code == "model_not_found"
    core.take(AddRevision(command_id=1, manifest=stored.packed))
    core.take(VerifyRevision(4, stored.packed.rev, "nowhere"))
    assert answer(core, 4).code == "conflict"


def test_a_probe_file_that_cannot_be_read_ends_it_with_a_reason(store, core_of) -> None:
    core, stored = core_of(), store("a")
    bring(core, stored.packed)
    core.take(VerifyRevision(3, stored.packed.rev, str(stored.folder / "none")))
    found = answer(core, 3)
    assert found.code == "load_failed" and "No such file" in found.message
    assert not verified(core, stored).findings


# --------------------------------------------------------------------- on load
@pytest.mark.parametrize("mode", ["sample", "full"])
def test_a_damaged_packed_file_is_not_loaded_and_its_request_hears_why(
    store, core_of, mode
) -> None:
    core, stored = core_of(verify_on_load=mode), store("a", modules=("q_proj",), rank=1)
    assert stored.packed.num_blocks == 1, "a sample of one block is all of it"
    flip_in_file(Path(stored.packed.path), 7, bit=0)
    core.take(AddRevision(command_id=1, manifest=stored.packed))
    core.take(Load(command_id=2, rev=stored.packed.rev))
    core.take(
        Submit(
            request_id="r",
            prompt=[5],
            rev=stored.packed.rev,
            sampling=SamplingParams(max_tokens=4),
        )
    )
    deltas, events, answers = [], [], {}
    limit = time.monotonic() + 60
    while not (deltas and 2 in answers) and time.monotonic() < limit:
        frame = core.step()
        deltas += frame.deltas
        events += frame.adapters
        answers |= {a.command_id: a for a in frame.answers}
    assert answers[2].code == "adapter_damaged"
    assert "block 0 of 1 is not what was packed" in answers[2].message
    [delta] = deltas
    assert (delta.finish_reason, delta.code, delta.tokens) == ("error", "adapter_damaged", ())
    assert [e.cause for e in events if e.message] == ["damaged"]


def test_full_looks_at_the_last_block_too(store, core_of) -> None:
    core, stored = core_of(verify_on_load="full"), store("a", rank=16)
    last = (stored.packed.num_blocks - 1) * stored.layout.block_bytes
    flip_in_file(Path(stored.packed.path), last)
    core.take(AddRevision(command_id=1, manifest=stored.packed))
    core.take(Load(command_id=2, rev=stored.packed.rev))
    found = answer(core, 2)
    assert found.code == "adapter_damaged"
    assert f"block {stored.packed.num_blocks - 1} of" in found.message


def test_off_looks_at_nothing_and_verify_finds_it_all_the_same(store, core_of) -> None:
    core, stored = core_of(verify_on_load="off"), store("a")
    path = Path(stored.packed.path)
    flip_in_file(path, 7, bit=0)
    path.with_suffix(".sums").unlink()
    bring(core, stored.packed)
    assert verified(core, stored).findings


def test_what_is_as_it_was_packed_loads_and_without_checksums_it_does_not(store, core_of) -> None:
    core, stored = core_of(verify_on_load="full"), store("a")
    bare = store("b", seed=1)
    bring(core, stored.packed)
    Path(bare.packed.path).with_suffix(".sums").unlink()
    core.take(AddRevision(command_id=3, manifest=bare.packed))
    core.take(Load(command_id=4, rev=bare.packed.rev))
    assert answer(core, 4).code == "adapter_damaged"


# --------------------------------------------------------------------- the kernels
@pytest.fixture
def card_path(monkeypatch) -> None:
    """Steps are planned for the kernels, which run on the interpreter."""
    monkeypatch.setattr(assembly, "is_card", lambda device: True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_kernels_are_held_against_the_file_by_way_of_the_slots_row(
    store, core_of, card_path, dtype
) -> None:
    """A row of the device's table that points to another adapter's blocks is found."""
    core = core_of(dtype, max_num_seqs=3, max_rank=16, max_batch_tokens=40)
    stored = store("a", dtype=dtype, seed=1, rank=5, bias=True)
    other = store("b", dtype=dtype, seed=2, rank=16, dora=True)
    for one in (stored, other):
        bring(core, one.packed)
        report = verified(core, one)
        assert not report.findings
        assert report.worst_error < report.tolerance / 2
    table = core.verifier._planner._device.slots.table
    mine, theirs = (core.slots.find(s.packed.rev).slot for s in (stored, other))
    table[mine] = table[theirs]
    report = verified(core, stored)
    assert named(report, "effect") and not named(report, "resident")
    assert not verified(core, other).findings


@pytest.mark.slow
def test_steps_and_their_plans_are_left_alone(store, core_of, card_path) -> None:
    """Deterministic steps are not padded: all but their LoRA is plain torch."""
    sizes = {"max_num_seqs": 3, "max_rank": 16, "max_batch_tokens": 40, "deterministic": True}
    told = []
    for verify in (False, True):
        core, stored = core_of(**sizes), store(f"a{verify}", seed=1)
        bring(core, stored.packed)
        asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        rev = stored.packed.rev
        core.take(Submit(request_id="r", prompt=[5, 6, 7], rev=rev, sampling=asked))
        if verify:
            core.take(VerifyRevision(3, rev, stored.probe()))
        tokens: list[int] = []
        while len(tokens) < 6:
            tokens += [t for d in core.step().deltas for t in d.tokens]
        told.append(tokens)
    assert told[0] == told[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_on_a_card_it_is_well_allocates_nothing_and_finds_a_flipped_bit(
    store, core_of, dtype, rank
) -> None:
    core = core_of(dtype, device="cuda", verify_on_load="full", num_blocks=192)
    stored = store("a", dtype=dtype, rank=rank, bias=True)
    bring(core, stored.packed)
    before = torch.cuda.memory_allocated()
    report = verified(core, stored)
    assert not report.findings
    assert 0 < report.worst_error < report.tolerance / 2, "the tolerance is close"
    assert dtype == "float16" or torch.cuda.memory_allocated() == before
    block, offset = block_of(core, stored, 1, "up_proj")
    core.machine.arena.bytes[block, offset + 1] ^= 64
    report = verified(core, stored)
    assert named(report, "resident") == {(1, "up_proj")} and report.bytes_different == 1
