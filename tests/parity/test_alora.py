"""Activated LoRA as PEFT 0.21 computes it, in fp32, through packer and engine.

Every row that the engine tells of is compared: those of the prompt by their log-probabilities, and
those after it by what each drawn token had.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect, revision_digest
from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.errors import NotInvoked
from engine.messages import PackedManifest, SamplingParams
from engine.models.spec import read_spec

CALL = [7, 8, 9]
BLOCK = 16
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"target_modules": ALL, "alora_invocation_tokens": CALL},
    "two": {"target_modules": ALL, "alora_invocation_tokens": CALL, "r": 7, "use_rslora": True},
    "biased": {"target_modules": ALL[:3], "alora_invocation_tokens": [9], "lora_bias": True},
    "plain": {"target_modules": ALL},
}
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
SCORED = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=0, logprobs=0)
CACHED = msgspec.structs.replace(SCORED, prompt_logprobs=None)


@dataclass
class Land:
    """A base, its adapters packed, and what PEFT makes of both."""

    folder: Path
    models: dict[str, Any]  # "" = base
    packed: dict[str, PackedManifest] = field(default_factory=dict)

    def right(self, name: str, tokens: Sequence[int], prompt: int) -> Tensor:
        """Of every token after the first, its log-probability, activated as `prompt` tokens say."""
        told = {}
        wanted = ADAPTERS[name].get("alora_invocation_tokens") if name else None
        if wanted:
            given = tokens[:prompt]
            places = [i for i in range(prompt) if given[i : i + len(wanted)] == wanted]
            told["alora_offsets"] = [len(tokens) - max(places)]
        with torch.no_grad():
            rows = self.models[name](input_ids=torch.tensor([tokens]), **told).logits[0]
        rows = rows.log_softmax(-1)[:-1]
        return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def check(self, name: str, prompt: list[int], got: Generation) -> None:
        right = self.right(name, [*prompt, *got.tokens], len(prompt))
        said = [*got.prompt_logprobs[1:], *got.logprobs]
        values = torch.tensor([one.logprob for one in said if one is not None])
        assert len(values) in (len(right), len(got.tokens))
        assert (values - right[-len(values) :]).abs().max() < 1e-4


@pytest.fixture(scope="module")
def land(tmp_path_factory: pytest.TempPathFactory) -> Land:
    import peft
    import transformers

    root = tmp_path_factory.mktemp("alora")
    torch.manual_seed(2)
    base = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)).eval()
    for name, parameter in base.named_parameters():
        scale = 0.5 if name.endswith("bias") else parameter.shape[-1] ** -0.5
        if parameter.dim() == 2 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, scale)
    base.save_pretrained(root / "base")
    land, spec = Land(root / "base", {"": base}), read_spec(root / "base")
    layout = spec.block_layout(block_size=BLOCK, dtype="float32")
    for name, options in ADAPTERS.items():
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6} | options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT on biases of lora_B
            tuned = peft.get_peft_model(copy.deepcopy(base), config)
            for key, parameter in tuned.named_parameters():
                if "lora_" in key:
                    torch.nn.init.normal_(parameter, 0, 0.3)
            tuned.save_pretrained(root / name)
        land.models[name] = tuned.eval()
        manifest = inspect(root / name, spec)
        rev = revision_digest(root / name, manifest)
        (root / rev).mkdir()
        land.packed[name] = pack_folder(root / name, manifest, layout, root / rev, rev)
    return land


class Served:
    """An engine with all the adapters."""

    def __init__(self, land: Land, **settings: Any) -> None:
        defaults = {"num_blocks": 256, "max_num_seqs": 16, "slots": 8, "ram_cache": 4 << 20}
        config = EngineConfig(
            model=str(land.folder), device="cpu", block_size=BLOCK, **(defaults | settings)
        )
        self.land, self.engine = land, Engine(config)
        for manifest in land.packed.values():
            self.engine.add_adapter(manifest)

    def ask(
        self, *work: tuple[str, list[int]], sampling: SamplingParams = SCORED
    ) -> list[Generation]:
        """All of (adapter, prompt) in one batch, each compared with PEFT."""
        revs = [self.land.packed[name].rev if name else None for name, _ in work]
        told = self.engine.generate([prompt for _, prompt in work], sampling, revs)
        for (name, prompt), got in zip(work, told, strict=True):
            self.land.check(name, prompt, got)
        return told

    def cached(self, name: str, prompt: list[int]) -> int:
        (told,) = self.ask((name, prompt), sampling=CACHED)
        return told.cached_tokens


@pytest.fixture
def serve(land: Land) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(**settings: Any) -> Served:
        made.append(Served(land, **settings))
        return made[-1]

    yield start
    for served in made:
        served.engine.close()


def words(count: int, seed: int = 0) -> list[int]:
    """Ids that hold no invocation and no end."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(10, 131, (count,), generator=draw).tolist()


