"""Traffic for a demo daemon, so that every panel of `loractl top` moves.

    lorad demo --keep                      # prints the two commands that follow
    export LORAD_HOST=unix:///.../admin.sock
    python demo/traffic.py --minutes 10

It adds four tenants and adapters of theirs, variants of the folders of `demo/adapters`, more than
fit beside a busy KV cache.  Then clients ask, with a system prompt of each tenant's own, and the
favourites change all the time; some hang up.  An operator loads, evicts, pins, drains, replaces,
reloads, and now and then adds a broken folder.  At the end, or with Ctrl+C, what was added is
removed again.  Answers are thrown away.  Not for a daemon that serves anybody.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from lorad import client_tenants
from lorad.client import ApiError, LoradClient, Unreachable
from lorad.wire import AdapterPatch, UploadStart
from lorad.wire_operate import DrainAsk
from lorad.wire_tenants import TenantStart

#: Weight and limits of each, so that one of them is refused now and then.
TENANTS = {
    "acme": {"weight": 2.0, "queue": 32},
    "globex": {"rpm": 600},
    "initech": {"rpm": 40, "max_priority": 60},
    "umbrella": {"tokens_per_minute": 4000},
}
WORK = ("sql-gen", "support", "router", "triage", "legal", "summarise", "faq", "tagger")
QUESTIONS = ("What is a hacker?", "Explain a lock.", "Who made the world?", "Why is it broken?")
#: How an operator spends the time.
ACTS = ("load", "evict", "pin", "unpin", "priority", "drain", "replace", "reload", "broken")
FAVOUR_SECONDS = 20.0
#: The folder that is refused.
BROKEN = "broken"


@dataclass
class Fleet:
    """What is asked for, and how often each is meant."""

    names: list[str]
    chance: random.Random
    keys: dict[str, str] = field(default_factory=dict)  # of tenants
    counts: Counter[str] = field(default_factory=Counter)

    def pick(self) -> str:
        """A few are asked for most of the time, and others every twenty seconds."""
        turn = int(time.monotonic() / FAVOUR_SECONDS) * 3
        place = min(int(self.chance.paretovariate(0.9)) - 1, len(self.names) - 1)
        return self.names[(turn + place) % len(self.names)]


# ----------------------------------------------------------------- what is served
def variant(source: Path, out: Path, strength: float, *, broken: bool = False) -> Path:
    """`source` at another strength: content of its own, so a revision of its own."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    (out / "lorad.toml").unlink(missing_ok=True)  # it pins
    file = out / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["lora_alpha"] = config["lora_alpha"] * strength
    file.write_text(json.dumps(config), encoding="utf-8")
    if broken:
        weights = out / "adapter_model.safetensors"
        with weights.open("r+b") as opened:
            opened.truncate(weights.stat().st_size // 3)
    return out


def populate(admin: LoradClient, sources: list[Path], scratch: Path, number: int) -> list[str]:
    """Register so many; those that are there already stay."""
    names = []
    there = {adapter.name for adapter in admin.every_adapter()}
    for place in range(number):
        tenant = list(TENANTS)[place % len(TENANTS)]
        turn, work = divmod(place // len(TENANTS), len(WORK))
        name = f"{tenant}/{WORK[work]}" + (f"-{turn + 1}" if turn else "")
        names.append(name)
        if name not in there:
            folder = variant(sources[place % len(sources)], scratch / "new", 0.5 + place / 100)
            admin.upload(folder, UploadStart(name=name, priority=20 + place % 7 * 10))
            print(f"added {name}", flush=True)
    return names


def invite(admin: LoradClient) -> dict[str, str]:
    """Keys of the tenants; one that is there already keeps its key, and is not asked as."""
    keys = {}
    for name, limits in TENANTS.items():
        with suppress(ApiError):
            keys[name] = client_tenants.add(admin, TenantStart(name=name, **limits)).key
    return keys


# ----------------------------------------------------------------- who asks
async def ask(http: httpx.AsyncClient, fleet: Fleet, seed: int) -> None:
    """One client: asks, reads, thinks, again."""
    chance = random.Random(seed)
    while True:
        name = fleet.pick()
        tenant = name.partition("/")[0]
        system = f"You work for {tenant}. " + f"Rules of {tenant}: be brief, be kind. " * 12
        body = {
            "model": name,
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": chance.choice(QUESTIONS)},
            ],
            "max_tokens": chance.choice((8, 24, 64, 160)),
            "stream": True,
            "priority": chance.choice((30, 50, 70)),
            "ignore_eos": chance.random() < 0.3,
        }
        try:
            fleet.counts[await one(http, body, fleet.keys.get(tenant, ""), chance)] += 1
        except httpx.HTTPError:
            fleet.counts["no answer"] += 1
            await asyncio.sleep(1)
        await asyncio.sleep(chance.expovariate(1 / 0.3))


async def one(http: httpx.AsyncClient, body: dict, key: str, chance: random.Random) -> str:
    """How it went.  One in ten hangs up in the midst."""
    impatient = chance.random() < 0.1
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return f"refused {answer.status_code}"
        async for line in answer.aiter_lines():
            if impatient and line and chance.random() < 0.1:
                return "hung up"
    return "answered"


# ----------------------------------------------------------------- who operates
def act(what: str, admin: LoradClient, fleet: Fleet, sources: list[Path], scratch: Path) -> None:
    """One deed of an operator."""
    chance = fleet.chance
    name = chance.choice(fleet.names)
    match what:
        case "load":
            admin.load(name, wait=False)
        case "evict":
            admin.evict(name, wait=False)
        case "pin":
            admin.pin(name, wait=False)
        case "unpin":
            admin.unpin(name, wait=False)
        case "priority":
            admin.patch(name, AdapterPatch(priority=chance.randrange(0, 101, 10)))
        case "drain":
            admin.drain(DrainAsk(name=name, wait=False))
            time.sleep(4)
            admin.resume(name)
        case "replace":
            folder = variant(chance.choice(sources), scratch / "new", chance.uniform(0.3, 2.0))
            admin.upload(folder, UploadStart(name=name, replace=True))
        case "reload":
            admin.reload()
        case "broken":
            drop_broken(admin, sources[0], scratch)


def drop_broken(admin: LoradClient, source: Path, scratch: Path) -> None:
    """Into the inbox: an upload would be refused at once, and nobody else would see it."""
    inbox = admin.status().inbox
    if inbox is not None:
        folder = variant(source, scratch / BROKEN, random.random(), broken=True)
        shutil.rmtree(Path(inbox) / BROKEN, ignore_errors=True)
        shutil.move(folder, inbox)


async def operate(admin: LoradClient, fleet: Fleet, sources: list[Path], scratch: Path) -> None:
    """Something every few seconds."""
    while True:
        await asyncio.sleep(fleet.chance.uniform(1.5, 5.0))
        what = fleet.chance.choice(ACTS)
        try:
            await asyncio.to_thread(act, what, admin, fleet, sources, scratch)
            fleet.counts[what] += 1
        except (ApiError, Unreachable):  # pinned, too little room, away: as it happens to people
            fleet.counts[f"{what}, refused"] += 1


async def drive(options: argparse.Namespace, inference: str, admin: LoradClient, fleet: Fleet,
                scratch: Path) -> None:  # fmt: skip
    """Everybody at once, until the time is up."""
    transport = httpx.AsyncHTTPTransport(uds=inference)
    timeout = httpx.Timeout(120)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://lorad", timeout=timeout
    ) as h:
        tasks = [asyncio.create_task(ask(h, fleet, seed)) for seed in range(options.clients)]
        sources = folders(options.source)
        tasks.append(asyncio.create_task(operate(admin, fleet, sources, scratch)))
        try:
            done, _ = await asyncio.wait(tasks, timeout=options.minutes * 60)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def folders(source: Path) -> list[Path]:
    return sorted(file.parent for file in source.glob("*/adapter_config.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default=os.environ.get("LORAD_HOST"), help="the admin socket")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time")
    parser.add_argument("--adapters", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", type=Path, default=Path(__file__).parent / "adapters")
    parser.add_argument("--leave", action="store_true", help="what was added")
    options = parser.parse_args()
    if not options.host:
        parser.error("which daemon?  --host unix:///path/admin.sock, or LORAD_HOST")
    fleet = Fleet([], random.Random(options.seed))
    with LoradClient(options.host) as admin, tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        inference = admin.status().inference_socket
        try:
            fleet.names = populate(admin, folders(options.source), scratch, options.adapters)
            fleet.keys = invite(admin)
            print(f"asking for {options.minutes:g} minutes; Ctrl+C ends it", flush=True)
            asyncio.run(drive(options, inference, admin, fleet, scratch))
        except KeyboardInterrupt:
            print()
        finally:
            print("  ".join(f"{what} {n}" for what, n in fleet.counts.most_common()), flush=True)
            if not options.leave:
                tidy(admin, fleet)
    return 0


def tidy(admin: LoradClient, fleet: Fleet) -> None:
    """Remove what was added."""
    inbox = admin.status().inbox
    if inbox is not None:
        shutil.rmtree(Path(inbox) / BROKEN, ignore_errors=True)
    for name in (*fleet.names, BROKEN):
        with suppress(ApiError):
            admin.unpin(name)
            admin.remove(name)
    for name in fleet.keys:
        with suppress(ApiError):
            client_tenants.remove(admin, name)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ApiError, Unreachable) as error:
        sys.exit(f"error: {error}")
