"""`lorad gateway`: a gateway as a process, over daemons at sockets or URLs.

Goes in: where the members, the catalog and the gateway's own sockets are.  Comes out: an exit
status, as of the daemon.  SIGTERM ends it: streams in flight get a moment, members go on.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette

from lorad import descriptors, disk, key_file
from lorad.api.server import HttpServer, bind_tcp, bind_unix, unlink_unix
from lorad.api.tcp import TcpKeys
from lorad.config import Settings
from lorad.config_network import split_address
from lorad.errors import BadConfig, LoradError
from lorad.fleet.catalog import open_catalog
from lorad.fleet.gateway import Gateway, kept
from lorad.fleet.line import Site
from lorad.fleet.local import LocalMembers
from lorad.fleet.presence import LEASE_SECONDS

log = logging.getLogger("lorad.fleet")

#: What runs when it is told to end gets so long.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`folder` holds the sockets, and uploads on their way; `bind` serves both faces on TCP, where
    operators have a key of `admin_keys`, and others one of `api_keys` if that is set."""

    sites: tuple[Site, ...]
    catalog: str
    folder: Path
    bind: str = ""
    api_keys: str = ""
    admin_keys: str = ""
    lease_seconds: float = LEASE_SECONDS
    several: bool = False  # behind one address


def run(wanted: Wanted, settings: Settings) -> int:
    """Until a signal.  Raises StartError."""
    keys = TcpKeys(
        inference=key_file.read(wanted.api_keys, "--api-keys"),
        admin=key_file.read(wanted.admin_keys, "--admin-keys"),
    )
    _check_open(wanted, keys)
    try:
        with disk.writing("make the gateway's folder", wanted.folder.parent):
            wanted.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    except (OSError, LoradError) as error:
        raise BadConfig(f"--folder {wanted.folder}: {error}", hint="another folder") from None
    inference, admin = settings.inference, settings.admin
    listeners = {
        "inference": bind_unix(
            wanted.folder / "inference.sock", int(inference.mode, 8), inference.group
        ),
        "admin": bind_unix(wanted.folder / "admin.sock", int(admin.mode, 8), admin.group),
    }
    if wanted.bind:
        listeners["tcp"] = bind_tcp(wanted.bind)

    async def serve() -> None:
        told = _told_to_end()  # before anybody knows of this gateway
        async with _gateway(wanted, settings, keys) as gateway:
            apps: dict[str, Starlette] = {
                "inference": gateway.inference_app(),
                "admin": gateway.admin_app(),
                "tcp": gateway.app(),
            }
            limits = settings.limits
            connections = descriptors.share(limits.connections, listeners=len(listeners))
            servers = [
                HttpServer(
                    apps[face],
                    there,
                    receipt_seconds=limits.request_receipt,
                    idle_seconds=limits.idle,
                    connections=connections,
                    header_bytes=limits.headers,
                )
                for face, there in listeners.items()
            ]
            for server in servers:
                await server.start()
            log.info("the gateway takes requests")
            await told.wait()
            await asyncio.gather(*(server.stop(GRACE_SECONDS) for server in servers))

    try:
        asyncio.run(serve())
    except LoradError as error:
        raise BadConfig(error.message, hint=error.hint) from error
    finally:
        for listener in listeners.values():
            listener.close()
        for face in ("inference", "admin"):
            unlink_unix(wanted.folder / f"{face}.sock")
    return 0


def _check_open(wanted: Wanted, keys: TcpKeys) -> None:
    """Members on sockets take the gateway for their peer: to them everybody is who runs it."""
    if not wanted.bind:
        return
    try:
        host, _ = split_address(wanted.bind)
    except ValueError as error:
        raise BadConfig(f"--bind {wanted.bind[:80]!r}: {error}", hint="127.0.0.1:8411") from None
    on_sockets = [site.name for site in wanted.sites if not site.inference.startswith("http")]
    if on_sockets and not (keys.inference or ip_address(host).is_loopback):
        raise BadConfig(
            f"--bind {wanted.bind} without --api-keys lets everybody use "
            f"{', '.join(on_sockets)}, which see only their socket's peer",
            hint="--api-keys FILE, or members at URLs, which ask for keys themselves",
        )


@contextlib.asynccontextmanager
async def _gateway(wanted: Wanted, settings: Settings, keys: TcpKeys) -> AsyncIterator[Gateway]:
    catalog = open_catalog(wanted.catalog, settings)
    await catalog.look()  # members would say the same, one after another
    members = LocalMembers(wanted.sites, catalog)
    folder = wanted.folder
    sockets = (str(folder / "inference.sock"), str(folder / "admin.sock"))
    gateway = Gateway(
        members,
        catalog,
        folder,
        settings=settings,
        keys=keys,
        lease_seconds=wanted.lease_seconds,
        several=wanted.several,
        sockets=sockets,
    )
    await members.look()
    looking = asyncio.create_task(kept(members.run))
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await members.close()


def _told_to_end() -> asyncio.Event:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


def site_of(word: str, key: str = "") -> Site:
    """`NAME=FOLDER` of a daemon's two sockets, or `NAME=URL,URL` of its inference and admin routes.
    Raises BadConfig."""
    name, equals, place = word.partition("=")
    inference, comma, admin = place.partition(",")
    places = [inference, admin] if comma else [place]
    known = all(map(_is_url if comma else _is_path, places))
    if not equals or not name or not known or "/" in name or not name.isprintable():
        message = f"{word[:80]!r} is no member"
        raise BadConfig(message, hint="NAME=/run/lorad or NAME=http://HOST:8411,http://HOST:8412")
    if comma:
        return Site(name, inference, admin, key)
    folder = Path(place)
    return Site(name, str(folder / "inference.sock"), str(folder / "admin.sock"))


def _is_url(word: str) -> bool:
    if word.startswith("/"):  # one socket of two
        return True
    try:
        parts = urlsplit(word)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_path(word: str) -> bool:
    return bool(word) and "://" not in word and word.isprintable()


def member_key(path: Path | None) -> str:
    """The first key of a file, as of an admin_keys_file; "" without one.  Raises BadConfig."""
    if path is None:
        return ""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadConfig(f"--member-key {path}: {why}", hint="a file with the key") from None
    words = [line.partition(" #")[0].split() for line in lines if not line.startswith("#")]
    key = next((line[-1] for line in words if line), "")
    if not (key.isascii() and key.isprintable() and key):
        raise BadConfig(f"--member-key {path}: there is no key in it", hint="a file with the key")
    return key


def sites_of(words: Sequence[str], key: str = "") -> tuple[Site, ...]:
    sites = tuple(site_of(word, key) for word in words)
    if len({site.name for site in sites}) < len(sites):
        raise BadConfig("two members have the same name", hint="a name for each")
    return sites
