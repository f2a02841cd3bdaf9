"""A process that forks registries to be killed: run as a script, it is told what to fork on stdin.

Each line in: {"dir", "seed", "failpoint", "nth", "ops", "task"}.  Lines out: "pid N", "working"
once a registry is open, "dead STATUS".
The forked child opens the registry and works until it is killed, or has done `ops` operations.
It writes what it is about to do, and then that it was acknowledged, to `DIR/journal`: the file
outlives the process.  The parent of the tests imports `apply` to know what should be there.
"""

import hashlib
import json
import os
import random
import resource
import signal
import sys
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.messages import PackedModule
from lorad.errors import LoradError
from lorad.registry import failpoints, migrate, recover
from lorad.registry.records import KeyRecord, RevisionRecord, TenantRecord
from lorad.registry.registry import Registry

NAMES = [f"{tenant}n{i}" for tenant in ("", "acme/") for i in range(4)]
TENANTS = ["one", "two", "three"]
IN_FLIGHT = 4

Op = dict[str, Any]


# ----------------------------------------------------------------- what should be
@dataclass
class Name:
    state: str
    serving: str | None = None
    candidate: str | None = None
    pinned: bool = False
    priority: int = 50
    labels: dict[str, str] = field(default_factory=dict)
    reason: str | None = None


@dataclass
class Model:
    """The registry in its simplest form.  Every operation that works is one transaction."""

    names: dict[str, Name] = field(default_factory=dict)
    changes: int = 0
    tenants: dict[str, str] = field(default_factory=dict)  # -> the id of its key

    def copy(self) -> "Model":
        names = {k: Name(**(vars(v) | {"labels": dict(v.labels)})) for k, v in self.names.items()}
        return Model(names, self.changes, dict(self.tenants))


def apply(before: Model, op: Op) -> Model:
    """The model after `op`, written apart from the registry's own code."""
    after = before.copy()
    kind, key = op["op"], op["name"]
    name = after.names.get(key)
    if kind.startswith("tenant"):
        if (key in after.tenants) == (kind == "tenant_add"):
            return before
        after.tenants[key] = op["key"]
        if kind == "tenant_remove":
            del after.tenants[key]
    elif kind == "register":
        if name is None:
            name = after.names[key] = Name("registered")
        candidate = op["candidate"] and name.serving != op["rev"]
        name.candidate = op["rev"] if candidate else None
        if not candidate:
            name.serving = op["rev"]
        if not (candidate and name.state == "missing"):
            name.state = "registered"
        name.reason = None
        name.pinned = name.pinned if op["pin"] is None else op["pin"]
        name.priority = name.priority if op["priority"] is None else op["priority"]
        name.labels = {"seed": str(op["priority"])}
    elif kind == "quarantine" and name is None:
        after.names[key] = Name("quarantined", reason="E_TEST")
    elif kind == "collect":
        pass
    elif name is None:
        return before
    elif kind in ("quarantine", "fail_candidate"):
        name.candidate, name.reason = None, "E_TEST"
        if name.serving is None:
            name.state = "quarantined"
    elif kind == "promote":
        if op["rev"] not in (name.candidate, name.serving):
            return before
        if name.candidate is not None:
            name.state, name.reason = "registered", None
        name.serving, name.candidate = op["rev"], None
    elif kind == "pin":
        name.pinned = op["pin"]
    elif kind == "remove":
        del after.names[key]
    elif kind == "missing" and name.state == "registered":
        name.state = "missing"
    after.changes += 1
    return after


# ----------------------------------------------------------------- what is done
def content(number: int) -> bytes:
    return f"weights {number} ".encode() * 40


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def revision(rev: str) -> RevisionRecord:
    return RevisionRecord(
        rev=rev,
        rank=8,
        ranks={"q_proj": 8},
        alpha=16.0,
        rslora=False,
        targets=("q_proj",),
        num_layers=1,
        dtype="float32",
        file_bytes=400,
        changes_kv=True,
        modules=(PackedModule(0, "q_proj", 8, 2.0),),
    )


def draw(rng: random.Random, model: Model) -> Op:
    """Something to do; `model` only steers promotions to what exists."""
    name = rng.choice(NAMES)
    kind = rng.choices(
        [
            "register",
            "promote",
            "pin",
            "quarantine",
            "fail_candidate",
            "remove",
            "missing",
            "tenant",
        ],
        [8, 5, 3, 1, 1, 2, 1, 4],
    )[0]
    if kind == "tenant":
        act = rng.choice(("add", "add", "rotate", "remove"))
        key = f"{rng.getrandbits(60):015x}"
        return {"op": f"tenant_{act}", "name": rng.choice(TENANTS), "key": key}
    op: Op = {"op": kind, "name": name}
    if kind == "register":
        op["content"] = rng.randrange(40)
        op["rev"] = digest(content(op["content"]))
        op["candidate"] = rng.random() < 0.6
        op["pin"] = rng.choice([None, True, False])
        op["priority"] = rng.choice([None, 10, 90])
    elif kind == "promote":
        known = model.names.get(name)
        op["rev"] = (known.candidate if known and known.candidate else None) or "0" * 64
    elif kind == "pin":
        op["pin"] = rng.random() < 0.5
    return op


