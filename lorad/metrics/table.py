"""Every metric: its name, type, labels, bounds and meaning.  The one list.

Goes in: nothing.  Comes out: `METRICS`, from which families are made (`sheet`) and the reference
page is written (`docs/generate.py`).  A name that is not here cannot be shown.
"""

from engine.histogram import LOAD_SECONDS, SECONDS
from lorad.metrics.metric import PREFIX, Metric, group
from lorad.metrics.table_room import ROOM
from lorad.metrics.table_traffic import TRAFFIC

#: What gateways read of vLLM, one series each; a colon is no part of any name of ours.
GATEWAY = "vllm:lora_requests_info"
GATEWAY_RUNNING, GATEWAY_WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
GATEWAY_KV = "vllm:kv_cache_usage_perc"
GATEWAYS = (GATEWAY, GATEWAY_RUNNING, GATEWAY_WAITING, GATEWAY_KV)


METRICS: tuple[Metric, ...] = (
    *group(
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
    *TRAFFIC,
    *ROOM,
    *group(
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
    *group(
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
