"""What a model is for, and which settings that leaves: a part of `config.py`.

Goes in: `[[models]]`, `[lora]`, and what was set by somebody.  Comes out: a PoolingConfig, or the
rule that is broken.  A setting of the other kind of model is refused where somebody wrote it: it
would do nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.config import PoolsToo
from engine.pooling.config import PoolingConfig
from engine.pooling.fit import CLASSIFY, EMBED, GENERATE, RERANK
from lorad.config_sections import Lora, Model

POOLING = (EMBED, CLASSIFY, RERANK)
#: Of a model that generates: it has KV, and blocks of it.
_GENERATES = (
    *("block_size", "mixed_tokens", "gpu_memory_utilization", "cpu_pool", "num_blocks"),
    *("speculation", "speculation_tokens", "draft_model"),
    *("tensor_parallel", "pipeline_parallel"),
)
_POOLS = (
    *("truncate", "pooling", "prefix_cache", "chunked_prefill"),
    *("score_words", "pair_template"),
)
#: Of one that does nothing else.
_ONLY_POOLS = ("beside_generators",)
#: Of one that generates and pools.
_DOES_BOTH = ("pooled_tokens",)
_GENERATES_LORA, _POOLS_LORA = ("kv_floor", "adapter_floor", "extra_vocab"), ("adapter_pool",)
#: The engine's word for a setting, where ours is another.
_OURS = {"max_length": "max_model_len"}

#: (ok, key, rule, hint): raises BadConfig unless it is.
Need = Callable[..., None]


def check_tasks(
    model: Model, key_of: Callable[[str], str], origins: Mapping[str, str], need: Need
) -> None:
    """`key_of` a setting is how it is told."""
    tasks, key = model.tasks or (GENERATE,), key_of("tasks")
    for task in tasks:
        known = task in (GENERATE, *POOLING)
        need(known, key, f"{task!r} is none of {', '.join((GENERATE, *POOLING))}")
    need(
        len(model.score_words) in (1, 2) and all(model.score_words),
        key_of("score_words"),
        "a word that an answer may begin with, or two: for a text and against it",
    )
    share = key_of("beside_generators")
    need(0.0 <= model.beside_generators <= 1.0, share, "0 (auto), or up to 1: it never gives way")
    lacking = {name: "generates" for name in _GENERATES if model.pools}
    lacking |= {name: "pools" for name in _POOLS if not (model.pools or model.pools_too)}
    lacking |= {name: "only pools" for name in _ONLY_POOLS if not model.pools}
    lacking |= {name: "does both" for name in _DOES_BOTH if not model.pools_too}
    for name, kind in lacking.items():
        idle = key_of(name) not in origins or _is_default(model, name)
        need(idle, key_of(name), f"only a model that {kind} has it, and this one does not")


def check_lora(models: Sequence[Model], lora: Lora, origins: Mapping[str, str], need: Need) -> None:
    """[lora] is for all models: refused is what none of them has."""
    pools = {model.pools for model in models}
    if len(pools) > 1:
        return
    for name in _GENERATES_LORA if pools == {True} else _POOLS_LORA:
        idle = f"lora.{name}" not in origins or _is_default(lora, name)
        kind = "generates" if pools == {True} else "pools"
        need(idle, f"lora.{name}", f"only a model that {kind} has it, and this one does not")


def _is_default(section: Model | Lora, name: str) -> bool:
    """A file of all defaults says nothing, whatever the model."""
    return bool(getattr(section, name) == getattr(type(section)(), name))


def of_pooling(model: Model, lora: Lora, *, many: bool) -> PoolingConfig:
    """Raises ConfigError.  Where nobody said how many inputs a step has (`many`), the engine
    does."""
    told: dict[str, Any] = {"max_num_seqs": model.max_num_seqs} if many else {}
    return PoolingConfig(
        model=model.base,
        device=model.device,
        dtype=model.dtype,
        max_length=model.max_model_len,
        truncate=model.truncate,
        pooling="" if model.pooling == "auto" else model.pooling,
        prefix_cache=model.prefix_cache,
        chunked_prefill=model.chunked_prefill,
        generates_too=model.pools_too,
        max_batch_tokens=model.max_batch_tokens,
        graph_tokens=model.graph_tokens,
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


def pools_too(model: Model) -> PoolsToo:
    """What an engine that generates is told besides."""
    return PoolsToo(
        root=model.base,
        pooling="" if model.pooling == "auto" else model.pooling,
        truncate=model.truncate,
        prefix_cache=model.prefix_cache,
        chunked_prefill=model.chunked_prefill,
    )


def ours(message: str) -> str:
    """An engine's complaint, which begins with the setting, by our name of it."""
    key, space, rest = message.partition(" ")
    return _OURS.get(key, key) + space + rest