def submit(registry: Registry, op: Op) -> "Future[Any]":
    kind, name = op["op"], op["name"]
    if kind == "register":
        staging = registry.store.stage()
        for part in ("adapter_config.json", "adapter_model.safetensors"):
            (staging.path / part).write_bytes(content(op["content"]))
        registry.store.commit(staging, op["rev"])
        return registry.register(
            name,
            tenant=name.partition("/")[0] if "/" in name else None,
            model="base",
            source="inbox",
            labels={"seed": str(op["priority"])},
            pin=op["pin"],
            priority=op["priority"],
            revision=revision(op["rev"]),
            as_candidate=op["candidate"],
        )
    if kind.startswith("tenant"):
        key = KeyRecord(id=op["key"], digest=digest(op["key"].encode()))
        if kind == "tenant_add":
            return registry.tenants.add(TenantRecord(name=name, adapters=(f"{name}/*",)), key)
        if kind == "tenant_rotate":
            return registry.tenants.set_key(name, key)
        return registry.tenants.remove(name)
    if kind == "promote":
        return registry.promote(name, op["rev"])
    if kind == "pin":
        return registry.set_pin(name, op["pin"])
    if kind == "quarantine":
        return registry.quarantine(name, "inbox", "E_TEST", "refused")
    if kind == "fail_candidate":
        return registry.fail_candidate(name, "E_TEST", "refused")
    if kind == "missing":
        return registry.mark_missing(name)
    return registry.remove(name)


def work(order: dict[str, Any]) -> None:
    """Open, do `ops` operations with several in flight, close."""
    rng = random.Random(order["seed"])
    journal = os.open(Path(order["dir"]) / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    registry = Registry.open(Path(order["dir"]) / "state")
    os.write(1, b"working\n")
    model = Model()
    done = 0
    while done < order["ops"]:
        flight: list[Future[Any]] = []
        for _ in range(rng.randint(1, IN_FLIGHT)):
            op = draw(rng, model)
            # one write call, so that a kill leaves the whole line or nothing
            os.write(journal, b"> " + json.dumps(op).encode() + b"\n")
            flight.append(submit(registry, op))
            model = apply(model, op)
        for future in flight:
            if not isinstance(future.exception(), LoradError | None):
                raise future.exception()  # type: ignore[misc]
            os.write(journal, b"<\n")
            done += 1
    registry.close()


def work_and_collect(order: dict[str, Any]) -> None:
    """Work a little, then remove everything and collect it, until the place is passed."""
    work(order | {"ops": 20})
    registry = Registry.open(Path(order["dir"]) / "state")
    journal = os.open(Path(order["dir"]) / "journal", os.O_WRONLY | os.O_APPEND)
    for name in NAMES:
        os.write(journal, b"> " + json.dumps({"op": "remove", "name": name}).encode() + b"\n")
        assert isinstance(registry.remove(name).exception(), LoradError | None)
        os.write(journal, b"<\n")
    os.write(journal, b'> {"op": "collect", "name": ""}\n')
    registry.collect().result()


# ----------------------------------------------------------------- other tasks
def fill_and_die(order: dict[str, Any]) -> None:
    """Register every name, wait until all is acknowledged, be killed."""
    registry = Registry.open(Path(order["dir"]) / "state")
    for number, name in enumerate(NAMES):
        op = {"op": "register", "name": name, "content": number, "candidate": False}
        rev = digest(content(number))
        submit(registry, op | {"rev": rev, "pin": None, "priority": number}).result()
    os.kill(os.getpid(), signal.SIGKILL)


def open_here(order: dict[str, Any]) -> None:
    Registry.open(Path(order["dir"])).close()


def upgrade_here(order: dict[str, Any]) -> None:
    """Open with one migration more than there is."""
    usual = migrate.upgrade
    recover.SCHEMA_VERSION = migrate.SCHEMA_VERSION = target = migrate.SCHEMA_VERSION + 1
    scripts = Path(order["scripts"])
    migrate.upgrade = lambda path, version: usual(path, version, scripts=scripts, target=target)
    Registry.open(Path(order["dir"])).close()


def outgrow_a_file_limit(order: dict[str, Any]) -> None:
    """No file may pass 1 MiB: a change that would is refused as a full disk, later ones work."""
    registry = Registry.open(Path(order["dir"]))
    registry.quarantine("n0", "inbox", "E_TEST", "refused").result()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    error = registry.set_labels("n0", {"long": "x" * (4 << 20)}).exception()
    assert isinstance(error, LoradError) and error.code == "insufficient_storage", error
    assert registry.set_priority("n0", 3).result() is True
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert registry.set_labels("n0", {"long": "x" * (4 << 20)}).result() is True
    registry.close()


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(order)
        print(f"pid {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        print(f"dead {status}", flush=True)


def _child(order: dict[str, Any]) -> None:
    left = order["nth"]

    def at(name: str) -> None:
        nonlocal left
        if name == order["failpoint"]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    failpoints.set_hook(at if order["failpoint"] else None)
    try:
        globals()[order.get("task", "work")](order)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
