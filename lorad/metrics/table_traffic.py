"""The metrics of requests and of the steps that answer them: rows of `table.METRICS`."""

from engine.histogram import ADAPTERS, BYTES, SECONDS, TOKENS
from lorad.metrics.metric import Metric, group

TRAFFIC: tuple[Metric, ...] = (
    *group(
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
    *group(
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
    *group(
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
)
