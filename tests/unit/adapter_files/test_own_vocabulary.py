"""Adapters of a resized vocabulary, as PEFT writes them: which rows are packed, and what embedding
and head become with them."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.adapters import verify
from engine.adapters.manifest import AdapterManifest
from engine.adapters.pack import pack_folder, pack_for_base
from engine.adapters.peft import inspect
from engine.errors import AdapterInvalid
from engine.layout import BlockLayout, PlacedModule, RowRun, place
from engine.messages import PackedManifest
from engine.models.bases import read_base
from engine.verify_messages import Verified
from tests.fakes.resized_peft import CASES, EXTRA, HIDDEN, V, is_lost, make_base, tune


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {tied: make_base(tmp_path_factory.mktemp("base"), tied) for tied in (False, True)}


def pack(
    base: Path, folder: Path, dtype: str = "float32", extra: int = EXTRA
) -> tuple[AdapterManifest, PackedManifest, BlockLayout]:
    spec = read_base(base, extra_vocab=extra)
    manifest = inspect(folder, spec, base=base, served_dtype=dtype)
    out = folder / "packed"
    out.mkdir(exist_ok=True)
    sizes: dict[str, Any] = {"block_size": 16, "dtype": dtype, "max_rank": 16}
    return manifest, *pack_for_base(folder, base, out, extra_vocab=extra, **sizes)


def read(data: bytes, run: RowRun, layout: BlockLayout, width: int) -> Tensor:
    """(rows, width) of a packed file, folds undone."""
    rows, dtype = [], getattr(torch, layout.dtype)
    for piece in run.pieces:
        at = piece.block * layout.block_bytes + piece.offset
        for i in range(piece.rows):
            start = at + i * run.stride
            raw = bytearray(data[start : start + run.width * layout.itemsize])
            rows.append(torch.frombuffer(raw, dtype=dtype))
    whole = torch.stack(rows).reshape(run.rows // run.folds, -1)
    assert not whole[:, width:].any()
    return whole[:, :width]


def served(
    base: Path, packed: PackedManifest, layout: BlockLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, head and its bias, (num_ids, ...), by what the modules say; NaN without a row."""
    weights = load_file(base / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    held = {"embed_tokens": embedding, "lm_head": weights.get("lm_head.weight", embedding)}
    num_ids = V + EXTRA
    ends = {n: torch.full((num_ids, HIDDEN), torch.nan) for n in held}
    data = Path(packed.path).read_bytes()
    placed: dict[str, PlacedModule] = {}
    told = {m.module: m for m in packed.modules}
    for module in place(packed.modules, layout).modules:
        placed[module.module] = module
    bias = torch.zeros(num_ids)
    for name, end in ends.items():
        end[:V] = held[name]
        if rows := placed.get(f"{name}.rows"):
            ids = told[f"{name}.rows"].tokens
            assert list(ids) == sorted(set(ids))
            end[list(ids) or slice(0, rows.rank)] = read(data, rows.a, layout, HIDDEN)
        if pair := placed.get(name):
            widths = (num_ids, HIDDEN) if name == "embed_tokens" else (HIDDEN, num_ids)
            a = read(data, pair.a, layout, widths[0])
            b = read(data, pair.b, layout, widths[1])
            delta = pair.scaling * a[: pair.rank].T @ b[: pair.rank]
            end += delta if name == "embed_tokens" else delta.T
            if pair.bias:
                bias = pair.scaling * b[pair.rank]
            if pair.gain:
                end *= b[-2:].sum(0)[:, None]
    return ends["embed_tokens"], ends["lm_head"], bias


@pytest.mark.parametrize(("tied", "size", "name"), CASES)
def test_embedding_and_head_are_what_peft_loads_into_a_resized_base(
    tied: bool, size: int, name: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tuned = tune(bases[tied], size, name, tmp_path / "adapter")
    if is_lost(tied, size, name):
        with pytest.raises(AdapterInvalid) as caught:
            pack(bases[tied], tuned.folder)
        assert caught.value.reason == "E_VOCAB_RESIZED"
        other = "embed_tokens" if "head" in name else "lm_head"
        assert other in caught.value.message and "modules_to_save" in caught.value.hint
        return
    manifest, packed, layout = pack(bases[tied], tuned.folder)
    embedding, head, bias = served(bases[tied], packed, layout)
    assert (embedding[:size] - tuned.embedding).abs().max() < 1e-5
    assert (head[:size] - tuned.head).abs().max() < 1e-5
    assert (bias[:size] - tuned.bias).abs().max() < 1e-5
    assert packed.modules == manifest.modules
    assert all(m.tokens or m.rank >= V for m in packed.modules if m.replaces)
    assert packed.num_tokens == manifest.num_tokens == (88 if size < V else 0)


def test_of_a_resized_vocabulary_the_new_rows_are_packed_alone(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    tuned = tune(bases[True], 104, "nothing trained", tmp_path / "adapter")
    manifest, packed, layout = pack(bases[True], tuned.folder)
    told = [(m.module, m.rank, m.tokens) for m in manifest.modules]
    new = (100, 101, 102, 103)
    assert told[1:] == [("embed_tokens.rows", 4, new), ("lm_head.rows", 4, new)]
    assert packed.num_blocks * layout.block_bytes < 32 << 10
    assert manifest.warnings == (
        "it has rows for 4 more tokens than the base, and no tokenizer that knows them: they can be"
        " neither written nor drawn; put the tokenizer files that it was trained with beside the"
        " weights",
    )


def write(folder: Path, base: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter with factors of ones on q_proj beside `tensors`."""
    folder.mkdir()
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"base_model.model.{name}": t for name, t in tensors.items()} | {
        f"{q}.lora_A.weight": torch.ones(3, HIDDEN),
        f"{q}.lora_B.weight": torch.ones(HIDDEN, 3),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 3, "lora_alpha": 5}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


def changed(base: Path, ids: list[int], rows: int = V) -> Tensor:
    """The base's head with `ids` changed, and so many rows."""
    head = load_file(base / "model.safetensors")["lm_head.weight"]
    head = torch.cat((head, torch.ones(rows, HIDDEN)))[:rows].contiguous()
    head[ids] += 1
    return head


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_rows_that_differ_are_packed_with_their_ids_and_from_half_of_them_on_all(
    dtype: str, saved: torch.dtype, bases: dict[bool, Path], tmp_path: Path
) -> None:
    """A base that is float32, so what bfloat16 rounds differs: only rows of few bits do not."""
    base = tmp_path / "base"
    shutil.copytree(bases[False], base)
    weights = load_file(base / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in weights.items()}, base / "model.safetensors")
    for count, ids in ((0, []), (3, [7, 8, 99]), (50, list(range(50))), (51, list(range(51)))):
        head = changed(base, ids).to(saved)
        folder = tmp_path / f"{count}"
        write(folder, base, {"lm_head.weight": head}, modules_to_save=["lm_head"])
        manifest, packed, layout = pack(base, folder, dtype)
        if not ids:
            assert [m.module for m in packed.modules] == ["q_proj"]
            assert "equal to the base's" in manifest.warnings[0]
            continue
        module = packed.modules[-1]
        own = tuple(ids) if count <= 50 else ()
        assert (module.module, module.tokens) == ("lm_head.rows", own)
        run = place(packed.modules, layout).modules[-1].a
        rows = read(Path(packed.path).read_bytes(), run, layout, HIDDEN)
        assert torch.equal(rows, (head[ids] if own else head).to(rows.dtype))


def test_without_the_base_s_files_all_rows_are_packed(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    spec = read_base(bases[False])
    head = {"lm_head.weight": changed(bases[False], [5])}
    folder = write(tmp_path / "a", bases[False], head, modules_to_save=["lm_head"])
    assert inspect(folder, spec, base=bases[False]).modules[-1].tokens == (5,)
    module = inspect(folder, spec).modules[-1]
    assert (module.rank, module.tokens) == (V, ())


def test_a_copy_that_was_not_to_be_trained_and_differs_in_most_rows_is_doubted(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    base = bases[False]
    spec = read_base(base, extra_vocab=EXTRA)
    weights = load_file(base / "model.safetensors")
    embedding = torch.cat((weights["model.embed_tokens.weight"], torch.ones(2, HIDDEN)))
    for count, doubted in ((50, False), (51, True)):
        head = changed(base, list(range(count)), 102)
        tensors = {"lm_head.weight": head, "model.embed_tokens.weight": embedding}
        folder = write(tmp_path / str(count), base, tensors)
        said = [w for w in inspect(folder, spec, base=base).warnings if "another base" in w]
        assert len(said) == doubted
        assert all("lm_head.weight" in w and "51 of 100 rows" in w for w in said)


def test_the_packed_file_of_rows_that_differ_is_for_this_base_alone(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    head = {"lm_head.weight": changed(bases[False], [5])}
    folder = write(tmp_path / "a", bases[False], head, modules_to_save=["lm_head"])
    other = tmp_path / "other"
    shutil.copytree(bases[False], other)
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"lm_head.weight": changed(other, [50])}, other / "model.safetensors")
    one, another = pack(bases[False], folder)[1], pack(other, folder)[1]
    assert one.layout != another.layout
    assert (one.modules[-1].tokens, another.modules[-1].tokens) == ((5,), (5, 50))


def test_whether_resized_ends_were_listed_is_part_of_the_revision(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    """On a tied base it decides whether the head follows; of the base's size it goes without."""
    base, both = bases[True], {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        both[name] = changed(bases[False], [5], 102)
    listed = write(tmp_path / "a", base, both, modules_to_save=["embed_tokens"])
    not_listed = write(tmp_path / "b", base, both)
    assert pack(base, listed)[1].rev != pack(base, not_listed)[1].rev


def test_every_rank_has_the_ends_whole(bases: dict[bool, Path], tmp_path: Path) -> None:
    tuned = tune(bases[False], 104, "both with factors", tmp_path / "adapter")
    sizes: dict[str, Any] = {"block_size": 16, "dtype": "float32", "max_rank": 16}
    packed, layout = pack_for_base(
        tuned.folder, bases[False], tmp_path, ranks=2, extra_vocab=EXTRA, **sizes
    )
    alone = pack(bases[False], tuned.folder)
    data, whole = Path(packed.path).read_bytes(), Path(alone[1].path).read_bytes()
    ours = place(packed.modules, layout).modules
    theirs = place(alone[1].modules, alone[2]).modules
    half = packed.num_blocks * layout.block_bytes
    for mine, other in zip(ours, theirs, strict=True):
        if mine.layer < 1:
            continue
        d_in, d_out = layout.shapes.of(mine.module)
        for run, same, width in ((mine.a, other.a, d_in), (mine.b, other.b, d_out)):
            for rank in (0, 1) if run.rows else ():
                part = data[rank * half :][:half]
                expected = read(whole, same, alone[2], width)
                assert torch.equal(read(part, run, layout, width), expected)


def test_verification_names_the_end_whose_bytes_were_changed(
    bases: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = tune(bases[False], 104, "both with factors", tmp_path / "adapter")
    _, packed, layout = pack(bases[False], tuned.folder)
    probes = iter(range(9))

    def verified() -> Verified:
        out = tmp_path / f"fresh{next(probes)}"
        out.mkdir()
        told = {
            "folder": tuned.folder,
            "model": bases[False],
            "block-size": 16,
            "dtype": "float32",
            "out": out,
            "probe": out / "probe",
            "packed": packed.path,
            "extra-vocab": EXTRA,
        }
        capsys.readouterr()
        assert verify.main([f"--{name}={value}" for name, value in told.items()]) == 0
        return msgspec.json.decode(capsys.readouterr().out, type=Verified)

    assert not verified().findings
    for module in place(packed.modules, layout).modules[1:]:
        piece = module.a.pieces[0]
        with open(packed.path, "r+b") as file:
            file.seek(piece.block * layout.block_bytes + piece.offset)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            assert [finding.module for finding in verified().findings] == [module.module]
            file.seek(-1, 1)
            file.write(byte)
    assert not verified().findings


def test_sixty_thousand_rows_that_differ_take_no_seconds(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    """Every other row, so that none lies beside the next."""
    spec = replace(read_base(bases[False]), vocab_size=128_000)
    weight = torch.zeros(spec.vocab_size, HIDDEN)
    (tmp_path / "base").mkdir()
    save_file({"lm_head.weight": weight}, tmp_path / "base" / "model.safetensors")
    weight[:120_000:2] = 1
    head = {"lm_head.weight": weight}
    folder = write(tmp_path / "a", bases[False], head, modules_to_save=["lm_head"])
    started = time.process_time()
    manifest = inspect(folder, spec, base=tmp_path / "base")
    told = msgspec.json.decode(msgspec.json.encode(manifest), type=AdapterManifest)
    layout = spec.block_layout(block_size=16, dtype="float32")
    packed = pack_folder(folder, told, layout, folder, "r")
    assert time.process_time() - started < 3
    assert packed.modules[-1].tokens == tuple(range(0, 120_000, 2))
    rows = place(packed.modules, layout).modules[-1].a
    assert read(Path(packed.path).read_bytes(), rows, layout, HIDDEN).eq(1).all()
