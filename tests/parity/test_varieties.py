"""Every variety of adapter that is served, as PEFT writes it, through packer and engine.

Alone, in one batch with all the others, again after it was evicted, and against what PEFT merges.
"""

import copy
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.adapters.rows import BaseRows
from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.errors import LoadFailed
from engine.layout import stream_id
from engine.messages import PackedManifest, SamplingParams
from engine.models.base_files import BaseFiles
from engine.models.shard import split
from engine.models.spec import read_spec

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QKV = ["q_proj", "k_proj", "v_proj"]  # those of Qwen2 that have a bias of their own
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
TOKENS = list(range(128, 3, -6))  # those of an embedding or head that are trained
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: What the bases have besides: a row of so many ids is folded, and logits are capped by Gemma2.
MORE: dict[str, dict[str, Any]] = {
    "Llama": {"vocab_size": 2001, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 4.0},
}


@dataclass(frozen=True)
class Variety:
    """LoraConfig's fields, and what the tensors are saved as."""

    config: dict[str, Any]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # by a part of the name
    merges: bool = True  # PEFT can: a bias needs one in the base
    without: str = ""  # tensors that are taken out of the file, by a part of their names
    mlx: bool = False  # rewritten as mlx-lm saves the same adapter


HALF = {"lora_A": torch.bfloat16, "lora_B": torch.bfloat16}
#: base -> name -> variety
VARIETIES: dict[str, dict[str, Variety]] = {
    "Qwen2": {
        "plain": Variety({"target_modules": ALL}),
        "bf16": Variety({"target_modules": ALL}, HALF),
        "fp16": Variety({"target_modules": QKV}, dict.fromkeys(HALF, torch.float16)),
        "fp32 and bf16": Variety({"target_modules": ["o_proj"]}, {"lora_B": torch.bfloat16}),
        "rslora": Variety({"target_modules": ["v_proj", "up_proj"], "use_rslora": True, "r": 6}),
        "rank 1": Variety({"target_modules": ["k_proj", "o_proj"], "r": 1}),
        "patterns": Variety(
            {
                "target_modules": ALL,
                "rank_pattern": {"down_proj": 7, r"layers\.0\.self_attn\.q_proj": 2},
                "alpha_pattern": {"down_proj": 1.5, r"^model\.layers\.1\..*": 12},
            }
        ),
        "regex": Variety({"target_modules": r".*\.layers\.[01]\.(self_attn|mlp)\.(q|down)_proj"}),
        "one layer": Variety({"target_modules": ["gate_proj"], "layers_to_transform": [1]}),
        "lora_bias": Variety({"target_modules": QKV, "lora_bias": True}),
        "lora_bias everywhere": Variety(
            {"target_modules": ALL, "lora_bias": True, "use_rslora": True}, merges=False
        ),
        "dora": Variety({"target_modules": ALL, "use_dora": True}),
        "dora by patterns": Variety(
            {
                "target_modules": ["q_proj", "o_proj", "down_proj"],
                "use_dora": True,
                "use_rslora": True,
                "rank_pattern": {"o_proj": 7},
                "alpha_pattern": {"q_proj": 1},
            }
        ),
        "dora in bf16": Variety({"target_modules": QKV, "use_dora": True}, HALF),
        "embedding": Variety({"target_modules": ["embed_tokens"]}),
        "both ends and layers": Variety(
            {"target_modules": [*ALL, "lm_head", "embed_tokens"], "use_rslora": True},
            HALF | {"embedding_A": torch.bfloat16, "embedding_B": torch.float16},
        ),
        "saved head": Variety({"target_modules": QKV, "modules_to_save": ["lm_head"]}),
        "saved ends in bf16": Variety(
            {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
            {"modules_to_save": torch.bfloat16},
        ),
        "trained tokens": Variety({"target_modules": QKV, "trainable_token_indices": TOKENS}),
        "trained tokens of both ends": Variety(
            {
                "target_modules": ["k_proj"],
                "trainable_token_indices": {"embed_tokens": TOKENS[:9], "lm_head": TOKENS[5:]},
            }
        ),
        "a head beside a saved embedding": Variety(
            {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}
        ),
        "head": Variety({"target_modules": ["lm_head"]}),
        "head and layers": Variety(
            {"target_modules": [*ALL, "lm_head"], "rank_pattern": {"lm_head": 9}}
        ),
        "head dora in bf16": Variety(
            {"target_modules": ["q_proj", "lm_head"], "use_dora": True}, HALF
        ),
        "head lora_bias": Variety(
            {"target_modules": ["v_proj", "lm_head"], "lora_bias": True}, merges=False
        ),
        "mlx": Variety({"target_modules": ALL, "r": 5}, mlx=True),
        "mlx dora in bf16": Variety({"target_modules": QKV, "use_dora": True}, HALF, mlx=True),
        "lora_bias in bf16": Variety(
            {"target_modules": QKV, "lora_bias": True, "rank_pattern": {"k_proj": 3}}, HALF
        ),
    },
    "Llama": {
        "plain": Variety({"target_modules": ALL}),
        "head": Variety({"target_modules": ["lm_head"]}, merges=False),  # PEFT merges into both
        "embedding": Variety({"target_modules": ["embed_tokens", "q_proj"], "r": 5}, merges=False),
        "tied ends": Variety(
            {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
            merges=False,
        ),
        "tied ends, saved once": Variety(
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            merges=False,
            without="lm_head",
        ),
        "saved head": Variety(
            {"target_modules": QKV, "modules_to_save": ["lm_head"]}, merges=False
        ),
        "saved embedding": Variety(
            {"target_modules": QKV, "modules_to_save": ["embed_tokens"]}, merges=False
        ),
        "saved and tied": Variety(
            {
                "target_modules": QKV,
                "modules_to_save": ["embed_tokens"],
                "ensure_weight_tying": True,
            },
            merges=False,
        ),
        "trained tokens": Variety({"target_modules": QKV, "trainable_token_indices": TOKENS}),
        "trained tokens, each its own": Variety(
            {
                "target_modules": ["k_proj"],
                "trainable_token_indices": {"embed_tokens": TOKENS[:9], "lm_head": TOKENS[5:]},
            },
            merges=False,
        ),
        "untied ends": Variety({"target_modules": ["embed_tokens", "lm_head"]}, merges=False),
        "head and layers": Variety({"target_modules": [*ALL, "lm_head"]}, HALF, merges=False),
        "head dora": Variety({"target_modules": ["lm_head"], "use_dora": True}, merges=False),
        "head lora_bias": Variety(
            {"target_modules": ["lm_head"], "lora_bias": True, "r": 3}, merges=False
        ),
    },
    "Gemma2": {
        "plain": Variety({"target_modules": ALL}),
        "head": Variety({"target_modules": [*QKV, "lm_head"]}, merges=False),
        "embedding": Variety({"target_modules": ["embed_tokens"]}, merges=False),
        "trained tokens": Variety({"target_modules": QKV, "trainable_token_indices": TOKENS}),
    },
    "Phi3": {
        "fused": Variety({"target_modules": FUSED, "rank_pattern": {"qkv_proj": 6}}),
        "fused dora": Variety({"target_modules": FUSED, "use_dora": True, "r": 3}),
        "fused mlx": Variety({"target_modules": FUSED, "use_dora": True}, mlx=True),
        "fused lora_bias": Variety({"target_modules": FUSED, "lora_bias": True}, merges=False),
    },
}
CASES = [(base, name) for base, varieties in VARIETIES.items() for name in varieties]
LENGTHS = (37, 3, 18)


@dataclass
class Zoo:
    """One base's adapters in an engine, and what transformers and PEFT say to the prompts."""

    folder: Path  # the base's
    engine: Engine
    prompts: list[list[int]]
    expected: dict[str, list[Tensor]]  # by adapter, "" = base; logprobs of each prompt's tokens
    merged: dict[str, Tensor]  # of the first prompt
    revs: dict[str, str | None]
    packed: dict[str, PackedManifest] = field(default_factory=dict)

    def ask(self, *work: tuple[int, str]) -> list[Generation]:
        """All of (prompt, adapter) in one batch."""
        return self.engine.generate(
            [self.prompts[i] for i, _ in work],
            SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, logprobs=0),
            [self.revs[name] for _, name in work],
        )


def logprobs(model: Any, prompt: list[int]) -> Tensor:
    """Of every prompt token after those before it, and of the likeliest one after all of them."""
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    return torch.cat(
        (rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rows[-1:].amax(1))
    )


def said(generation: Generation) -> Tensor:
    prompt = [one.logprob for one in generation.prompt_logprobs[1:] if one is not None]
    return torch.tensor([*prompt, generation.logprobs[0].logprob])


def make_base(kind: str, folder: Path) -> Any:
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(**SIZES | MORE.get(kind, {}))
    config._attn_implementation = (
        "eager"  # others leave Gemma2's cap on scores out, in some versions
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.5)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def make_adapter(model: Any, variety: Variety, folder: Path, seed: int) -> Any:
    """Saved, and as PEFT loads it: it sorts patterns as it saves them, and computes in fp32."""
    import peft

    torch.manual_seed(seed)
    options = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6} | variety.config
    tuned = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options))
    for name, parameter in tuned.named_parameters():
        if "modules_to_save" in name or "trainable_tokens_delta" in name:
            parameter.data += torch.randn_like(parameter) * parameter.std()
            for part, dtype in variety.dtypes.items():
                if part in name:
                    parameter.data = parameter.data.to(dtype)
        if "lora_" in name:
            if "magnitude" in name:
                parameter.data *= 1 + 0.3 * torch.randn_like(parameter)
            else:
                torch.nn.init.normal_(parameter, 0, 0.2)
            for part, dtype in variety.dtypes.items():
                if part in name:
                    parameter.data = parameter.data.to(dtype)
    tuned.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    if variety.without:
        path = folder / "adapter_model.safetensors"
        kept = {k: v for k, v in load_file(path).items() if variety.without not in k}
        save_file(kept, path)
    if variety.mlx:
        save_as_mlx(folder, options)
    return loaded


