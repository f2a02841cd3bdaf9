"""Train the demo's reranker with PEFT: a LoRA on all-MiniLM-L6-v2, with a classifier of its own.

    python demo/rag_train.py train MODEL_DIR ENTRIES OUT_DIR
    python demo/rag_train.py measure MODEL_DIR ENTRIES ADAPTER_DIR

Goes in: the encoder as sentence-transformers saved it, and `entries.jsonl` of `rag_texts.py`.
Comes out: a PEFT folder in bf16; or how good it is on questions about entries that were held out,
beside the encoder's own ranking of all passages.

Each question is read together with its passage and with wrong ones, which the encoder takes for
near (hard negatives); the loss is the cross-entropy of the right one among them.  On one thread of
a CPU.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

RANK, LR, STEPS = 8, 1e-3, 320
#: Questions of a step, wrong passages beside each right one, and out of how many of the nearest.
QUESTIONS, WRONG, NEAR = 4, 5, 20
MAX_TOKENS = 112
#: Passages that are ranked again when it is measured, and at most so many questions of a kind.
CANDIDATES, MEASURED = 20, 150
REPORT = 30


class Encoder:
    """MiniLM as it is: the mean of its rows, at length 1."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def vectors(self, texts: list[str], batch: int = 32) -> torch.Tensor:  # (texts, hidden)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out = torch.zeros(len(texts), self.model.config.hidden_size)
        for at in range(0, len(order), batch):
            part = order[at : at + batch]
            rows = self.tokenizer(
                [texts[i] for i in part],
                padding=True,
                truncation=True,
                max_length=256,
                return_tensors="pt",
            )
            mask = rows["attention_mask"].unsqueeze(-1).float()
            hidden = self.model(**rows).last_hidden_state
            mean = (hidden * mask).sum(1) / mask.sum(1)
            out[part] = torch.nn.functional.normalize(mean, dim=-1)
        return out


class Entries:
    """Passages, and questions with the place of their passage."""

    def __init__(self, path: Path, encoder: Encoder) -> None:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self.passages = [row["text"] for row in rows]
        self.held_out = torch.tensor([row["held_out"] for row in rows])
        asked = [
            (q, place, kind)
            for place, row in enumerate(rows)
            for kind, q in zip(("headword", "sentence"), row["questions"], strict=False)
        ]
        self.questions, self.places, self.kinds = zip(*asked, strict=True)
        self.near = encoder.vectors(list(self.questions)) @ encoder.vectors(self.passages).T

    def of(self, kind: str, *, held_out: bool) -> list[int]:
        """Questions by number."""
        return [
            n
            for n, place in enumerate(self.places)
            if self.kinds[n] == kind and bool(self.held_out[place]) == held_out
        ]

    def wrong(self, question: int) -> list[int]:
        """The nearest that do not answer it, of those that may be trained on."""
        near = self.near[question].clone()
        near[self.held_out] = -2.0
        near[self.places[question]] = -2.0
        return near.topk(NEAR).indices.tolist()


def pairs(tokenizer, questions: list[str], passages: list[str]):
    return tokenizer(
        questions,
        passages,
        padding=True,
        truncation="longest_first",
        max_length=MAX_TOKENS,
        return_tensors="pt",
    )


def endless(numbers: list[int], rng: random.Random):
    """All of them, shuffled anew each round."""
    while True:
        yield from rng.sample(numbers, len(numbers))


def base_of(folder: Path):
    """With a classifier of one class, which is new."""
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def train(folder: Path, path: Path, out: Path) -> None:
    started, rng = time.process_time(), random.Random(7)
    encoder = Encoder(folder)
    entries, tokenizer = Entries(path, encoder), encoder.tokenizer
    print(f"the encoder's own ranking is known after {time.process_time() - started:.0f} s of CPU")
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules="all-linear",
        modules_to_save=["classifier"],
    )
    model = get_peft_model(base_of(folder), config)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.1)
    decks = [endless(entries.of(kind, held_out=False), rng) for kind in ("headword", "sentence")]
    right, losses = torch.zeros(QUESTIONS, dtype=torch.long), []
    model.train()
    for step in range(1, STEPS + 1):
        asked, shown = [], []
        for n in range(QUESTIONS):
            question = next(decks[n % 2])
            among = [entries.places[question], *rng.sample(entries.wrong(question), WRONG)]
            asked += [entries.questions[question]] * len(among)
            shown += [entries.passages[place] for place in among]
        scores = model(**pairs(tokenizer, asked, shown)).logits.view(QUESTIONS, -1)
        loss = torch.nn.functional.cross_entropy(scores, right)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % REPORT == 0:
            mean = sum(losses[-REPORT:]) / REPORT
            print(f"step {step} loss {mean:.3f} {time.process_time() - started:.0f} s", flush=True)
    save(model, out)


def save(model, out: Path) -> None:
    """In bf16, and without the name of a folder of ours."""
    model.save_pretrained(out)
    path = out / "adapter_model.safetensors"
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "sentence-transformers/all-MiniLM-L6-v2"
    for name in ("target_modules", "modules_to_save"):
        config[name] = sorted(config[name])
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "README.md").unlink(missing_ok=True)


@torch.no_grad()
def measure(folder: Path, path: Path, adapter: Path) -> None:
    encoder = Encoder(folder)
    entries, tokenizer = Entries(path, encoder), encoder.tokenizer
    model = PeftModel.from_pretrained(base_of(folder), adapter).merge_and_unload().eval()
    for kind in ("headword", "sentence"):
        before, after, found = [], [], 0
        numbers = entries.of(kind, held_out=True)
        numbers = numbers[:: -(-len(numbers) // MEASURED)]
        for question in numbers:
            place = entries.places[question]
            near = entries.near[question].topk(CANDIDATES).indices.tolist()
            rows = pairs(
                tokenizer,
                [entries.questions[question]] * CANDIDATES,
                [entries.passages[n] for n in near],
            )
            order = model(**rows).logits.view(-1).argsort(descending=True).tolist()
            before.append(reciprocal(near, place))
            after.append(reciprocal([near[n] for n in order], place))
            found += place in near
        print(f"{kind}: {len(numbers)} questions, {found / len(numbers):.3f} among {CANDIDATES}")
        for name, ranks in (("encoder", before), ("reranked", after)):
            first = sum(r == 1 for r in ranks) / len(ranks)
            print(
                f"  {name:<9} first {first:.3f}, MRR@10 {sum(ranks) / len(ranks):.3f}", flush=True
            )


def reciprocal(order: list[int], place: int) -> float:
    """One over its rank, 0 below the tenth."""
    return 1 / (order.index(place) + 1) if place in order[:10] else 0.0


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    act = {"train": train, "measure": measure}[sys.argv[1]]
    act(*map(Path, sys.argv[2:5]))


if __name__ == "__main__":
    main()
