"""Things on sockets that answer as a daemon would, as far as a gateway looks at them."""

import asyncio

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorad import wire
from lorad.api.server import HttpServer, bind_unix
from lorad.fleet.line import Site
from lorad.wire_status import ModelStatus, PoolPicture, Status


def status_of(name, *, state="ready", **more):
    """What `GET /admin/v1/status` says of a daemon with one model and hardly anything else."""
    pool = PoolPicture(total=64, free=32, block_bytes=1024)
    model = ModelStatus(name="tiny", base="tiny", state=state, pool=pool, slots_total=8)
    given = {
        "version": "0",
        "instance_id": f"instance-{name}",
        "pid": 1,
        "state": state,
        "reason": "",
        "uptime_seconds": 1.0,
        "base": "tiny",
        "model": "tiny",
        "device": "cpu",
        "device_name": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "inference_socket": "",
        "admin_socket": "",
        "inbox": None,
        "state_dir": "",
        "adapters": {},
        "slots_total": 8,
        "slots_used": 0,
        "pinned": 0,
        "running": 0,
        "waiting": 0,
        "ram_used_bytes": 0,
        "ram_limit_bytes": 0,
        "pool": pool,
        "generated_tokens": 0,
        "prompt_tokens": 0,
        "forward_passes": 0,
        "preemptions": 0,
        "models": (model,),
    }
    return Status(**given | more)


def row(name, rev, *, state="idle", **more):
    """A row of `loractl ls`."""
    given = {
        "tenant": None,
        "model": "tiny",
        "pinned": False,
        "priority": 50,
        "candidate_rev": None,
        "rank": 8,
        "num_bytes": 1024,
        "source": "upload",
        "labels": {},
        "reason": None,
        "reason_message": None,
        "created_at": "2026-01-01T00:00:00Z",
        "last_used_at": None,
    }
    return wire.Adapter(name=name, rev=rev, state=state, **given | more)


class SmallDaemon:
    """Both faces on one socket.  `words`: pieces that a completion streams; `hold` is an Event
    that it waits for after the first, `gone` counts clients that left."""

    def __init__(self, folder, name, *, words=(b"data: a\n\n", b"data: b\n\n")):
        self.name, self.path = name, folder / f"{name}.sock"
        self.words, self.rows, self.state = words, (), "ready"
        self.asked, self.gone = [], 0
        self.hold = None
        self.silent = False  # it takes connections, and says nothing more
        routes = [
            Route("/admin/v1/status", self._status),
            Route("/admin/v1/slots", self._slots),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        self.server = None

    @property
    def site(self):
        return Site(self.name, str(self.path), str(self.path))

    async def start(self):
        self.server = HttpServer(self.app, bind_unix(self.path, 0o600))
        await self.server.start()
        return self

    async def stop(self):
        await self.server.stop(0.0)
        self.path.unlink(missing_ok=True)

    async def _quiet(self):
        if self.silent:
            await asyncio.Event().wait()

    async def _status(self, request):
        await self._quiet()
        return _json(status_of(self.name, state=self.state))

    async def _slots(self, request):
        await self._quiet()
        page = wire.SlotPage(items=tuple(self.rows), slots_total=8, slots_used=len(self.rows))
        return _json(page)

    async def _complete(self, request):
        await self._quiet()
        body = await request.body()
        self.asked.append((request.headers, body))
        if body == b"whole":
            return JSONResponse({"by": self.name}, 429, headers={"retry-after": "3"})

        async def pieces():
            try:
                for index, word in enumerate(self.words):
                    if index and self.hold is not None:
                        await self.hold.wait()
                    yield word
            except asyncio.CancelledError:
                self.gone += 1
                raise

        return StreamingResponse(pieces(), media_type="text/event-stream")


def _json(value):
    return Response(msgspec.json.encode(value), media_type="application/json")
