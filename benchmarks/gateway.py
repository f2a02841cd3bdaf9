"""What a gateway costs: a request's latency and a streamed event's CPU time, beside none.

    python benchmarks/gateway.py [--requests 300] [--streams 16] [--events 500]

Stand-ins answer in the place of two daemons, each in a process of its own as the gateway is, so
that what is measured is the way there and back.  A line of JSON for each case.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lorad import wire
from lorad.api.server import HttpServer, bind_unix
from lorad.config import Settings
from lorad.fleet.line import Site
from lorad.fleet.listing import own_status
from lorad.fleet.serving import Wanted, run
from lorad.wire_status import Version
from lorad.wire_tenants import TenantPage

#: About as long as a token's event of /v1/chat/completions.
EVENT = (
    b"data: " + b'{"id":"chatcmpl-1","choices":[{"delta":{"content":"word"}}]}'.ljust(190) + b"\n\n"
)
MEMBERS = ("a", "b")


def member(path: str) -> None:
    """A stand-in on one socket."""
    status = msgspec.structs.replace(own_status("0", path, ("", "", ""), 0.0), state="ready")
    answers: dict[str, Any] = {
        "/admin/v1/status": status,
        "/admin/v1/slots": wire.SlotPage(items=(), slots_total=0, slots_used=0),
        "/admin/v1/adapters": wire.AdapterPage(items=(), total=0),
        "/admin/v1/events": wire.EventPage(items=(), instance_id=path),
        "/admin/v1/tenants": TenantPage(items=()),
        "/version": Version(version="0", model="tiny", models=("tiny",)),
    }

    async def say(request: Request) -> Response:
        return Response(msgspec.json.encode(answers[request.url.path]))

    async def complete(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body())
        if not asked["events"]:
            return Response(EVENT, media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            for _ in range(asked["events"]):
                yield EVENT
                await asyncio.sleep(0.005)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def serve() -> None:
        routes = [Route(way, say) for way in answers]
        routes.append(Route("/v1/completions", complete, methods=["POST"]))
        server = HttpServer(Starlette(routes=routes), bind_unix(Path(path), 0o600))
        await server.start()
        await asyncio.Event().wait()

    asyncio.run(serve())


def gateway(folder: str) -> None:
    sites = tuple(Site(name, f"{folder}/{name}.sock", f"{folder}/{name}.sock") for name in MEMBERS)
    place = Path(folder)
    run(Wanted(sites=sites, catalog=f"{folder}/catalog", folder=place), Settings())


async def measure(socket: str, process: psutil.Process | None, args: argparse.Namespace) -> None:
    transport = httpx.AsyncHTTPTransport(uds=socket, verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as http:

        async def ask(events: int) -> int:
            body, count = {"model": "tiny", "events": events}, 0
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for piece in answer.aiter_raw():
                    count += piece.count(b"\n\n")
            return count

        while True:
            try:
                await ask(0)
                break
            except (httpx.TransportError, AssertionError):
                await asyncio.sleep(0.1)
        before, took = _cpu(process), []
        for _ in range(args.requests):
            began = time.perf_counter()
            await ask(0)
            took.append(time.perf_counter() - began)
        row = {"case": "requests, one at a time", "through": "gateway" if process else "nothing"}
        told = {"median_ms": statistics.median(took) * 1e3}
        told["gateway_cpu_ms"] = (_cpu(process) - before) * 1e3 / args.requests
        print(json.dumps(row | {k: round(v, 3) for k, v in told.items()}))
        before, began = _cpu(process), time.perf_counter()
        counts = await asyncio.gather(*(ask(args.events) for _ in range(args.streams)))
        seconds = time.perf_counter() - began
        assert sum(counts) == args.events * args.streams
        row["case"] = f"{args.streams} streams of {args.events} events, 200 a second each at most"
        told = {"events_per_second": sum(counts) / seconds}
        told["gateway_cpu_us_per_event"] = (_cpu(process) - before) * 1e6 / sum(counts)
        print(json.dumps(row | {k: round(v, 1) for k, v in told.items()}))


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--events", type=int, default=500)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        started = [spawn.Process(target=member, args=(f"{folder}/{n}.sock",)) for n in MEMBERS]
        front = spawn.Process(target=gateway, args=(folder,))
        for process in (*started, front):
            process.start()
        try:
            asyncio.run(measure(f"{folder}/a.sock", None, args))
            path = f"{folder}/inference.sock"
            asyncio.run(measure(path, psutil.Process(front.pid), args))
        finally:
            for process in (front, *started):
                process.terminate()
                process.join(10)


if __name__ == "__main__":
    main()
