"""`loractl`, here or as a process of its own, against the real faces on steered services."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorad import wire, wire_status
from lorad.cli.app import invoke
from lorad.config import KIB
from lorad.config_sections import Limits
from lorad.errors import LoradError

_FAKES = Path(__file__).parents[2] / "fakes" / "api_server.py"
LIMITS = Limits(body=64 * KIB, queue=32, max_tokens=1000)
#: What nothing here ever takes.
PATIENCE = 180


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("api_server_of_cli", _FAKES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fakes = _load()


def adapter(name: str, **fields: Any) -> wire.Adapter:
    """A row of the listing."""
    usual = {
        "name": name,
        "tenant": name.partition("/")[0] if "/" in name else None,
        "model": "tiny",
        "state": "idle",
        "pinned": False,
        "priority": 50,
        "rev": "a1" * 32,
        "candidate_rev": None,
        "rank": 8,
        "num_bytes": 3 << 20,
        "source": "upload",
        "labels": {},
        "reason": None,
        "reason_message": None,
        "created_at": "2025-03-01T09:30:00.000Z",
        "last_used_at": None,
    }
    return wire.Adapter(**(usual | fields))


class Server:
    """ApiServer whose listing shows `rows` and whose wishes fail as `failures` say."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.api = fakes.ApiServer(folder, LIMITS, max_upload=256 * KIB, **options)
        self.admin, self.inference = self.api.admin, self.api.inference
        listing, adapters = self.api.listing, self.api.adapters
        listing.status, listing.page, listing.slots = self._status, self._page, self._slots
        listing.detail, adapters._results = self._detail, self._results
        self._removed, self._patch = adapters.remove, adapters.patch
        adapters.remove, adapters.patch = self._remove, self._change
        self.reset()

    def reset(self) -> None:
        self.api.reset()
        self.rows = {"acme/sql": adapter("acme/sql"), "bible": adapter("bible", rev="b2" * 32)}
        self.details: dict[str, wire.AdapterDetail] = {}
        self.failures: dict[str, LoradError] = {}
        self.pages = 0
        self.inbox_waits: tuple[str, ...] = ()
        self.inbox_nested: tuple[str, ...] = ()

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        return self.api.adapters.calls

    def close(self) -> None:
        self.api.close()

    # ------------------------------------------------------------- what the services say
    def _status(self) -> wire_status.Status:
        blank = type(self.api.listing).status(self.api.listing)
        return msgspec.structs.replace(
            blank,
            version="0.1.0",
            state="ready",
            model="tiny",
            adapters={"idle": 2, "quarantined": 1},
            inference_socket=str(self.inference),
            admin_socket=str(self.admin),
        )

    def _page(self, *, limit: int, cursor: str | None, **filters: Any) -> wire.AdapterPage:
        self.pages += 1
        self.filters = filters
        names, start = sorted(self.rows), int(cursor or 0)
        more = start + limit < len(names)
        return wire.AdapterPage(
            items=tuple(self.rows[name] for name in names[start : start + limit]),
            total=len(names),
            cursor=str(start + limit) if more else None,
            inbox_waits=() if cursor else self.inbox_waits,
            inbox_nested=() if cursor else self.inbox_nested,
        )

    def _slots(self) -> wire.SlotPage:
        held = [row for row in self.rows.values() if row.slot is not None]
        held.sort(key=lambda row: row.slot)
        return wire.SlotPage(items=tuple(held), slots_total=8, slots_used=len(held))

    def _detail(self, name: str) -> wire.AdapterDetail:
        self._check(name)
        plain = wire.AdapterDetail(adapter=self.rows[name], serving=None, candidate=None)
        return self.details.get(name, plain)

    def _results(self, verb: str, names: wire.Names) -> wire.Results:
        self.api.adapters._note(verb, names)
        return wire.Results(items=tuple(map(self._result, names.names)))

    def _result(self, name: str) -> wire.ItemResult:
        try:
            self._check(name)
        except LoradError as error:
            return wire.ItemResult(
                name=name,
                ok=False,
                code=error.code,
                message=error.message,
                hint=error.hint,
                details=error.details,
            )
        return wire.ItemResult(name=name, ok=True, state="idle", rev=self.rows[name].rev)

    async def _remove(self, name: str, *, keep_files: bool = False) -> wire.Removed:
        self._check(name)
        return await self._removed(name, keep_files=keep_files)

    async def _change(self, name: str, patch: wire.AdapterPatch) -> None:
        self._check(name)
        await self._patch(name, patch)

    def _check(self, name: str) -> None:
        if name in self.failures:
            raise self.failures[name]
        if name not in self.rows:
            raise LoradError("model_not_found", f"no adapter named {name!r}", hint="loractl ls")


@dataclass(frozen=True)
class Outcome:
    """What one command line came to."""

    exit: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("cli"))
    yield server
    server.close()


@pytest.fixture
def server(one_server: Server) -> Iterator[Server]:
    yield one_server
    one_server.reset()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Any]:
    """`make_server(folder)`: one that the test may end."""
    made = []

    def make(folder: Path | None = None, **options: Any) -> Server:
        made.append(Server(folder or tmp_path, **options))
        return made[-1]

    yield make
    for server in made:
        if server.api.loop.is_running():
            server.close()


@pytest.fixture
def loractl(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run a command line here, against `server`."""
    monkeypatch.setenv("LORAD_HOST", f"unix://{server.admin}")
    monkeypatch.delenv("LORAD_OUTPUT", raising=False)

    def run(*argv: str) -> Outcome:
        capsys.readouterr()
        status = invoke(list(argv))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Outcome(status, said.out, said.err)

    return run


@pytest.fixture
def process() -> Iterator[Any]:
    """Start a command line as a process of its own; ended with the test."""
    made = []

    def start(
        *argv: str, host: Any = None, env: dict[str, str] | None = None, **options: Any
    ) -> Any:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAD_")}
        if host is not None:
            clean["LORAD_HOST"] = f"unix://{host}"
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "lorad.cli.app", *argv]
        made.append(subprocess.Popen(command, env=clean if env is None else env, **pipes | options))
        return made[-1]

    yield start
    for one in made:
        if one.poll() is None:
            one.kill()
        one.communicate()


@pytest.fixture
def outcome(process: Any) -> Any:
    """The same, run to its end."""

    def run(*argv: str, **options: Any) -> Outcome:
        one = process(*argv, **options)
        out, err = one.communicate(timeout=PATIENCE)
        said = Outcome(one.returncode, (out or b"").decode(), (err or b"").decode())
        assert "Traceback" not in said.err, said.err
        assert "Exception ignored" not in said.err, said.err
        return said

    return run


@pytest.fixture
def make_row() -> Any:
    return adapter
