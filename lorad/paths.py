"""Where lorad keeps things: the system's directories, or a user's.

Goes in: an environment and a uid.  Comes out: `Paths`.  systemd's variables win over both
conventions.  Nothing is created here but the fresh runtime directory that `fresh_runtime` makes.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Paths:
    """Directories.  `runtime` None: a user without XDG_RUNTIME_DIR; made at start."""

    system: bool
    config: Path
    state: Path  # registry.db, the lock
    data: Path  # store/
    cache: Path
    runtime: Path | None  # sockets
    own_hub: Path | None = None  # the hub's cache, where its own variables name it

    @property
    def hub(self) -> Path:
        """The cache of the hub's files; shared with other programs where HF_HOME says so."""
        return self.own_hub or self.cache / "huggingface" / "hub"


def find(env: Mapping[str, str], uid: int | None = None) -> Paths:
    """The directories of this user, or of the machine when it is root or a system unit."""
    uid = os.geteuid() if uid is None else uid
    given = env.get("RUNTIME_DIRECTORY", "")
    unit = given.startswith("/run/") and not given.startswith("/run/user/")
    usual = _system() if uid == 0 or unit else _user(env)
    state = _first(env, "STATE_DIRECTORY")
    return Paths(
        usual.system,
        _first(env, "CONFIGURATION_DIRECTORY") or usual.config,
        state or usual.state,
        state or usual.data,
        _first(env, "CACHE_DIRECTORY") or usual.cache,
        _first(env, "RUNTIME_DIRECTORY") or usual.runtime,
        _own_hub(env),
    )


def _own_hub(env: Mapping[str, str]) -> Path | None:
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"]).expanduser()
    return Path(env["HF_HOME"]).expanduser() / "hub" if env.get("HF_HOME") else None


def fresh_runtime() -> Path:
    """A new directory of mode 0700 for the sockets, where the session manager provides none."""
    return Path(tempfile.mkdtemp(prefix="lorad-"))


def _system() -> Paths:
    state = Path("/var/lib/lorad")
    return Paths(
        True, Path("/etc/lorad"), state, state, Path("/var/cache/lorad"), Path("/run/lorad")
    )


def _user(env: Mapping[str, str]) -> Paths:
    home = Path(env.get("HOME") or os.path.expanduser("~"))
    if not home.is_absolute():  # a uid without an account; the state directory then says so
        home = Path("/nonexistent")

    def xdg(name: str, otherwise: str) -> Path:
        return Path(env.get(name) or home / otherwise) / "lorad"

    runtime = env.get("XDG_RUNTIME_DIR")
    return Paths(
        False,
        xdg("XDG_CONFIG_HOME", ".config"),
        xdg("XDG_STATE_HOME", ".local/state"),
        xdg("XDG_DATA_HOME", ".local/share"),
        xdg("XDG_CACHE_HOME", ".cache"),
        Path(runtime) / "lorad" if runtime else None,
    )


def _first(env: Mapping[str, str], name: str) -> Path | None:
    """systemd joins several directories with colons; lorad's is the first."""
    value = env.get(name, "").split(":")[0]
    return Path(value) if value else None