def save_as_mlx(folder: Path, options: dict[str, Any]) -> None:
    """In the place of PEFT's files what mlx-lm has for the same numbers."""
    endings = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        (ours,) = (ending for ending in endings if name.endswith(ending))
        path = name.removesuffix(ours).removeprefix("base_model.model.")
        tensors[path + endings[ours]] = tensor.T.contiguous()
    (folder / "adapter_model.safetensors").unlink()
    save_file(tensors, folder / "adapters.safetensors")
    rank, scale = options["r"], options["lora_alpha"] / options["r"]
    config = {
        "fine_tune_type": "dora" if options.get("use_dora") else "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.05},
        "model": "mlx-community/of-the-same-weights",
        "iters": 600,
        "learning_rate": 1e-5,
        "lr_schedule": {"name": "cosine_decay"},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Zoo]]:
    made: dict[str, Zoo] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT on configs without a Hub name, and on merging biases
        for base in VARIETIES:
            made[base] = make_zoo(base, tmp_path_factory.mktemp(base))
    yield made
    for zoo in made.values():
        zoo.engine.close()


@pytest.mark.parametrize("name", ["plain", "dora"])
def test_what_was_packed_for_other_weights_of_the_same_shape_is_not_taken(
    name: str, zoos: dict[str, Zoo]
) -> None:
    """A plain adapter is the same on every base; a gain is not."""
    zoo = zoos["Qwen2"]
    other = msgspec.structs.replace(
        zoo.packed[name],
        rev="f" * 64,
        layout=stream_id(zoo.engine.info.layout, "0" * 12, zoo.packed[name].modules),
    )
    if name == "plain":
        zoo.engine.add_adapter(other)
        zoo.engine.remove_adapter(other.rev)
        return
    with pytest.raises(LoadFailed, match="packed for layout"):
        zoo.engine.add_adapter(other)


