"""What only a process itself knows of what it holds, on SIGUSR2: for `soak.py`.

Goes in: nothing but the signal.  Comes out: a JSON file in the folder that SOAK_REPORTS names,
called by the process's role: objects of the garbage collector (with SOAK_TYPES also of so many
types), asyncio's tasks, and, of an engine, bytes of the torch allocator and of pinned memory.  What
the prefix cache has for each block is told apart: the pool bounds it, and a card's fills for longer
than a run takes.  The file appears whole.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any


def install(role: str) -> None:
    """From now on SIGUSR2 has this process write its report.  Call it in the main thread."""
    report = Path(os.environ["SOAK_REPORTS"]) / f"{role}.json"

    types = int(os.environ.get("SOAK_TYPES", "0"))

    def write(number: int, frame: FrameType | None) -> None:
        fresh = report.with_suffix(".new")
        fresh.write_text(json.dumps(_counts() | _types(types)))  # counts collect garbage first
        fresh.rename(report)

    signal.signal(signal.SIGUSR2, write)


def _types(most: int) -> dict[str, dict[str, int]]:
    """The most frequent types of objects, for who looks for what grows."""
    if not most:
        return {}
    counts = Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())
    return {"types": dict(counts.most_common(most))}


def _counts() -> dict[str, int]:
    gc.collect()  # what waits to be collected is not held
    objects = gc.get_objects()
    entries = _entries(objects)
    counts = {"objects": len(objects) - _with_theirs(entries), "cache_entries": len(entries)}
    with suppress(RuntimeError):  # no loop runs in this process
        counts["tasks"] = len(asyncio.all_tasks())
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        counts["vram_allocated"] = torch.cuda.memory_allocated()
        counts["vram_reserved"] = torch.cuda.memory_reserved()
        if hasattr(torch.cuda, "host_memory_stats"):
            counts["pinned_allocated"] = torch.cuda.host_memory_stats().get(
                "allocated_bytes.current", 0
            )
    return counts


def _entries(objects: list[Any]) -> list[Any]:
    """Of the prefix cache: one a block."""
    prefix: Any = sys.modules.get("engine.memory.prefix")
    return [o for o in objects if type(o) is prefix.Entry] if prefix is not None else []


def _with_theirs(entries: list[Any]) -> int:
    """Entries, and what each has to itself."""
    return len(entries) + sum(gc.is_tracked(own) for e in entries for own in (e.usage, e.children))
