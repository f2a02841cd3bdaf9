"""What a model is for, and which settings that leaves: a part of `config.py`.

Goes in: `[[models]]`, `[lora]`, and what was set by somebody.  Comes out: a PoolingConfig, or the
rule that is broken.  A setting of the other kind of model is refused where somebody wrote it: it
would do nothing.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.pooling.config import PoolingConfig
from engine.pooling.fit import CLASSIFY, EMBED, GENERATE, RERANK

if TYPE_CHECKING:
    from lorad.config import Lora, Model

POOLING = (EMBED, CLASSIFY, RERANK)
#: Of a model that generates: it has KV, blocks of it, and graphs of steps.
_GENERATES = (
    "models.block_size",
    "models.mixed_tokens",
    "models.graph_tokens",
    "models.gpu_memory_utilization",
    "models.cpu_pool",
    "models.num_blocks",
    "models.speculation",
    "models.speculation_tokens",
    "lora.kv_floor",
    "lora.adapter_floor",
)
_POOLS = (
    "models.truncate",
    "models.pooling",
    "models.prefix_cache",
    "models.chunked_prefill",
    "models.score_words",
    "models.pair_template",
    "lora.adapter_pool",
)
#: The engine's word for a setting, where ours is another.
_OURS = {"max_length": "max_model_len"}


def check_tasks(
    model: "Model", lora: "Lora", origins: Mapping[str, str], need: Callable[..., None]
) -> None:
    """`need(ok, key, rule, hint)` raises BadConfig."""
    tasks = model.tasks or (GENERATE,)
    for task in tasks:
        known = task in (GENERATE, *POOLING)
        need(known, "models.tasks", f"{task!r} is none of {', '.join((GENERATE, *POOLING))}")
    need(
        GENERATE not in tasks or len(tasks) == 1,
        "models.tasks",
        "one model that both generates and pools is not served yet",
        'tasks = ["generate"], or only of "embed", "classify" and "rerank"',
    )
    words = model.score_words
    need(
        len(words) in (1, 2) and all(words),
        "models.score_words",
        "a word that an answer may begin with, or two: for a text and against it",
    )
    for key in _GENERATES if model.pools else _POOLS:
        kind = "generates" if model.pools else "pools"
        idle = key not in origins or _is_default(key, model, lora)
        need(idle, key, f"only a model that {kind} has it, and this one does not")


def _is_default(key: str, model: "Model", lora: "Lora") -> bool:
    """A file of all defaults says nothing, whatever the model."""
    section = model if key.startswith("models.") else lora
    name = key.partition(".")[2]
    return bool(getattr(section, name) == getattr(type(section)(), name))


def of_pooling(model: "Model", lora: "Lora", origins: Mapping[str, str]) -> PoolingConfig:
    """Raises ConfigError.  Where nobody said how many inputs a step has, the engine does."""
    told: dict[str, Any] = {}
    if "models.max_num_seqs" in origins:
        told["max_num_seqs"] = model.max_num_seqs
    return PoolingConfig(
        model=model.base,
        device=model.device,
        dtype=model.dtype,
        max_length=model.max_model_len,
        truncate=model.truncate,
        pooling="" if model.pooling == "auto" else model.pooling,
        prefix_cache=model.prefix_cache,
        chunked_prefill=model.chunked_prefill,
        max_batch_tokens=model.max_batch_tokens,
        deterministic=model.deterministic,
        threads=model.threads,
        adapter_pool=lora.adapter_pool,
        slots=lora.slots,
        max_rank=lora.max_rank,
        ram_cache=lora.ram_cache,
        eviction=lora.eviction,
        starve_after=lora.starve_after,
        thrash_window=lora.thrash_window,
        verify_on_load=lora.verify_on_load,
        **told,
    )


def ours(message: str) -> str:
    """An engine's complaint, which begins with the setting, by our name of it."""
    key, space, rest = message.partition(" ")
    return _OURS.get(key, key) + space + rest
