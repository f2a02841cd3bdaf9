"""plan: from a folder, from a running daemon, and what it refuses."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from lorad import wire_status
from lorad.cli import card, plan

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "vocab_size": 260,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """smi(line): an nvidia-smi that prints it."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def install(line, status=0):
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho '{line}'\nexit {status}\n")
        program.chmod(0o755)

    return install


def test_a_folder_and_ranks_make_a_table(loractl, folder):
    done = loractl("plan", folder, "--blocks", "1000", "--rank", "8:20,16:4", "--requests", "4")
    assert done.exit == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("model     llama, 2 layers, hidden 64")
    heading = lines.index(next(line for line in lines if line.split()[:1] == ["RANK"]))
    assert [line.split()[:2] for line in lines[heading + 1 : heading + 3]] == [
        ["8", "20"],
        ["16", "4"],
    ]
    assert "fits      yes" in done.out and "docs/bench-log.md" in done.out


def test_json_has_its_schema_and_bytes(loractl, folder):
    done = loractl("plan", folder, "--blocks", "1000", "--rank", "8:20", "--json")
    document = done.json
    assert document["schema"] == "lorad/plan.v1"
    assert document["arena"]["source"] == "blocks" and document["arena"]["num_blocks"] == 1000
    [adapter] = document["adapters"]
    assert adapter["true_bytes"] == 8 * 4 * 2 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    assert document["constants"][0]["name"] == "bandwidth"


def test_tokens_of_adapters_own_widen_what_is_on_the_head(server, loractl, folder, monkeypatch):
    listing = server.api.listing
    pool = wire_status.PoolPicture(total=321, block_bytes=8192, block_size=16)
    said = msgspec.structs.replace(
        listing.status(), base=folder, dtype="float32", pool=pool, extra_vocab=40
    )
    monkeypatch.setattr(listing, "status", lambda: said)

    def outputs(*where):
        asked = ("plan", *where, "--rank", "8:2", "--targets", "lm_head", "--json")
        [adapter] = loractl(*asked).json["adapters"]
        return adapter["modules"][0]["d_out"]

    alone = (folder, "--blocks", "1000")
    assert outputs(*alone) == 260 + 256
    assert outputs(*alone, "--extra-vocab", "64") == 324
    assert outputs() == 300 and outputs("--extra-vocab", "0") == 260


@pytest.mark.parametrize("block_bytes", [8192, pytest.param(10240, id="a model drafts")])
def test_without_a_folder_it_is_the_daemons_base_and_its_measured_arena(
    server, loractl, folder, monkeypatch, block_bytes
):
    listing = server.api.listing
    said = msgspec.structs.replace(
        listing.status(),
        base=folder,
        dtype="float32",
        max_model_len=256,
        slots_total=7,
        pool=wire_status.PoolPicture(total=321, block_bytes=block_bytes, block_size=16),
    )
    monkeypatch.setattr(listing, "status", lambda: said)
    document = loractl("plan", "--json").json
    assert document["arena"]["source"] == "daemon" and document["arena"]["num_blocks"] == 321
    assert document["arena"]["block_bytes"] == block_bytes
    assert document["arena"]["kv_floor_blocks"] == 16, "a sequence of 256 tokens"
    assert document["fit"]["slots"] == 7


def test_a_model_on_several_gpus_is_not_planned_for_as_if_it_were_on_one(
    server, loractl, folder, monkeypatch
):
    listing = server.api.listing
    pool = wire_status.PoolPicture(total=321, block_bytes=4096, block_size=16)
    said = msgspec.structs.replace(listing.status(), base=folder, dtype="float32", pool=pool)
    monkeypatch.setattr(listing, "status", lambda: said)
    done = loractl("plan")
    assert done.exit == 2 and "shared by several GPUs" in done.err and "--memory" in done.err


def test_auto_asks_the_card_without_what_the_driver_keeps(loractl, folder, smi):
    smi("NVIDIA H200, 570.1, 9000, 100, 4")
    document = loractl("plan", folder, "--json").json
    assert document["arena"]["memory_bytes"] == 8900 << 20
    assert document["arena"]["source"] == "memory"


def test_a_machine_without_a_card_says_what_to_give(loractl, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = loractl("plan", folder)
    assert done.exit == 2 and "no card to ask for its memory: nvidia-smi is not" in done.err
    assert "--memory 80GiB, or --blocks N" in done.err


def test_a_driver_that_fails_is_quoted(smi):
    smi("NVIDIA-SMI has failed", 9)
    assert card.cards() == ((), "nvidia-smi fails: NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rank", "x"), "'x' is not RANK:COUNT"),
        (("--targets", "fc1"), "no module is called 'fc1'"),
        (("--blocks", "9", "--tokens", "5000"), "--tokens 5000 is above the model's 4096"),
        (("--memory", "1GiB"), "0.9 of 1.0 GiB does not hold the weights"),
        (("--memory", "much"), "--memory much: expected a size"),
        (("--bandwidth", "fast"), "--bandwidth fast: expected a size"),
        (("--blocks", "9", "--dtype", "int8"), "unknown --dtype int8"),
        (("--blocks", "9", "--block-size", "7"), "--block-size is 8, 16, 32 or 64"),
        (("--blocks", "9", "--rank", "4096:1", "--targets", "gate_proj"), ""),
    ],
)
def test_what_cannot_be_planned_is_one_line(loractl, folder, options, said):
    done = loractl("plan", folder, *options)
    assert done.exit == (2 if said else 0) and said in done.err


def test_a_folder_without_a_model_says_so(loractl, tmp_path):
    done = loractl("plan", str(tmp_path), "--blocks", "9", "--json")
    assert done.exit == 2 and "config.json" in done.error["message"]


def test_of_several_engines_one_card_is_planned_for():
    pool = wire_status.PoolPicture(total=8, block_size=16)
    each = (
        wire_status.ReplicaStatus(name="0", state="engine_restarting"),
        wire_status.ReplicaStatus(name="1", state="ready", pool=pool, slots_total=64),
    )
    twice = msgspec.structs.replace(pool, total=16)
    model = wire_status.ModelStatus(
        name="w", base="/w", state="ready", pool=twice, slots_total=128, replicas=each
    )
    assert plan._one_engine(model) == (pool, 64)
    assert plan._one_engine(msgspec.structs.replace(model, replicas=())) == (twice, 128)


def test_of_several_models_the_one_that_generates_is_planned_for_whichever_engine_is_away():
    vectors = wire_status.ModelStatus(name="v", base="/v", state="loading_base", tasks=("embed",))
    writes = wire_status.ModelStatus(name="w", base="/w", state="ready", tasks=("generate",))
    assert plan._generating(SimpleNamespace(models=(vectors, writes))) is writes
    with pytest.raises(plan.Usage, match="a plan is of KV"):
        plan._generating(SimpleNamespace(models=(vectors,)))
