"""How often drafts are right, the further an adapter moves the model from the one that drafts.

    python benchmarks/acceptance.py --model DIR [--device cuda] [--engine] [--adapters DIR,DIR]
                                    [--keep DIR]

DIR is SmolLM2-135M-Instruct (`python -m lorad.demo_model`).  Each adapter, the demo's four unless
told otherwise, is scaled by every one of --scales; and one more is trained from nothing on the text
of this repository's own pages, and looked at after each number of --steps.  At every such point the
adapted model answers --prompts requests, greedily and at temperature 1, and what a draft would have
been is compared with its distribution at each token of these answers, all earlier ones being right:
  ngram  the engine's own matches in prompt and answer
  base   the model itself without the adapter, as a shared draft model is at its best
  short  the same with its middle layers cut out, and taught the base's distributions on the base's
         answers and on those pages for --distill steps: a draft model as one has them, worse than
         the base to begin with.  0 steps: none
One JSON line for each point, temperature, kind of request and draft on stdout:
  kl         nats a token: KL(adapted || base), over the answers of this line
  tokens     of these answers; `tried`: those for which there was a draft (all but for ngram)
  right      share of those tried that were right.  At temperature 1 drafts are coupled: drawn with
             the noise that the draw has (a mean over NOISES of them)
  likeliest  the same of the draft model's likeliest token, in its place
  best       1 - total variation: what no draft can do better
  a_step     greedy: tokens that a step would tell with drafts of 4, always
--engine asks the engine itself instead, on the CPU, at scale 1: a line of what it drafted and kept
with the model as its own draft model.  tokens / (tokens - accepted) is what `a_step` of `base` is.
--keep DIR writes the short model there, as a checkpoint that `draft_model` takes.
"""

import argparse
import copy
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import checkout
import torch
from acceptance_texts import TEACHING, pages, requests
from torch import Tensor

from engine import speculation
from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import SamplingParams
from engine.ngram import NgramIndex

NOISES = 4
DRAFT_TOKENS = 4
#: Of the text that one adapter is trained on, and of the base's answers that `short` is.
BATCH, WIDTH, RATE = 8, 96, 5e-4
EOS = 2
#: Of each question that the short model is taught by.
DRAWS = 6


class Point(NamedTuple):
    """Where an adapter is."""

    adapter: str
    scale: float
    steps: int  # of training; 0 = it was trained elsewhere


class Model:
    """SmolLM2 twice, as it is and under PEFT, and the tokenizer that its chats are written with."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder, self.device = folder, device
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.base, self._worn = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            .to(device)
            .requires_grad_(False)
            .eval()
            for _ in range(2)
        )
        self.peft: Any = None
        self._scalings: list[tuple[Any, float]] = []

    def chat(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        whole = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        return ids

    def wear(self, adapter: Path | None) -> None:
        """Put an adapter on; None: a fresh one, that does nothing yet."""
        from peft import LoraConfig, PeftModel, get_peft_model

        if self.peft is not None:
            self._worn = self.peft.unload()
        if adapter is not None:
            self.peft = PeftModel.from_pretrained(self._worn, str(adapter))
        else:
            torch.manual_seed(7)
            config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            self.peft = get_peft_model(self._worn, config)
        self.peft.eval()
        modules = [m for m in self.peft.modules() if isinstance(getattr(m, "scaling", None), dict)]
        self._scalings = [(m, m.scaling["default"]) for m in modules if "default" in m.scaling]

    @contextmanager
    def adapted(self, scale: float) -> Iterator[Any]:
        """The model with so much of the adapter merged into it."""
        for module, usual in self._scalings:
            module.scaling["default"] = usual * scale
        self.peft.merge_adapter()
        try:
            yield self.peft.base_model.model
        finally:
            self.peft.unmerge_adapter()
            for module, usual in self._scalings:
                module.scaling["default"] = usual


class Answer(NamedTuple):
    """`logits` (tokens, vocab): what its tokens were drawn from."""

    kind: str
    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    greedy: bool


@torch.no_grad()
def answers(
    model: Any, asked: list[tuple[str, list[int]]], tokens: int, device: str, seed: int = 1
) -> list[Answer]:
    """Of all prompts at once: every one greedily, then every one at temperature 1."""
    rows = [*asked, *asked]
    width = max(len(prompt) for _, prompt in asked)
    ids = torch.tensor([[EOS] * (width - len(p)) + p for _, p in rows], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for _, p in rows], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    places, cache, told, kept = (mask.cumsum(-1) - 1).clamp(min=0), None, [], []
    for _ in range(tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        drawn = logits.argmax(-1)
        half = len(asked)
        chances = logits[half:].softmax(-1)
        drawn[half:] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        told.append(drawn)
        kept.append(logits)
        ids, places = drawn[:, None], places[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    every, logits = torch.stack(told, 1).tolist(), torch.stack(kept, 1)
    found = []
    for n, ((kind, prompt), row) in enumerate(zip(rows, every, strict=True)):
        length = row.index(EOS) + 1 if EOS in row else len(row)
        found.append(Answer(kind, prompt, row[:length], logits[n, :length], n < len(asked)))
    return found


@torch.no_grad()
def hidden_states(model: Any, told: list[Answer], device: str) -> list[Tensor]:
    """(tokens, hidden) each: of the rows that say the answers' tokens, in one pass."""
    whole = [one.prompt + one.tokens[:-1] for one in told]
    width = max(map(len, whole))
    ids = torch.tensor([row + [EOS] * (width - len(row)) for row in whole], device=device)
    hidden = model.model(input_ids=ids).last_hidden_state  # causal: padding is behind all of it
    return [
        states[len(one.prompt) - 1 : len(row)]
        for states, one, row in zip(hidden, told, whole, strict=True)
    ]