def engine_config(
    folder: Path, device: str = "cpu", dtype: str = "float32", ranks: int = 1, **options: Any
) -> EngineConfig:
    usual = {
        "model": str(folder),
        "device": device,
        "dtype": dtype,
        "num_blocks": 512 * ranks**2,  # each has all of the ends, in blocks of half the size
        "max_num_seqs": 32,
        "max_batch_tokens": 512,
        "max_rank": 16,
        "slots": 32,
        "ram_cache": (4 << 20) * ranks,
        "tensor_parallel": ranks,
    }
    return EngineConfig(**(usual | options))


def make_zoo(
    base: str, root: Path, device: str = "cpu", dtype: str = "float32", ranks: int = 1
) -> Zoo:
    model = make_base(base, root / "base")
    engine = Engine(engine_config(root / "base", device, dtype, ranks))
    prompts = [torch.randint(3, 131, (n,)).tolist() for n in LENGTHS]
    zoo = Zoo(
        root / "base", engine, prompts, {"": [logprobs(model, p) for p in prompts]}, {}, {"": None}
    )
    spec = read_spec(root / "base")
    layout = split(spec, ranks).block_layout(block_size=engine.info.block_size, dtype=dtype)
    for seed, (name, variety) in enumerate(VARIETIES[base].items()):
        tuned = make_adapter(model, variety, root / name, seed)
        zoo.expected[name] = [logprobs(tuned, p) for p in prompts]
        if variety.merges:
            zoo.merged[name] = logprobs(tuned.merge_and_unload(), prompts[0])
        manifest = inspect(root / name, spec, served_dtype=dtype, base=root / "base")
        rev = revision_digest(root / name, manifest)
        (root / rev).mkdir()
        with BaseFiles(root / "base") as files:
            packed = pack_folder(
                root / name,
                manifest,
                layout,
                root / rev,
                rev,
                base=BaseRows(files, spec),
                whole=spec if ranks > 1 else None,
            )
        engine.add_adapter(packed)
        zoo.packed[name] = packed
        zoo.revs[name] = rev
    return zoo


def close(got: Generation, expected: Tensor) -> None:
    assert (said(got) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("base", "name"), CASES)
