"""Every metric: its name, type, labels, bounds and meaning.  The one list.

Goes in: nothing.  Comes out: `METRICS`, from which families are made (`sheet`) and the reference
page is written (`docs/generate.py`).  A name that is not here cannot be shown.
"""

from dataclasses import dataclass
from typing import Literal

from engine.histogram import ADAPTERS, BYTES, LOAD_SECONDS, SECONDS, TOKENS

Type = Literal["counter", "gauge", "histogram"]
Bounds = tuple[float, ...]

PREFIX = "lorad_"
#: What gateways read of vLLM, one series each; a colon is no part of any name of ours.
GATEWAY = "vllm:lora_requests_info"
GATEWAY_RUNNING, GATEWAY_WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
GATEWAY_KV = "vllm:kv_cache_usage_perc"
GATEWAYS = (GATEWAY, GATEWAY_RUNNING, GATEWAY_WAITING, GATEWAY_KV)
#: Adapters without a label of their own, summed up; no adapter can be called so.
OTHER = "__other__"
#: Bounds that depend on the engine's block size: 0, then (2**n - 1) blocks.
BY_BLOCKS: Bounds = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """`group` is a heading of the reference page; `values`: what a label can say, where few."""

    name: str
    type: Type
    labels: tuple[str, ...]
    help: str
    group: str
    bounds: Bounds = ()


def _group(
    group: str, *rows: tuple[str, Type, str, str] | tuple[str, Type, str, str, Bounds]
) -> tuple[Metric, ...]:
    """Rows of name, type, labels with spaces between, meaning, and bounds of a histogram."""
    return tuple(
        Metric(
            name if ":" in name else PREFIX + name,
            kind,
            tuple(labels.split()),
            text,
            group,
            *bounds,
        )
        for name, kind, labels, text, *bounds in rows
    )


