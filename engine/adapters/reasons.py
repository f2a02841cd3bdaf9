"""Why an adapter folder is refused: every `E_` code, and the helpers that word a refusal.

Goes in: a code, what was found, what to do next.  Comes out: AdapterInvalid.  Names and values in
the messages come from foreign files, so they pass through `shown`: one line, printable, bounded.
Knows nothing of how a fault is found.
"""

from collections.abc import Iterable

from engine.errors import AdapterInvalid

#: Codes of inspection and packing.
READING: dict[str, str] = {
    # the folder
    "E_NOT_A_FOLDER": "there is no folder of that name, or it is something else",
    "E_UNREADABLE": "a file cannot be opened or read: permission, or a failing disk",
    "E_NOT_REGULAR": "a file is a symlink, FIFO, socket or device instead of a regular file",
    "E_NO_CONFIG": "adapter_config.json is missing",
    "E_NO_WEIGHTS": "adapter_model.safetensors (MLX: adapters.safetensors) is missing",
    "E_NESTED": "the adapter lies in a subfolder",
    "E_SHARDED": "the weights are cut into several files",
    "E_PICKLE": "the weights are a pickle (.bin, .pt), which can run code when it is opened",
    "E_GGUF": "a GGUF adapter, whose rows are permuted for another engine",
    "E_MLX": "an MLX adapter that is no LoRA, of an old version, or mixed with PEFT's names",
    "E_KOHYA": "a LoRA for an image model (kohya or diffusers layout)",
    "E_LYCORIS": "LoHa or LoKr factors (LyCORIS) instead of LoRA pairs",
    "E_LFS_POINTER": "a Git LFS pointer stands where the file should be",
    "E_FILE_TOO_LARGE": "a file exceeds the size allowed for it",
    # adapter_config.json
    "E_CONFIG_TOO_LARGE": "adapter_config.json exceeds the size allowed for it",
    "E_CONFIG_INVALID": "adapter_config.json is not a JSON object",
    "E_CONFIG_VALUE": "a field of adapter_config.json has a value of the wrong kind",
    "E_DUPLICATE_KEY": "a JSON object names the same key twice",
    "E_NO_PEFT_TYPE": "adapter_config.json does not say its peft_type",
    "E_PEFT_TYPE": "a PEFT method other than LoRA",
    "E_UNKNOWN_FIELD": "a field that lorad does not know is set, and may change the arithmetic",
    "E_ALPHA": "lora_alpha is absent, null, or gives no finite scaling",
    "E_RANK_TOO_LARGE": "a rank exceeds `[lora] max_rank`",
    "E_PATTERN": "a pattern in rank_pattern or alpha_pattern cannot be matched safely",
    "E_INIT": "trained against a base whose weights were changed when training began",
    "E_DORA": "DoRA magnitudes without use_dora, or that give no finite gain on this base",
    "E_ALORA": "an aLoRA without invocation tokens of the base's; or with DoRA or added tokens",
    "E_QALORA": "QA-LoRA takes pooled inputs and is not served",
    "E_LORA_BIAS": "biases on lora_B that adapter_config.json does not speak of, or with DoRA",
    "E_BIAS": "trained biases of the base's layers are not served",
    "E_LAYER_REPLICATION": "layer replication changes the depth of the base",
    "E_MOE": "LoRA on mixture-of-experts weights; the base is dense",
    "E_MLA": "LoRA on multi-head latent attention, which no base of lorad's has",
    "E_BDLORA": "block-diagonal LoRA is not served",
    "E_MONTECLORA": "MonteCLoRA keeps sampler tensors beside its pairs and is not served",
    "E_ARROW": "Arrow routes between several adapters and is not served",
    "E_KASA": "KaSA changes the base's weights and is not served",
    "E_TRAINABLE_TOKENS": "trained token rows that are missing, of another module, or for no ids",
    # the header of the weights
    "E_TRUNCATED": "the file ends before its header says it does",
    "E_HEADER_TOO_LARGE": "the safetensors header exceeds the size allowed for it",
    "E_HEADER": "the file is not safetensors, or its header contradicts itself",
    "E_TOO_MANY_TENSORS": "the header lists more tensors than allowed",
    "E_OFFSETS": "tensor bytes overlap, leave a gap, or end before the file does",
    "E_SPAN": "a tensor's bytes are not shape x dtype",
    "E_DTYPE": "a LoRA factor is neither float32, bfloat16 nor float16",
    # the names of the tensors
    "E_NO_MATCH": "no tensor belongs to a module of the base: made for another model",
    "E_UNKNOWN_MODULE": "some LoRA pairs are for modules that the base lacks",
    "E_UNKNOWN_TENSOR": "tensors of a kind that lorad does not know",
    "E_LAYER_RANGE": "tensors for layers that the base lacks",
    "E_HALF_PAIR": "lora_A without lora_B, or a bias or magnitude that is missing",
    "E_MIXED_ADAPTERS": "two adapters are mixed in one file",
    "E_DUPLICATE_MODULE": "two tensors stand for the same factor of the same module",
    "E_VISION": "tensors for a vision or audio part that the text base lacks",
    "E_HEAD_LORA": "LoRA on an output head of a family that is not served",
    "E_EMBEDDING_LORA": "the embedding has factors other than those of plain LoRA",
    "E_MODULES_TO_SAVE": "whole weights (modules_to_save) beyond lm_head, embed_tokens and heads",
    "E_VOCAB_RESIZED": "embedding and head are for more tokens than there is room for, or disagree",
    "E_BASE_COPY": "copies of base weights beside the LoRA pairs differ from this base's",
    "E_ZERO_SHARD": "an empty or flattened factor: saved from a sharded (ZeRO-3, FSDP) run",
    # shapes and values
    "E_SHAPE": "a factor's shape does not fit the base's module",
    "E_RANK_MISMATCH": "the tensors' rank is not what adapter_config.json says",
    "E_NONFINITE": "a factor holds NaN or infinity",
    "E_OVERFLOW": "a factor holds values that are infinite in the dtype that is served",
    "E_ROW_TOO_LARGE": "one row of a factor exceeds a pool block",
    # text files
    "E_TOKENIZER_INVALID": "a tokenizer file cannot be read",
    "E_TOKENIZER_TOO_LARGE": "the adapter's tokenizer has ids that its embedding has no rows for",
}

