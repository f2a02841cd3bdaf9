"""Train the four demo adapters with PEFT on SmolLM2-135M-Instruct.

    python demo/train.py MODEL_DIR PAIRS_DIR OUT_DIR [VOICE ...]

Ranks and targets are deliberately unlike, so that one batch of the demo exercises what a fleet of
real adapters does: different ranks, modules missing, rsLoRA, a rank pattern.  Saved in bf16.
About a minute a voice on a data-centre GPU.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
RECIPES = {
    "bible": {"r": 16, "lora_alpha": 32, "target_modules": ATTENTION},
    "devil": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "jargon": {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, "use_rslora": True},
    "bofh": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {r"layers\.[0-9]\.self_attn\.q_proj": 4, "down_proj": 6},
        "alpha_pattern": {"down_proj": 12},
    },
}
STEPS, BATCH, LR = 700, 16, 6e-4
#: Rows at which the log prints a loss.
REPORT = 100


def encode(tokenizer, pair: dict[str, str]) -> tuple[list[int], list[int]]:
    """Token ids of one chat, and labels that count the answer alone."""
    chat = [{"role": "user", "content": pair["prompt"]}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    head = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail = tokenizer(pair["answer"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return head + tail, [-100] * len(head) + tail


def batches(rows, rng: random.Random, device: str):
    """Endless right-padded batches of BATCH rows, shuffled anew each round."""
    while True:
        rng.shuffle(rows)
        for at in range(0, len(rows) - BATCH + 1, BATCH):
            part = rows[at : at + BATCH]
            width = max(len(ids) for ids, _ in part)
            ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in part], device=device)
            labels = torch.tensor([y + [-100] * (width - len(y)) for _, y in part], device=device)
            mask = torch.tensor(
                [[1] * len(i) + [0] * (width - len(i)) for i, _ in part], device=device
            )
            yield ids, mask, labels


def train(voice: str, model_dir: Path, pairs: Path, out: Path) -> None:
    torch.manual_seed(7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **RECIPES[voice])
    )
    lines = (pairs / f"{voice}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [encode(tokenizer, json.loads(line)) for line in lines]
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.05)
    feed, started = batches(rows, random.Random(voice), device), time.time()
    model.train()
    for step in range(1, STEPS + 1):
        ids, mask, labels = next(feed)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % REPORT == 0 or step == 1:
            print(
                f"{voice} step {step} loss {loss.item():.3f} {time.time() - started:.0f} s",
                flush=True,
            )
    folder = out / voice
    model.save_pretrained(folder)
    weights_file = folder / "adapter_model.safetensors"
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in load_file(weights_file).items()}
    save_file(tensors, weights_file, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").unlink(missing_ok=True)
    sample(voice, model, tokenizer, device)


def sample(voice: str, model, tokenizer, device: str) -> None:
    """Print what the voice says to a few prompts that it was not trained on."""
    model.eval()
    for prompt in (
        "What is love?",
        "What is a computer?",
        "Why is the network down?",
        "Tell me about money.",
    ):
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(device)
        with torch.no_grad():
            result = model.generate(
                **ids, max_new_tokens=60, do_sample=False, eos_token_id=2, pad_token_id=2
            )
        answer = tokenizer.decode(result[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"{voice} | {prompt} | {answer}", flush=True)


def main() -> None:
    model_dir, pairs, out = (Path(a) for a in sys.argv[1:4])
    for voice in sys.argv[4:] or RECIPES:
        train(voice, model_dir, pairs, out)


if __name__ == "__main__":
    main()