METRICS: tuple[Metric, ...] = (
    *_group(
        "The daemon",
        (
            "build_info",
            "gauge",
            "version revision",
            "1; which lorad runs. revision: the commit it was installed from, if pip knows.",
        ),
        ("base_model_info", "gauge", "model dtype", "1; the base model that is served."),
        (
            "engine_state",
            "gauge",
            "state",
            "1 for the state that the engine is in, 0 for the others.",
        ),
        ("ready", "gauge", "", "1 while requests are taken, as /readyz says."),
        ("draining", "gauge", "", "1 while the daemon ends what runs and takes nothing new."),
        ("start_time_seconds", "gauge", "", "When the daemon started, since the epoch."),
        (
            "engine_last_step_timestamp_seconds",
            "gauge",
            "",
            "When the engine was last seen to have made a step; an idle one makes none.",
        ),
        ("engine_restarts_total", "counter", "", "Engines that died and were replaced."),
        (
            "routed_requests_total",
            "counter",
            "reason",
            "With models.replicas: sequences and inputs that were sent to the replica, and why. "
            "base: the least loaded; home: the adapter's own; holder: it was there already; spill: "
            "past one that is full; spread: one of several for a hot adapter.",
        ),
        (
            "config_reloads_total",
            "counter",
            "outcome",
            "Reloads of the configuration: success or failure.",
        ),
        ("config_last_reload_success", "gauge", "", "0 if the last reload was refused."),
    ),
    *_group(
        "HTTP",
        (
            "http_requests_total",
            "counter",
            "route method code",
            "Answers, by the route's pattern; code 499: the client left before one.",
        ),
        (
            "http_request_duration_seconds",
            "histogram",
            "route",
            "From a request's head to the end of its answer, streams included.",
            SECONDS,
        ),
        ("http_connections", "gauge", "listener", "Open connections."),
        (
            "http_aborted_total",
            "counter",
            "reason",
            "Requests that ended because of their client: client_disconnect, slow_client, "
            "receipt_timeout.",
        ),
        ("auth_failures_total", "counter", "listener", "Requests that were refused for who asked."),
    ),
    *_group(
        "Requests",
        (
            "requests_total",
            "counter",
            "adapter finish_reason",
            "Sequences that have ended, one for each answer of a request: stop, length, abort "
            "(its client left, or a drain ended it) or error.",
        ),
        (
            "tenant_requests_total",
            "counter",
            "tenant finish_reason",
            "The same by whose request it was, with metrics.tenant_label.",
        ),
        ("tenant_prompt_tokens_total", "counter", "tenant", "Of those, with metrics.tenant_label."),
        ("tenant_generation_tokens_total", "counter", "tenant", "The same of their answers."),
        ("requests_running", "gauge", "adapter", "Sequences with a place in the batch."),
        ("requests_waiting", "gauge", "adapter", "Sequences that the engine has queued."),
        (
            "request_rejections_total",
            "counter",
            "code",
            "Requests that were refused before the engine began them, by error code.",
        ),
        (
            "request_queue_seconds",
            "histogram",
            "kind",
            "From receipt until the engine begins.",
            SECONDS,
        ),
        (
            "time_to_first_token_seconds",
            "histogram",
            "kind",
            "From receipt to the first token.",
            SECONDS,
        ),
        (
            "inter_token_latency_seconds",
            "histogram",
            "kind",
            "Between one token and the next.",
            SECONDS,
        ),
        (
            "request_duration_seconds",
            "histogram",
            "kind endpoint",
            "From receipt to the end.",
            SECONDS,
        ),
        (
            "request_prefill_seconds",
            "histogram",
            "kind",
            "From the engine's beginning to the first token.",
            SECONDS,
        ),
        (
            "request_decode_seconds",
            "histogram",
            "kind",
            "From the first token to the last.",
            SECONDS,
        ),
        (
            "prompt_tokens_total",
            "counter",
            "adapter",
            "Prompt tokens of sequences that began, cached ones included.",
        ),
        ("generation_tokens_total", "counter", "adapter", "Tokens that were generated."),
        ("request_prompt_tokens", "histogram", "kind", "Prompt tokens of one sequence.", TOKENS),
        (
            "request_generation_tokens",
            "histogram",
            "kind",
            "Generated tokens of one sequence.",
            TOKENS,
        ),
    ),
    *_group(
        "Steps",
        (
            "step_seconds",
            "histogram",
            "kind",
            "Of one step of the engine; kind lora: an adapter was in it.",
            SECONDS,
        ),
        ("step_batch_tokens", "histogram", "kind", "Rows of one step.", TOKENS),
        ("step_adapters", "histogram", "kind", "Different adapters in one step.", ADAPTERS),
        (
            "step_lora_bytes",
            "histogram",
            "kind",
            "Bytes of the weights of the adapters in one step, each once.",
            BYTES,
        ),
        (
            "preemptions_total",
            "counter",
            "",
            "Sequences that gave their memory to others and began anew.",
        ),
        (
            "guide_late_masks_total",
            "counter",
            "",
            "Tokens of answers of a given form that came a step later, because what may come next "
            "was not known in time.",
        ),
    ),
    *_group(
        "Adapters",
        ("adapters", "gauge", "state", "Names by state."),
        (
            "adapter_resident",
            "gauge",
            "adapter tier",
            "1 while it is on the GPU (tier gpu), or in host memory (tier ram).",
        ),
        (
            "adapter_replicas",
            "gauge",
            "adapter",
            "With models.replicas: how many of them have it on their GPU.",
        ),
        ("adapter_pinned", "gauge", "adapter", "1 if it is pinned."),
        ("adapter_rank", "gauge", "adapter", "Its highest rank."),
        ("adapter_info", "gauge", "adapter rev", "1; the revision that the name means."),
        ("adapters_quarantined", "gauge", "reason", "Names that were refused, by reason code."),
        ("adapters_draining", "gauge", "", "Revisions that end what runs on them."),
        (
            "adapter_loads_total",
            "counter",
            "adapter source",
            "Loads to the GPU, by where it was when it was asked for: disk or ram.",
        ),
        (
            "adapter_load_seconds",
            "histogram",
            "source",
            "Of one load to the GPU, the read included.",
            LOAD_SECONDS,
        ),
        ("adapter_load_bytes_total", "counter", "", "Bytes that loads have copied to the GPU."),
        (
            "adapter_load_failures_total",
            "counter",
            "reason",
            "Loads that failed: load_failed or adapter_damaged.",
        ),
        (
            "adapter_evictions_total",
            "counter",
            "adapter reason",
            "Times that it left the GPU: for room (cost, lru, lfu or fifo, as the policy is "
            "called; drain: for one that starved), manual, or replace.",
        ),
        ("adapter_thrash_total", "counter", "adapter", "Loads within thrash_window of making way."),
        (
            "adapter_drains_total",
            "counter",
            "reason outcome",
            "Drains of adapters that have ended: done, aborted (requests were ended) or undone "
            "(it may stay).",
        ),
        ("adapter_drain_seconds", "histogram", "", "Of one drain of an adapter.", LOAD_SECONDS),
        (
            "drain_aborted_requests_total",
            "counter",
            "",
            "Sequences that a drain has ended, of an adapter or of the daemon.",
        ),
    ),
    *_group(
        "Memory",
        ("slots", "gauge", "", "Adapters that the GPU holds at the most."),
        ("slots_used", "gauge", "", "Adapters that it holds, or that are on their way."),
        ("slots_pinned", "gauge", "", "Of those, the pinned ones."),
        ("slot_bytes", "gauge", "", "Bytes of adapters on the GPU, in whole blocks."),
        ("ram_cache_bytes", "gauge", "", "Bytes of adapters in host memory."),
        ("ram_cache_limit_bytes", "gauge", "", "What they may take there."),
        (
            "pool_blocks",
            "gauge",
            "use",
            "Blocks of the one arena: kv_active, kv_cached, adapter_active, adapter_idle, free.",
        ),
        ("pool_block_bytes", "gauge", "", "Bytes of one block."),
        (
            "kv_cache_usage_ratio",
            "gauge",
            "",
            "KV of running sequences, of the blocks that no adapter has: 0 to 1.",
        ),
        ("kv_cache_blocks", "gauge", "", "Blocks with KV, running and cached."),
        ("gpu_memory_used_bytes", "gauge", "gpu", "Of the whole card, all processes."),
        ("gpu_memory_total_bytes", "gauge", "gpu", "Of the whole card."),
        (
            "gpu_utilization_ratio",
            "gauge",
            "gpu",
            "Share of the last moments in which a kernel ran: 0 to 1.",
        ),
        (
            "disk_free_bytes",
            "gauge",
            "dir",
            "Free on the file system of the directory: state or store.",
        ),
        ("disk_size_bytes", "gauge", "dir", "Its size."),
    ),
    *_group(
        "Prefix cache",
        (
            "prefix_cache_query_tokens_total",
            "counter",
            "adapter",
            "Prompt tokens that were looked up.",
        ),
        ("prefix_cache_hit_tokens_total", "counter", "adapter", "Of those, found."),
        ("prefix_cache_blocks", "gauge", "", "Blocks that are cached and in no use."),
        ("prefix_cache_evicted_blocks_total", "counter", "", "Cached blocks that made way."),
        (
            "prefix_reuse_distance_tokens",
            "histogram",
            "",
            "Tokens that were cached between two uses of a block, evicted ones included: about "
            "how large a cache has to be.",
            BY_BLOCKS,
        ),
        (
            "prefix_saved_prefill_seconds_total",
            "counter",
            "",
            "Seconds of prefill that hits have saved.",
        ),
    ),
    *_group(
        "Speculation",
        (
            "speculation_draft_tokens_total",
            "counter",
            "adapter",
            "Tokens that were guessed ahead and computed in case they follow, with "
            "models.speculation.",
        ),
        (
            "speculation_accepted_tokens_total",
            "counter",
            "adapter",
            "Of those, the ones that did follow; beside these, every step draws one token itself.",
        ),
    ),
    *_group(
        "Registry and inbox",
        ("registry_transactions_total", "counter", "op", "Transactions: read or write."),
        (
            "registry_transaction_seconds",
            "histogram",
            "op",
            "Of one transaction, its commit to the disk included.",
            SECONDS,
        ),
        (
            "registry_errors_total",
            "counter",
            "op kind",
            "Transactions that failed: busy, full, io or corrupt.",
        ),
        ("registry_bytes", "gauge", "", "Of registry.db and its log."),
        (
            "registry_last_backup_timestamp_seconds",
            "gauge",
            "",
            "When the newest backup was made, since the epoch; 0 without one.",
        ),
        (
            "watch_events_total",
            "counter",
            "type",
            "In the inbox: touched and moved folders, whole and gone adapters.",
        ),
        (
            "watch_overflows_total",
            "counter",
            "",
            "Times that hints were lost, and all was looked at instead.",
        ),
        (
            "watch_mode",
            "gauge",
            "mode",
            "1 for how the inbox is watched: inotify or polling; 0 for the other.",
        ),
        ("watch_rescan_seconds", "histogram", "", "Of one look at the whole inbox.", LOAD_SECONDS),
        (
            "hub_pulls_total",
            "counter",
            "outcome",
            "Pulls from hubs, buckets and the web that have ended: done, failed or cancelled.",
        ),
        ("hub_pull_bytes_total", "counter", "", "Bytes that they have fetched."),
        ("hub_pull_seconds", "histogram", "", "Of one that was done.", LOAD_SECONDS),
    ),
    *_group(
        "For gateways",
        (
            GATEWAY,
            "gauge",
            "running_lora_adapters waiting_lora_adapters max_lora",
            "The series that gateways know from vLLM, always exactly one. running: resident "
            "adapters; waiting: with queued requests, and not resident; the value is the time.",
        ),
        (
            GATEWAY_RUNNING,
            "gauge",
            "",
            "Sequences with a place in a batch, of all engines together.",
        ),
        (GATEWAY_WAITING, "gauge", "", "Sequences that the engines have queued."),
        (
            GATEWAY_KV,
            "gauge",
            "",
            "KV of running sequences, of the blocks that no adapter has: 0 to 1, all engines "
            "together.",
        ),
    ),
)

