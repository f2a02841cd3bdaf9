"""Thousands of adapters, registered and packed, in the folders of a daemon that is yet to start.

Goes in: a model, a store, a state folder, an inbox.  Comes out: what a daemon that took all of them
from its inbox would have left behind, made in one process and without a sync: ten thousand in
minutes instead of hours.  Each has its own content, rank 1 on every module.  Torch-free.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import checkout  # noqa: F401
import numpy as np
from safetensors.numpy import save

from engine.adapters.manifest import Limits
from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.client import packed_layout, read_spec
from engine.layout import MODULES
from engine.messages import PackedManifest
from lorad.config_sections import Lora
from lorad.registry.records import RevisionRecord
from lorad.registry.registry import Registry
from lorad.registry.store import Store
from lorad.service.inbox import Memory, Seen, _digest
from lorad.watch.inbox import InboxOptions
from lorad.watch.look import scan

TENANTS = 10
#: Transactions that are given to the registry before one is waited for.
AHEAD = 500
_FACTS = (
    *("rank", "ranks", "alpha", "rslora", "targets", "num_layers", "dtype", "file_bytes"),
    *("changes_kv", "modules", "num_tokens", "own_tokenizer", "base_text", "warnings"),
)


def name_of(number: int) -> str:
    return f"tenant-{number % TENANTS}/adapter-{number:05d}"


def fill(
    model: Path,
    *,
    model_name: str,
    store_dir: Path,
    state_dir: Path,
    inbox: Path,
    count: int,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Make adapters 0 to `count` - 1; `progress` hears of every thousandth."""
    make = _Maker(model)
    with mock.patch("os.fsync", lambda fd: None):
        store = Store(store_dir)
        registry = Registry.open(state_dir, store=store)
        pending = []
        for number in range(count):
            folder = inbox / name_of(number)
            make.folder(folder, number)
            record = make.store(store, folder)
            pending.append(
                registry.register(
                    name_of(number),
                    tenant=name_of(number).partition("/")[0],
                    model=model_name,
                    source="inbox",
                    revision=record,
                )
            )
            packed = make.pack(store, record.rev)
            pending.append(
                registry.record_packed(
                    record.rev, packed.layout, packed.num_blocks, packed.true_bytes
                )
            )
            if len(pending) >= AHEAD or number == count - 1:
                for change in pending:
                    change.result()
                pending.clear()
            if (number + 1) % 1000 == 0:
                progress(number + 1)
        registry.close()
    remember(state_dir, inbox)


def remember(state_dir: Path, inbox: Path) -> None:
    """As the daemon notes what it took, so that it need not look at it again."""
    memory = Memory(state_dir / "inbox.json")
    options = _digest(InboxOptions())
    for folder, signature in scan(inbox).found.items():
        name = "/".join(folder.relative_to(inbox).parts)
        memory.put(folder, Seen(name, signature, options))
    memory.save()


class _Maker:
    """Folders of one shape, and what becomes of them."""

    def __init__(self, model: Path) -> None:
        self._model, self._spec = model, read_spec(model, extra_vocab=Lora().extra_vocab)
        self._layout = packed_layout(self._spec, block_size=16, dtype="float32")
        self._rng = np.random.default_rng(1)

    def folder(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True)
        tensors = {}
        for layer in range(self._spec.num_layers):
            for module, (d_in, d_out) in zip(MODULES, self._spec.shapes.dims, strict=False):
                part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                stem = f"base_model.model.model.layers.{layer}.{part}.{module}"
                tensors[f"{stem}.lora_A.weight"] = np.zeros((1, d_in), np.float32)
                tensors[f"{stem}.lora_B.weight"] = np.zeros((d_out, 1), np.float32)
        first = next(iter(tensors.values()))
        first[:] = self._rng.standard_normal(first.shape, dtype=np.float32)
        (folder / "adapter_model.safetensors").write_bytes(save(tensors))
        config = {
            "peft_type": "LORA",
            "r": 1,
            "lora_alpha": 1,
            "target_modules": list(MODULES),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    def store(self, store: Store, folder: Path) -> RevisionRecord:
        self._manifest = inspect(
            folder, self._spec, Limits(), served_dtype="float32", base=self._model
        )
        rev = revision_digest(folder, self._manifest)
        staging = store.stage()
        for file in folder.iterdir():
            shutil.copyfile(file, staging.path / file.name)
        store.commit(staging, rev)
        return RevisionRecord(rev=rev, **{name: getattr(self._manifest, name) for name in _FACTS})

    def pack(self, store: Store, rev: str) -> PackedManifest:
        folder = store.path(rev)
        return pack_folder(folder, self._manifest, self._layout, folder, rev)