# ------------------------------------------------------------------- training
def train(model: Any, rows: list[list[int]], steps: int, device: str, begin: int = 0) -> None:
    """From step `begin` on, on rows of WIDTH tokens, one after the other and round again."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    model.train()
    for step in range(begin, begin + steps):
        picked = [rows[(step * BATCH + n) % len(rows)] for n in range(BATCH)]
        width = max(map(len, picked))
        ids = torch.tensor([row + [EOS] * (width - len(row)) for row in picked], device=device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in picked], device=device)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def shortened(model: Model, steps: int, layers: int) -> Any:
    """The base without the layers in its middle, trained on its answers; None for no steps."""
    if not steps:
        return None
    short = copy.deepcopy(model.base)
    kept = [*short.model.layers[: layers - layers // 2], *short.model.layers[-(layers // 2) :]]
    short.model.layers = torch.nn.ModuleList(kept)
    for place, layer in enumerate(kept):
        layer.self_attn.layer_idx = place
    short.config.num_hidden_layers = layers
    short.requires_grad_(True)
    teach(short, model.base, lessons(model, steps), steps, model.device)
    return short.requires_grad_(False)


def lessons(model: Model, steps: int) -> list[list[int]]:
    """Rows of tokens: answers, a few draws of each, one after another with text of the pages."""
    asked = [("", model.chat(text)) for text in TEACHING[: steps * BATCH // 2]]
    rounds = min(DRAWS, -(-steps * BATCH // len(TEACHING)))
    told = [
        one.prompt + one.tokens
        for seed in range(rounds)
        for one in answers(model.base, asked, WIDTH, model.device, seed)
    ]
    read = [model.tokenizer(text)["input_ids"][:WIDTH] for text in pages(checkout.ROOT)]
    turns = itertools.zip_longest(told, read)
    return [row for pair in turns for row in pair if row is not None]


def teach(short: Any, base: Any, rows: list[list[int]], steps: int, device: str) -> None:
    """The base's distribution at every token of the rows, not its tokens alone: far less text is
    needed."""
    weights = list(short.parameters())
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    short.train()
    for step in range(steps):
        picked = [rows[(step * BATCH + n) % len(rows)] for n in range(BATCH)]
        width = max(map(len, picked))
        ids = torch.tensor([row + [EOS] * (width - len(row)) for row in picked], device=device)
        read = torch.tensor([[n < len(row) for n in range(width)] for row in picked], device=device)
        with torch.no_grad():
            wanted = base(input_ids=ids).logits[read].softmax(-1)
        told = short(input_ids=ids).logits[read].log_softmax(-1)
        loss = -(wanted * told).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    short.eval()


def keep(short: Any, tokenizer: Any, folder: Path) -> None:
    """A checkpoint of its own, in the precision of the model that it drafts for."""
    copied = copy.deepcopy(short).to(torch.bfloat16)
    copied.config.dtype = torch.bfloat16
    if types := getattr(copied.config, "layer_types", None):
        copied.config.layer_types = types[: copied.config.num_hidden_layers]
    copied.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------- measuring
class Tally:
    """Of one draft, over the answers of one kind."""

    def __init__(self) -> None:
        self.tokens = self.tried = self.draws = 0
        self.right = self.likeliest = self.best = self.kl = 0.0

    def line(self, *, model: bool, greedy: bool) -> dict[str, Any]:
        told: dict[str, Any] = {"tokens": self.tokens, "kl": round(self.kl / self.tokens, 4)}
        tried = max(self.tried, 1)
        told |= {"tried": self.tried, "right": round(self.right / tried, 4)}
        if model and not greedy:
            told["likeliest"] = round(self.likeliest / tried, 4)
            told["best"] = round(self.best / tried, 4)
        if greedy:
            told["a_step"] = round(self.tokens / max(self.draws, 1), 3)
        return told

    def note_words(self, right: list[bool | None]) -> None:
        self.tried += len(right) - right.count(None)
        self.right += right.count(True)
        self.play(right)

    def note_logits(self, own: Tensor, other: Tensor, greedy: bool) -> None:
        """A model's, `other`, beside those of the draw, (n, vocab) each."""
        self.tried += len(own)
        if greedy:
            right = own.argmax(-1) == other.argmax(-1)
            self.right += int(right.sum())
            self.play(right.tolist())
            return
        p, q = own.softmax(-1), other.softmax(-1)
        for _ in range(NOISES):
            noise = -torch.empty_like(own).exponential_().log_()
            same = (own + noise).argmax(-1) == (other + noise).argmax(-1)
            self.right += float(same.sum()) / NOISES
        self.likeliest += float(p.gather(1, other.argmax(-1, keepdim=True)).sum())
        self.best += float(torch.minimum(p, q).sum())

    def play(self, right: list[bool | None]) -> None:
        """Steps with drafts of DRAFT_TOKENS, as far as each token of an answer is guessed right."""
        at = 0
        while at < len(right):
            ahead = 0
            while ahead < DRAFT_TOKENS and at + ahead < len(right) and right[at + ahead]:
                ahead += 1
            at, self.draws = at + ahead + 1, self.draws + 1