NAMES = {metric.name: metric for metric in METRICS}

#: Where several models are served, these have a label `model` too: they are of one engine, or of
#: its requests.  So has whatever has an adapter label.
OF_REQUESTS = frozenset(
    PREFIX + name
    for name in (
        *("request_queue_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_duration_seconds", "request_prefill_seconds", "request_decode_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    )
)
OF_ENGINES = OF_REQUESTS | frozenset(
    PREFIX + name
    for name in (
        *("engine_state", "engine_last_step_timestamp_seconds", "engine_restarts_total"),
        *("step_seconds", "step_batch_tokens", "step_adapters", "step_lora_bytes"),
        *("preemptions_total", "guide_late_masks_total", "adapters_draining"),
        *("slots", "slots_used", "slots_pinned", "slot_bytes"),
        *("ram_cache_bytes", "ram_cache_limit_bytes", "pool_blocks", "pool_block_bytes"),
        *("kv_cache_usage_ratio", "kv_cache_blocks", "prefix_cache_blocks"),
        *("prefix_cache_evicted_blocks_total", "prefix_reuse_distance_tokens"),
        *("prefix_saved_prefill_seconds_total", "routed_requests_total"),
    )
)
#: Where a model has several engines, these have a label `replica` as well.
OF_REPLICAS = OF_ENGINES - OF_REQUESTS
