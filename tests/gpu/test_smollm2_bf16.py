"""SmolLM2 in bf16 on a card, through the whole engine, against transformers and PEFT in fp32.

What is compared are logprobs of the engine's own greedy tokens under the fp32 reference.  The
stated tolerance is relative to what bf16 costs anybody: transformers' own bf16 model is measured on
the same card in the same run.  Over 64 tokens the engine's root mean square error may be half as
much again, and no single token may be three times as wrong as transformers' worst.  (One token's
error alone says little: on an H200 the worst of 64 was 0.14 against 0.15 for the base, 0.10 against
0.12 for bible and 0.35 against 0.18 for devil.)
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from engine.adapters.digest import revision_digest
from engine.adapters.pack import pack_folder
from engine.adapters.peft import inspect
from engine.config import EngineConfig
from engine.engine import Engine, Generation
from engine.messages import SamplingParams
from engine.models.spec import read_spec
from lorad.demo_model import model_path

pytestmark = [pytest.mark.gpu, pytest.mark.model]

ADAPTERS = Path(__file__).parents[2] / "demo" / "adapters"
NAMES = (None, "bible", "devil", "jargon", "bofh")
QUESTION = "What is a computer?"
NEW_TOKENS = 64
RMS_SLACK, WORST_SLACK = 1.5, 3.0  # times transformers' own bf16 error


@dataclass
class Rig:
    engine: Engine
    revs: dict[str | None, str | None]
    prompt: list[int]
    exact: Any  # PEFT in fp32
    rounded: Any  # PEFT in bf16


def peft_model(dtype: torch.dtype) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_path(), dtype=dtype).cuda()
    first, *others = NAMES[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, ADAPTERS / str(first), adapter_name=first)
        for name in others:
            model.load_adapter(ADAPTERS / str(name), adapter_name=name)
    return model.cuda().eval()


@torch.no_grad()
def logprobs(model: Any, name: str | None, ids: list[int], skip: int) -> torch.Tensor:
    """(tokens after `skip`, vocab) in fp32."""
    tokens = torch.tensor([ids], device="cuda")
    if name is None:
        with model.disable_adapter():
            logits = model(input_ids=tokens).logits
    else:
        model.set_adapter(name)
        logits = model(input_ids=tokens).logits
    return torch.log_softmax(logits[0, skip - 1 : -1].float(), -1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    from transformers import AutoTokenizer

    spec = read_spec(model_path())
    out = tmp_path_factory.mktemp("packed")
    sizes = {"max_num_seqs": 8, "max_batch_tokens": 512, "graph_tokens": 64, "num_blocks": 512}
    config = EngineConfig(model=str(model_path()), device="cuda", max_rank=16, **sizes)
    with Engine(config) as engine:
        layout = spec.block_layout(block_size=16, dtype=engine.info.dtype)
        revs: dict[str | None, str | None] = {None: None}
        for name in NAMES[1:]:
            folder = ADAPTERS / str(name)
            manifest = inspect(folder, spec)
            rev = revision_digest(folder, manifest)
            (out / rev).mkdir()
            engine.add_adapter(pack_folder(folder, manifest, layout, out / rev, rev))
            engine.load(rev)
            revs[name] = rev
        tokenizer = AutoTokenizer.from_pretrained(model_path())
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
        )
        yield Rig(engine, revs, prompt, peft_model(torch.float32), peft_model(torch.bfloat16))


def run(rig: Rig, names: tuple[str | None, ...]) -> list[Generation]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True)
    return rig.engine.generate([rig.prompt] * len(names), sampling, [rig.revs[n] for n in names])


@dataclass(frozen=True)
class Errors:
    """Log-probability errors against fp32, and how much worse than the best a token was."""

    ours: torch.Tensor
    theirs: torch.Tensor
    regret: float


def errors(rig: Rig, name: str | None, told: Generation) -> Errors:
    ids = rig.prompt + told.tokens
    exact = logprobs(rig.exact, name, ids, len(rig.prompt))
    rounded = logprobs(rig.rounded, name, ids, len(rig.prompt))
    chosen = torch.tensor(told.tokens, device="cuda").unsqueeze(1)
    truth = exact.gather(1, chosen).squeeze(1)
    ours = torch.tensor([one.logprob for one in told.logprobs], device="cuda")
    theirs = rounded.gather(1, chosen).squeeze(1)
    regret = (exact.amax(1) - truth).max().item()
    return Errors((ours - truth).abs(), (theirs - truth).abs(), regret)


def rms(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
def test_bf16_logprobs_are_as_close_to_fp32_as_transformers_own(rig: Rig, mixed: bool) -> None:
    told = run(rig, NAMES) if mixed else [run(rig, (name,))[0] for name in NAMES]
    found = {n: errors(rig, n, g) for n, g in zip(NAMES, told, strict=True)}
    for name, e in found.items():
        print(
            f"{name or 'base'}: rms {rms(e.ours):.4f} (transformers {rms(e.theirs):.4f}), "
            f"worst {e.ours.max():.4f} ({e.theirs.max():.4f}), regret {e.regret:.4f}"
        )
    for name, e in found.items():
        worst = WORST_SLACK * e.theirs.max().item()
        assert len(e.ours) == NEW_TOKENS
        assert rms(e.ours) <= RMS_SLACK * rms(e.theirs), name
        assert e.ours.max() <= worst, name
        assert e.regret <= worst, "a token that fp32 finds clearly worse"


def test_five_streams_share_every_forward_pass(rig: Rig) -> None:
    before = rig.engine.snapshot().forward_passes
    run(rig, NAMES)
    assert rig.engine.snapshot().forward_passes - before <= NEW_TOKENS + 2