def by_words(prompt: list[int], answer: list[int]) -> list[bool | None]:
    """Of each token: whether the engine's match is right; None = it finds none."""
    index, whole, told = NgramIndex(), list(prompt), []
    for token in answer:
        index.learn(whole, len(whole))
        guess = index.guess(whole, 1)
        told.append(guess[0] == token if guess else None)
        whole.append(token)
    return told


@torch.no_grad()
def measure(model: Model, short: Any, options: argparse.Namespace, point: Point) -> None:
    """Print all lines of one point."""
    asked = [(kind, model.chat(text)) for kind, text in requests(options.prompts)]
    with model.adapted(point.scale) as adapted:
        told = answers(adapted, asked, options.tokens, model.device)
    drafts = {"base": model.base} | ({"short": short} if short is not None else {})
    states = {name: hidden_states(m, told, model.device) for name, m in drafts.items()}
    tallies: dict[tuple[bool, str, str], Tally] = {}
    for n, one in enumerate(told):
        logits = {name: m.lm_head(states[name][n]).float() for name, m in drafts.items()}
        logs = one.logits.log_softmax(-1)
        kl = float((logs.exp() * (logs - logits["base"].log_softmax(-1))).sum())
        for name in ("ngram", *drafts):
            tally = tallies.setdefault((one.greedy, one.kind, name), Tally())
            tally.tokens, tally.kl = tally.tokens + len(one.tokens), tally.kl + kl
            if name == "ngram":
                tally.note_words(by_words(one.prompt, one.tokens))
            else:
                tally.note_logits(one.logits, logits[name], one.greedy)
    for (greedy, kind, name), tally in tallies.items():
        line = {**point._asdict(), "temperature": float(not greedy), "kind": kind, "draft": name}
        line |= tally.line(model=name != "ngram", greedy=greedy)
        print(json.dumps(line), flush=True)


