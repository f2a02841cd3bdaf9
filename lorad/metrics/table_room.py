"""The metrics of adapters and of the memory that they share: rows of `table.METRICS`."""

from engine.histogram import LOAD_SECONDS
from lorad.metrics.metric import BY_BLOCKS, Metric, group

ROOM: tuple[Metric, ...] = (
    *group(
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
    *group(
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
    *group(
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
    *group(
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
)