#: Invoked in the middle, at the start, at the very end, twice, three times back to back.
PROMPTS = (
    [*words(20), *CALL, *words(9, 1)],
    [*CALL, *words(20)],
    [*words(20), *CALL],
    [*words(5), *CALL, *words(17, 1), *CALL, *words(4, 2)],
    [*words(3), *CALL, *CALL, *CALL],
    list(CALL),
)


def test_peft_itself_finds_the_same_place(land: Land) -> None:
    for prompt in PROMPTS:
        with torch.no_grad():
            rows = land.models["one"](input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        right = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert torch.equal(right, land.right("one", prompt, len(prompt)))


def test_served_as_a_plain_lora_it_would_answer_otherwise(land: Land, serve: Any) -> None:
    """What the other tests would miss were the adapter to act on every row."""
    served, prompt = serve(), PROMPTS[0]
    everywhere = msgspec.structs.replace(land.packed["one"], rev="f" * 64, alora_tokens=())
    served.engine.add_adapter(everywhere)
    (told,) = served.engine.generate([prompt], SCORED, [everywhere.rev])
    with pytest.raises(AssertionError):
        land.check("one", prompt, told)


def test_it_equals_peft_alone_and_mixed_with_all_the_others(serve: Any) -> None:
    served = serve()
    work = [(name, prompt) for prompt in PROMPTS for name in ("one", "two", "biased")]
    for each in work:
        served.ask(each)
    served.ask(*work[:9], ("plain", PROMPTS[0]), ("", PROMPTS[1]), ("plain", PROMPTS[2]))
    served.ask(("", PROMPTS[0]), *work[9:], ("plain", PROMPTS[3]), ("", PROMPTS[4]))


def test_wherever_a_chunk_ends_around_the_invocation(serve: Any) -> None:
    served = serve(max_batch_tokens=16, max_num_seqs=2)
    for length in range(8, 34):
        served.ask(("one", [*words(length), *CALL, *words(5, 1)]))


def test_after_preemption_it_goes_on_from_the_same_activation(land: Land, serve: Any) -> None:
    sizes = [packed.num_blocks for packed in land.packed.values()]
    served = serve(num_blocks=sizes[0] + 9, kv_floor=1, max_num_seqs=4)
    longer = msgspec.structs.replace(CACHED, max_tokens=40)
    work = [("one", [*words(18, n), *CALL, *words(4, n)]) for n in range(4)]
    served.ask(*work, sampling=longer)
    assert served.engine.snapshot().preemptions > 0


def test_the_bases_prefix_serves_an_alora_and_an_aloras_the_base_and_the_others(serve: Any) -> None:
    served, prompt = serve(), [*words(50), *CALL, *words(30, 1)]
    assert served.cached("", [*prompt[:50], 3]) == 0
    assert served.cached("one", prompt) == 48
    assert served.cached("two", prompt) == 48
    assert served.cached("one", prompt) == served.cached("two", prompt) == 80
    assert served.cached("plain", prompt) == 0
    served, other = serve(), [*words(40, 5), *CALL, *words(30, 6)]
    assert [served.cached(name, other) for name in ("one", "two", "", "biased")] == [0, 32, 32, 32]
    status = {r.rev: r for r in served.engine.snapshot().revisions}[served.land.packed["two"].rev]
    assert (status.prefix_query_tokens, status.prefix_hit_tokens) == (len(other), 32)


def test_generated_tokens_that_spell_the_invocation_move_nothing(serve: Any) -> None:
    """Sent back as a prompt they do: then they are the last invocation, and its blocks others."""
    served, prompt = serve(), [*words(18), *CALL, *words(5, 1)]
    spelled = msgspec.structs.replace(CACHED, max_tokens=30, allowed_token_ids=(9,))
    (told,) = served.ask(("biased", prompt), sampling=spelled)
    assert told.tokens == [9] * 30
    again = [*prompt, *told.tokens[:6], 3, 3]  # its last invocation is the end of the same block
    assert len(prompt) + 6 == 2 * BLOCK
    assert served.cached("biased", again) == 16


def test_a_removed_alora_leaves_the_bases_blocks(serve: Any) -> None:
    served, prompt = serve(), [*words(40), *CALL, *words(30, 1)]
    served.cached("one", prompt)
    rev = served.land.packed["one"].rev
    served.engine.remove_adapter(rev)
    assert served.cached("", prompt) == 32
    served.engine.add_adapter(served.land.packed["one"])
    assert served.cached("one", prompt) == 32


def test_a_prompt_that_does_not_invoke_it_is_refused(serve: Any) -> None:
    with pytest.raises(NotInvoked, match=r"invocation tokens \[7, 8, 9\]"):
        serve().ask(("one", [*words(20), 7, 8]))
