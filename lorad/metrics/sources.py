"""What metrics are made of: the owners of every number, as the composition root hands them over.

Comes out: one frozen value.  All of it may be read from another thread: owners replace values at
once or only ever add to them, and what is a dictionary is copied before it is walked through.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.histogram import Histogram
from lorad.config import Settings
from lorad.metrics.http import HttpCounts
from lorad.metrics.nvml import Nvml
from lorad.registry.registry import Registry
from lorad.service.catalog import Catalog
from lorad.service.live import Live, Running
from lorad.service.meter import Meter
from lorad.service.pictures import Pictures
from lorad.service.snapshot import Seen


class Watching(Protocol):
    """Of InboxWatcher."""

    @property
    def mode(self) -> str: ...
    @property
    def num_overflows(self) -> int: ...
    @property
    def num_events(self) -> Mapping[str, int]: ...
    @property
    def scans(self) -> Histogram: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """`counts`: names by state, as they are listed; `ready`: (yes or no, why not)."""

    settings: Settings
    version: str
    models: tuple[Seen, ...]
    picture: Pictures  # of all of them
    catalog: Catalog
    registry: Registry
    meter: Meter
    aborted: Mapping[str, int]  # reason -> requests
    http: HttpCounts
    ready: Callable[[], tuple[bool, str]]
    counts: Callable[[], Mapping[str, int]]
    draining: Callable[[], bool]
    reloads: Counter[str] = field(default_factory=Counter)  # outcome; None has failed at the start
    #: Listener -> how many connections it has; filled in once they are there.
    connections: dict[str, Callable[[], int]] = field(default_factory=dict)
    watcher: Callable[[], Watching | None] = lambda: None
    tenants: Callable[[], set[str]] = set  # that were set up; none: names say whose they are
    crowd: Iterable[tuple[Running, Live]] = ()  # the requests that have not ended
    nvml: Nvml = field(default_factory=Nvml)

    def folders(self) -> dict[str, Path]:
        """Whose disks are watched."""
        return {
            "state": Path(self.settings.registry.dir),
            "store": Path(self.settings.store.dir),
        }
