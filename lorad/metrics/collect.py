"""The parts of a sheet that name no adapter: daemon, HTTP, requests, engine, memory, files.

Goes in: the sources.  Comes out: values on a sheet.  Each function is one heading of the table.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import get_args

from engine.adapters.states import State
from engine.histogram import ADAPTERS, BYTES, SECONDS, TOKENS
from engine.status_messages import EngineSnapshot
from lorad.metrics.adapters import counted_states
from lorad.metrics.engine_counts import Totals
from lorad.metrics.sheet import Sheet
from lorad.metrics.sources import Sources
from lorad.metrics.table import GATEWAY_KV, GATEWAY_RUNNING, GATEWAY_WAITING
from lorad.routing.affinity import Reason
from lorad.service.engine_face import LinkState
from lorad.service.meter import KINDS, Kind, KindCounts
from lorad.service.snapshot import Seen

_STEP_BOUNDS = {
    "seconds": SECONDS,
    "batch_tokens": TOKENS,
    "adapters": ADAPTERS,
    "lora_bytes": BYTES,
}
#: Distances are counted by powers of two blocks, up to a million of them.
_DISTANCE_BUCKETS = 21
MODES = ("inotify", "polling")


def daemon(sheet: Sheet, sources: Sources, started: float) -> None:
    sheet.put("build_info", 1.0, sources.version, revision())
    sheet.put("ready", float(sources.ready()[0]))
    sheet.put("draining", float(sources.draining()))
    sheet.put("start_time_seconds", started)
    reloads = dict(sources.reloads)
    for outcome in ("success", "failure"):
        sheet.put("config_reloads_total", reloads.get(outcome, 0), outcome)
    sheet.put("config_last_reload_success", float(reloads.get("last", 1)))


def base(sheet: Sheet, seen: Seen) -> None:
    """Of one model."""
    link, model = seen.link, seen.settings
    dtype = link.info.dtype if link.info is not None else model.dtype
    sheet.put("base_model_info", 1.0, model.name, dtype)


def routed(sheet: Sheet, seen: Seen) -> None:
    """Of one of several engines of a model."""
    if seen.routed is not None:
        counts = dict(seen.routed)
        for reason in get_args(Reason):
            sheet.put("routed_requests_total", counts.get(reason, 0), reason)


def engine(sheet: Sheet, seen: Seen) -> None:
    """Of one engine."""
    link = seen.link
    for state in get_args(LinkState):
        sheet.put("engine_state", float(link.state == state), state)
    sheet.put("engine_last_step_timestamp_seconds", link.last_step_at)
    sheet.put("engine_restarts_total", link.restarts)


def http(sheet: Sheet, sources: Sources) -> None:
    counts = sources.http
    sheet.puts("http_requests_total", dict(counts.answers).items())
    for route, histogram in dict(counts.seconds).items():
        sheet.observe("http_request_duration_seconds", histogram, route)
    for listener, count in sources.connections.items():
        sheet.put("http_connections", count(), listener)
        sheet.put("auth_failures_total", dict(counts.denied).get(listener, 0), listener)
    aborted = dict(sources.aborted)
    for reason in ("client_disconnect", "slow_client", "receipt_timeout"):
        sheet.put("http_aborted_total", aborted.get(reason, 0), reason)


def refused(sheet: Sheet, sources: Sources) -> None:
    for code, number in dict(sources.meter.refused).items():
        sheet.put("request_rejections_total", number, code)
    sheet.put("drain_aborted_requests_total", sources.meter.aborted_by_drain)


def requests(sheet: Sheet, kinds: Mapping[Kind, KindCounts]) -> None:
    """Of one model."""
    for kind, k in kinds.items():
        sheet.observe("request_queue_seconds", k.queue_seconds, kind)
        sheet.observe("time_to_first_token_seconds", k.first_token_seconds, kind)
        sheet.observe("inter_token_latency_seconds", k.inter_token_seconds, kind)
        sheet.observe("request_prefill_seconds", k.prefill_seconds, kind)
        sheet.observe("request_decode_seconds", k.decode_seconds, kind)
        sheet.observe("request_prompt_tokens", k.prompt_tokens, kind)
        sheet.observe("request_generation_tokens", k.generated_tokens, kind)
        for endpoint, seconds in tuple(k.duration_seconds.items()):
            sheet.observe("request_duration_seconds", seconds, kind, endpoint)


def steps(sheet: Sheet, totals: Totals) -> None:
    for kind in KINDS:
        for field, bounds in _STEP_BOUNDS.items():
            summed = totals.steps[kind][field]
            sheet.buckets(f"step_{field}", bounds, summed.counts, summed.total, kind)
    sheet.put("preemptions_total", totals.preemptions)
    sheet.put("guide_late_masks_total", totals.late_masks)


def memory(sheet: Sheet, snapshot: EngineSnapshot | None) -> None:
    """Of one engine.  Without one there is no memory to speak of: zeros."""
    if snapshot is not None:
        _arena(sheet, snapshot)
    for name, value in _slots(snapshot).items():
        sheet.put(name, value)
    sheet.put("ram_cache_bytes", snapshot.ram_used_bytes if snapshot else 0)
    sheet.put("ram_cache_limit_bytes", snapshot.ram_limit_bytes if snapshot else 0)
    draining = [s for s in snapshot.revisions if s.state == State.DRAINING] if snapshot else []
    sheet.put("adapters_draining", len(draining))


def gateway_load(sheet: Sheet, snapshot: EngineSnapshot | None) -> None:
    """vLLM's three gauges, of all engines together: a gateway's picker looks at one series each."""
    sheet.put(GATEWAY_RUNNING, snapshot.running if snapshot else 0)
    sheet.put(GATEWAY_WAITING, snapshot.waiting if snapshot else 0)
    sheet.put(GATEWAY_KV, _kv_usage(snapshot) if snapshot else 0.0)


def machine(sheet: Sheet, sources: Sources) -> None:
    """Cards and disks."""
    infos = [one.link.info for seen in sources.models for one in seen.engines]
    for uuid in dict.fromkeys(info.device_uuid for info in infos if info is not None):
        _gpu(sheet, sources, uuid)
    for name, folder in sources.folders().items():
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            sheet.put("disk_free_bytes", disk.f_bavail * disk.f_frsize, name)
            sheet.put("disk_size_bytes", disk.f_blocks * disk.f_frsize, name)


def prefix(sheet: Sheet, totals: Totals, snapshot: EngineSnapshot | None) -> None:
    sheet.put("prefix_cache_blocks", snapshot.pool.kv_cached if snapshot else 0)
    sheet.put("prefix_cache_evicted_blocks_total", totals.evicted_blocks)
    sheet.put("prefix_saved_prefill_seconds_total", totals.saved_seconds)
    size = snapshot.pool.block_size if snapshot else 0
    if size:  # it is the same for every engine of one model
        counts = [*totals.distances.counts]
        above = sum(counts[_DISTANCE_BUCKETS:])
        counts = [*counts[:_DISTANCE_BUCKETS], *[0] * (_DISTANCE_BUCKETS - len(counts)), above]
        bounds = [float((2**n - 1) * size) for n in range(_DISTANCE_BUCKETS)]
        total = totals.distances.total * size
        sheet.buckets("prefix_reuse_distance_tokens", bounds, counts, total)


def registry(sheet: Sheet, sources: Sources) -> None:
    """Reads the registry, for the counts of names: call it from a thread that may wait."""
    held = sources.registry
    counts = held.transactions
    for op, histogram in counts.seconds.items():
        sheet.put("registry_transactions_total", dict(counts.number).get(op, 0), op)
        sheet.observe("registry_transaction_seconds", histogram, op)
        for kind in ("busy", "full", "io", "corrupt"):
            sheet.put("registry_errors_total", dict(counts.errors).get((op, kind), 0), op, kind)
    _try(lambda: sheet.put("registry_bytes", held.file_bytes()))
    _try(lambda: sheet.put("registry_last_backup_timestamp_seconds", held.backed_up_at()))
    _try(lambda: _names(sheet, sources))


def watch(sheet: Sheet, sources: Sources) -> None:
    watcher = sources.watcher()
    if watcher is None:
        return
    events = dict(watcher.num_events)
    for kind in ("touched", "moved", "whole", "gone"):
        sheet.put("watch_events_total", events.get(kind, 0), kind)
    sheet.put("watch_overflows_total", watcher.num_overflows)
    for mode in MODES:
        sheet.put("watch_mode", float(watcher.mode == mode), mode)
    sheet.observe("watch_rescan_seconds", watcher.scans)


@cache
def revision() -> str:
    """The commit that this was installed from with `pip install git+...`, or ""."""
    try:
        text = metadata.distribution("lorad").read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id", "")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    return str(found)


def _try(put: Callable[[], None]) -> None:
    """A registry that cannot be read is counted as such; the rest of the scrape is as useful."""
    with contextlib.suppress(Exception):
        put()


def _names(sheet: Sheet, sources: Sources) -> None:
    for state, number in counted_states(sources.counts()).items():
        sheet.put("adapters", number, state)
    for reason, number in sources.registry.quarantined().items():
        sheet.put("adapters_quarantined", number, reason)


def _arena(sheet: Sheet, snapshot: EngineSnapshot) -> None:
    pool = snapshot.pool
    for use in ("kv_active", "kv_cached", "adapter_active", "adapter_idle", "free"):
        sheet.put("pool_blocks", getattr(pool, use), use)
    sheet.put("pool_block_bytes", pool.block_bytes)
    sheet.put("kv_cache_blocks", pool.kv_active + pool.kv_cached)
    sheet.put("kv_cache_usage_ratio", _kv_usage(snapshot))


def _kv_usage(snapshot: EngineSnapshot) -> float:
    pool = snapshot.pool
    without_adapters = pool.total - pool.adapter_active - pool.adapter_idle
    return pool.kv_active / max(without_adapters, 1)


def _slots(snapshot: EngineSnapshot | None) -> dict[str, int]:
    held: Sequence[int] = []
    pinned = 0
    if snapshot is not None:
        held = [s.gpu_bytes for s in snapshot.revisions if s.gpu_bytes]
        pinned = sum(1 for s in snapshot.revisions if s.pinned and s.slot is not None)
    return {
        "slots": snapshot.slots_total if snapshot else 0,
        "slots_used": snapshot.slots_used if snapshot else 0,
        "slots_pinned": pinned,
        "slot_bytes": sum(held),
    }


def _gpu(sheet: Sheet, sources: Sources, uuid: str) -> None:
    use = sources.nvml.look(uuid)
    if use is None:
        return
    sheet.put("gpu_memory_used_bytes", use.used_bytes, uuid)
    sheet.put("gpu_memory_total_bytes", use.total_bytes, uuid)
    if use.busy is not None:
        sheet.put("gpu_utilization_ratio", use.busy, uuid)
