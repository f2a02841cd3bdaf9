"""Reload: what of a configuration can change under a running daemon, and what waits for a restart.

Goes in: the configuration, read anew.  Comes out: the settings that are in effect now, and the keys
that changed or wait.  A configuration that is refused changes nothing.  Knows no service: the
daemon's `apply` tells those whom it concerns.
"""

import asyncio
from collections.abc import Callable
from fnmatch import fnmatchcase

import msgspec

from lorad.config import Settings, model_key
from lorad.config_sections import SECTIONS
from lorad.errors import LoradError, StartError
from lorad.service.events import EventRing
from lorad.wire_operate import Reloaded, RunningConfig

#: Keys that are read whenever they are needed.  All others are read at a start alone.
LIVE = (
    "limits.*",
    "log.level",
    "shutdown.drain_timeout",
    "lora.pin_limit",
    "admin.allow_uids",
    "watch.max_adapter_bytes",
    "tcp.api_keys_file",
    "tcp.admin_keys_file",
    "tcp.allow_hosts",
)


class Reload:
    """`read` raises StartError; `as_read` is what it returned at the start, `now` what became of
    it: with the paths of sockets that were passed in or placed."""

    def __init__(
        self, now: Settings, as_read: Settings, read: Callable[[], Settings], events: EventRing
    ) -> None:
        self.now = now
        #: Reads what the settings point at, and raises StartError; before anything is applied.
        self.prepare: Callable[[Settings], None] = lambda fresh: None
        self.apply: Callable[[Settings], None] = lambda now: None
        self.on_outcome: Callable[[LoradError | None], None] = lambda error: None
        self._as_read, self._read, self._events = as_read, read, events
        self._waiting: dict[str, object] = {}  # what the last reload left to a restart
        self._lock = asyncio.Lock()

    async def __call__(self) -> Reloaded:
        """Raises invalid_config, which names the key, after the events did."""
        async with self._lock:
            try:
                fresh = await asyncio.to_thread(self._read_all)
            except StartError as error:
                refused = LoradError("invalid_config", error.message, hint=error.hint)
                self._tell_of(refused)
                raise refused from error
            return self._take(fresh)

    def describe(self) -> RunningConfig:
        """What is in effect, and what waits for a restart."""
        values = msgspec.to_builtins(self.now)
        origins = values.pop("origins")
        return RunningConfig(settings=values, origins=origins, needs_restart=self._waiting)

    def _read_all(self) -> Settings:
        fresh = self._read()
        self.prepare(fresh)
        return fresh

    def _take(self, fresh: Settings) -> Reloaded:
        different = _different(self._as_read, fresh)
        changed = tuple(key for key in different if is_live(key))
        self.now = _with(self.now, fresh, changed)
        self._as_read = _with(self._as_read, fresh, changed)
        self.apply(self.now)
        waiting = tuple(key for key in different if key not in changed)
        self._waiting = {key: _value(fresh, key) for key in waiting}
        words = [f"needs a restart: {', '.join(waiting)}"] if waiting else []
        words += [f"changed: {', '.join(changed)}"] if changed else []
        self._events.publish(
            "config.reloaded", level="warn" if waiting else "info", message="; ".join(words)
        )
        self.on_outcome(None)
        return Reloaded(changed=changed, needs_restart=waiting)

    def _tell_of(self, error: LoradError) -> None:
        words = f"{error.message}; {error.hint}" if error.hint else error.message
        self._events.publish("config.rejected", level="error", message=words)
        self.on_outcome(error)


def is_live(key: str) -> bool:
    """May it change under a running daemon?"""
    return any(fnmatchcase(key, pattern) for pattern in LIVE)


def _value(settings: Settings, dotted: str) -> object:
    """Of one key, as JSON has it."""
    section, _, key = dotted.partition(".")
    if section != "models":
        return msgspec.to_builtins(getattr(getattr(settings, section), key))
    if not key:  # there are more of them, or fewer
        return len(settings.models)
    index, _, name = key.rpartition(".")
    return msgspec.to_builtins(getattr(settings.models[int(index or 0)], name))


def _different(before: Settings, after: Settings) -> tuple[str, ...]:
    """Dotted keys, in the order of the file."""
    keys = []
    if len(before.models) != len(after.models):
        keys.append("models")
    for index, (old, new) in enumerate(zip(before.models, after.models, strict=False)):
        keys += [model_key(index, key) for key in _changed(old, new)]
    for name in SECTIONS:
        keys += [f"{name}.{key}" for key in _changed(getattr(before, name), getattr(after, name))]
    return tuple(keys)


def _changed(old: msgspec.Struct, new: msgspec.Struct) -> list[str]:
    return [key for key in old.__struct_fields__ if getattr(old, key) != getattr(new, key)]


def _with(settings: Settings, fresh: Settings, keys: tuple[str, ...]) -> Settings:
    """`settings` with these keys, and where they came from, of `fresh`."""
    replace = msgspec.structs.replace
    for dotted in keys:
        name, _, key = dotted.partition(".")
        section = replace(getattr(settings, name), **{key: getattr(getattr(fresh, name), key)})
        settings = replace(settings, **{name: section})
    origins = {k: v for k, v in settings.origins.items() if k not in keys}
    origins |= {k: v for k, v in fresh.origins.items() if k in keys}
    return replace(settings, origins=origins)