def points(model: Model, options: argparse.Namespace) -> Iterator[Point]:
    """With the model set up for each in turn."""
    for place, folder in enumerate(options.adapters):
        model.wear(folder)
        for scale in options.scales:
            if scale or not place:  # at 0 they are all the base
                yield Point(folder.name, scale, 0)
    if options.steps:
        model.wear(None)
        rows = [model.tokenizer(text)["input_ids"][:WIDTH] for text in pages(checkout.ROOT)]
        done = 0
        for steps in options.steps:
            train(model.peft, rows, steps - done, model.device, done)
            done = steps
            yield Point("pages", 1.0, steps)


# ------------------------------------------------------------------- the engine itself
def ask_engine(model: Model, options: argparse.Namespace) -> None:
    """What it drafts and keeps on each adapter, as it is."""
    speculation.WORTH = -10.0  # whatever it costs, and however often it is wrong
    asked = [(kind, model.chat(text)) for kind, text in requests(options.prompts)]
    config = EngineConfig(
        model=str(model.folder),
        device="cpu",
        max_num_seqs=12,
        max_model_len=1024,
        speculation="draft",
        draft_model=str(model.folder),
        speculation_tokens=DRAFT_TOKENS,
    )
    with tempfile.TemporaryDirectory() as store, Engine(config) as engine:
        for folder in options.adapters:
            rev = engine.add_folder(folder, store)
            for heat in (0.0, 1.0):
                for coupled in (True, False) if heat else (True,):
                    assert engine.core.draft_model is not None
                    engine.core.draft_model.coupled = coupled
                    stats = engine.core.stats
                    before = stats.drafted_by_rev[rev], stats.accepted_by_rev[rev]
                    params = SamplingParams(temperature=heat, seed=3, max_tokens=options.tokens)
                    prompts = [prompt for _, prompt in asked]
                    told = engine.generate(prompts, params, [rev] * len(prompts))
                    line = {
                        "adapter": folder.name,
                        "temperature": heat,
                        "coupled": coupled,
                        "tokens": sum(len(one.tokens) for one in told),
                        "drafted": stats.drafted_by_rev[rev] - before[0],
                        "accepted": stats.accepted_by_rev[rev] - before[1],
                    }
                    print(json.dumps({"engine": line}), flush=True)


def whole(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def decimals(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    demo = checkout.ROOT / "demo/adapters"
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--adapters",
        type=lambda s: [Path(p) for p in s.split(",") if p],
        default=[demo / name for name in ("bible", "bofh", "devil", "jargon")],
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompts", type=int, help="12, or 48 on a card")
    parser.add_argument("--tokens", type=int, help="of an answer: 32, or 64 on a card")
    parser.add_argument("--scales", type=decimals, help="0 to 2 by halves; on a card by quarters")
    parser.add_argument("--steps", type=whole, help="2,5,10,20; on a card up to 160")
    parser.add_argument("--layers", type=int, default=20, help="that are left of the short model")
    parser.add_argument("--distill", type=int, help="steps of its training: 0, or 300 on a card")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the short model there")
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args(arguments)
    card = options.device == "cuda"
    options.prompts = options.prompts or (48 if card else 12)
    options.tokens = options.tokens or (64 if card else 32)
    if options.scales is None:
        options.scales = [n / 4 for n in range(0, 9, 1 if card else 2)]
    if options.steps is None:
        options.steps = [5, 10, 20, 40, 80, 160] if card else [2, 5, 10, 20]
    if options.distill is None:
        options.distill = 300 if card else 0
    began = time.monotonic()
    model = Model(options.model, options.device)
    if options.engine:
        ask_engine(model, options)
        return 0
    short = shortened(model, options.distill, options.layers)
    if options.keep:
        if short is None:
            parser.error("--keep: no short model is made without --distill STEPS")
        keep(short, model.tokenizer, options.keep)
    for point in points(model, options):
        measure(model, short, options, point)
    how = {name: getattr(options, name) for name in ("device", "prompts", "tokens", "distill")}
    made = {"layers": options.layers, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({"made": how | made | {"torch": torch.__version__}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