#: Codes of the daemon, found when a folder is filed and not by reading it.
FILING: dict[str, str] = {
    "E_NAME_TAKEN": "the name belongs to an adapter from another source",
    "E_NAME_ILLEGAL": "the folder's name cannot be an adapter name",
    "E_DAMAGED": "its packed file is damaged again after it was packed anew: look at the disk",
    "E_MODEL": "it fits several of the models that are served, or none; or another has its content",
    "E_OPTIONS": "lorad.toml beside the adapter cannot be read, or asks for what there is not",
}

#: code -> what it means, one line each.  `docs/reference/reason-codes.md` is made from this table.
REASONS: dict[str, str] = READING | FILING

#: Names listed in one message; the rest are counted.
MAX_NAMES = 5


def refuse(code: str, message: str, hint: str) -> AdapterInvalid:
    """The exception for `code`, to be raised by the caller."""
    assert code in REASONS, code
    return AdapterInvalid(code, message, hint=hint)


def shown(value: object, limit: int = 120) -> str:
    """`value` as one printable line: control and bidi characters escaped, cut after `limit`."""
    if isinstance(value, list):
        value = value[: limit + 1]  # as much as can be seen: each item takes a character or more
    try:
        text = (value if isinstance(value, str) else repr(value))[: limit + 1]
    except RecursionError:  # JSON can be just shallow enough to be parsed
        return "a deeply nested value"
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(text) <= limit else safe[:limit] + "..."


def shown_list(names: Iterable[object]) -> str:
    """Up to five names, and how many more there are."""
    every = list(names)
    rest = len(every) - MAX_NAMES
    text = ", ".join(shown(name) for name in every[:MAX_NAMES])
    return f"{text} and {rest} more" if rest > 0 else text


def as_markdown() -> str:
    """The reference page of the codes."""
    rows = "\n".join(f"| `{code}` | {meaning} |" for code, meaning in REASONS.items())
    return _PAGE.format(rows=rows)


_PAGE = """# Reason codes

A folder that cannot be served is quarantined with one of these codes. `loractl show NAME` prints
the code, what was found and what is allowed, and the next step. Serving never notices.

Made by `python -m engine.adapters.reasons`.

| code | what it means |
|---|---|
{rows}
"""

if __name__ == "__main__":
    print(as_markdown(), end="")