def test_it_equals_peft_alone_and_merged(base: str, name: str, zoos: dict[str, Zoo]) -> None:
    zoo = zoos[base]
    for i, expected in enumerate(zoo.expected[name]):
        close(*zoo.ask((i, name)), expected)
    if name in zoo.merged:
        close(*zoo.ask((0, name)), zoo.merged[name])
    assert (zoo.expected[name][0] - zoo.expected[""][0]).abs().max() > 0.05


@pytest.mark.parametrize("base", VARIETIES)
def test_all_of_them_and_the_base_in_one_batch_equal_peft(base: str, zoos: dict[str, Zoo]) -> None:
    zoo = zoos[base]
    work = [(i % len(LENGTHS), name) for i, name in enumerate([*zoo.expected, ""])]
    for (i, name), got in zip(work, zoo.ask(*work), strict=True):
        close(got, zoo.expected[name][i])


@pytest.mark.parametrize(("base", "name"), CASES)
def test_after_eviction_and_reload_it_says_the_same(
    base: str, name: str, zoos: dict[str, Zoo]
) -> None:
    zoo = zoos[base]
    (before,) = zoo.ask((0, name))
    rev = zoo.revs[name]
    assert rev is not None
    zoo.engine.evict(rev)
    (after,) = zoo.ask((0, name))
    assert (after.tokens, after.prompt_logprobs) == (before.tokens, before.prompt_logprobs)


@pytest.mark.parametrize("base", VARIETIES)
def test_whoever_gives_way_goes_on_as_if_it_had_not(base: str, zoos: dict[str, Zoo]) -> None:
    """All of them in a pool that is too small for their answers: to the last token each is what the
    engine with room says to the same text as a prompt, which is what PEFT says."""
    zoo, length = zoos[base], 40
    work = [(n % 3, name) for n, name in enumerate([*zoo.packed, ""] * 2)]
    prompts = [zoo.prompts[i] for i, _ in work]
    revs = [zoo.revs[name] for _, name in work]
    greedy = SamplingParams(temperature=0.0, max_tokens=length, logprobs=0, ignore_eos=True)
    held = sum(packed.num_blocks for packed in zoo.packed.values())
    whole = sum(-(-(len(prompt) + length) // 16) for prompt in prompts)
    config = engine_config(zoo.folder, num_blocks=held + whole // 2, max_num_seqs=len(work))
    with Engine(config) as engine:
        for packed in zoo.packed.values():
            engine.add_adapter(packed)
        answers = engine.generate(prompts, greedy, revs)
        assert engine.snapshot().preemptions > 0
    texts = [p + answer.tokens for p, answer in zip(prompts, answers, strict=True)]
    told = msgspec.structs.replace(greedy, max_tokens=1, prompt_logprobs=0)
    for answer, again in zip(answers, zoo.engine.generate(texts, told, revs), strict=True):
        assert len(answer.tokens) == length
        behind = [one.logprob for one in again.prompt_logprobs[-length:] if one is not None]
        got = torch.tensor([one.logprob for one in answer.logprobs])
        assert (got - torch.tensor(behind)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "base",
    [
        pytest.param("Qwen2", marks=pytest.mark.late),
        pytest.param("Gemma2", marks=pytest.mark.slow),
        pytest.param("Llama", marks=pytest.mark.slow),
        pytest.param("Phi3", marks=pytest.mark.slow),
    ],
)
def test_on_two_ranks_all_of_them_equal_peft_in_one_batch_and_after_a_reload(
    base: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo = make_zoo(base, tmp_path, ranks=2)
    with zoo.engine:
        work = [(i % len(LENGTHS), name) for i, name in enumerate([*zoo.expected, ""])]
        for rev in (None, zoo.revs["plain" if "plain" in zoo.revs else "fused"]):
            if rev is not None:
                zoo.engine.evict(rev)
            for (i, name), got in zip(work, zoo.ask(*work), strict=True):
                close(got, zoo.expected[name][i])


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", "bfloat16", 0.15),
        pytest.param("cuda", "float32", 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", 0.15, marks=pytest.mark.gpu),
        pytest.param("cuda", "float16", 0.03, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("base", VARIETIES)
def test_served_in_another_dtype_all_of_them_are_as_near_as_that_is(
    base: str, device: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """Relative to the spread of the logprobs; seen on a CPU: 0.1 in bf16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo = make_zoo(base, tmp_path, device, dtype)
    with zoo.engine:
        work = [(i % len(LENGTHS), name) for i, name in enumerate([*zoo.expected, ""])]
        told = {
            (name, i): (said(got) - zoo.expected[name][i]).abs().max() / zoo.expected[name][0].std()
            for (i, name), got in zip(work, zoo.ask(*work), strict=True)
        }
        assert max(told.values()) <= tolerance, told
