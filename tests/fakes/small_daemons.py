"""Things on sockets that answer as a daemon would, as far as a gateway looks at them."""

import asyncio
import hashlib

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorad import wire
from lorad.api.respond import failure
from lorad.api.server import HttpServer, bind_unix
from lorad.errors import LoradError
from lorad.fleet.line import Site
from lorad.wire_openai import ModelCard, ModelFacts, ModelList
from lorad.wire_operate import Drained, Held, HoldAsk, Shed
from lorad.wire_status import ModelStatus, PoolPicture, Status, Version
from lorad.wire_stream import Board, Load, Slot
from lorad.wire_tenants import TenantPage

FILES = ("adapter_config.json", "adapter_model.safetensors")


def status_of(name, *, state="ready", fingerprint="", **more):
    """What `GET /admin/v1/status` says of a daemon with one model and hardly anything else."""
    pool = PoolPicture(total=64, free=32, block_bytes=1024)
    model = ModelStatus(
        name="tiny", base="tiny", fingerprint=fingerprint, state=state, pool=pool, slots_total=8
    )
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
    that it waits for after the first, `gone` counts clients that left.  `serves`: name -> revision,
    `held` those that may be asked for beside them; `refuses`: name -> LoradError of a
    commit, `answer` one of every completion."""

    def __init__(self, folder, name, *, words=(b"data: a\n\n", b"data: b\n\n")):
        self.name, self.path = name, folder / f"{name}.sock"
        self.words, self.rows, self.state = words, (), "ready"
        self.asked, self.gone = [], 0
        self.hold = None
        self.silent = False  # it takes connections, and says nothing more
        self.queued = None  # a list: completions wait in it, each as a future of why it is refused
        routes = [
            Route("/admin/v1/status", self._status),
            Route("/admin/v1/slots", self._slots),
            Route("/admin/v1/adapters", self._adapters),
            Route(
                "/admin/v1/adapters/{name:path}", self._adapter, methods=["GET", "PATCH", "DELETE"]
            ),
            Route("/admin/v1/events", self._events),
            Route("/admin/v1/board", self._board),
            Route("/admin/v1/tenants", self._tenants),
            Route("/admin/v1/{wish}", self._wish, methods=["POST"]),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._model),
            Route("/metrics", self._metrics),
            Route("/admin/v1/hold", self._hold, methods=["POST"]),
            Route("/admin/v1/uploads", self._open, methods=["POST"]),
            Route("/admin/v1/uploads/{id}/files/{file}", self._put, methods=["PUT"]),
            Route("/admin/v1/uploads/{id}/commit", self._commit, methods=["POST"]),
            Route("/admin/v1/uploads/{id}", self._drop, methods=["DELETE"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        # a wish is looked for last, as routes are tried in their order
        routes.sort(key=lambda route: "{wish}" in route.path)
        self.tenants, self.events, self.answer = (), (), None
        self.serves, self.held, self.refuses = {}, {}, {}
        self.uploads, self.wishes, self.instance = {}, [], f"instance-{name}"
        self.fingerprint = ""  # of its base
        self.secrets = ()  # names that nobody is told of
        self.on_commit = None  # awaited with the upload's start; may raise LoradError
        self.dawdle = None  # awaited before it acts on a request, and again before it answers
        self.routes = Starlette(routes=routes)
        self.server = None

    @property
    def site(self):
        return Site(self.name, str(self.path), str(self.path))

    async def start(self):
        self.server = HttpServer(self._app, bind_unix(self.path, 0o600))
        await self.server.start()
        return self

    async def _app(self, scope, receive, send):
        if self.dawdle is None or scope["type"] != "http":
            return await self.routes(scope, receive, send)

        async def late(message):
            if message["type"] == "http.response.start":
                await self.dawdle()
            await send(message)

        await self.dawdle()
        await self.routes(scope, receive, late)

    async def stop(self):
        await self.server.stop(0.0)
        self.path.unlink(missing_ok=True)

    async def _quiet(self):
        if self.silent:
            await asyncio.Event().wait()

    async def _status(self, request):
        await self._quiet()
        given = {"state": self.state, "fingerprint": self.fingerprint}
        given["waiting"] = len(self.queued or ())
        return _json(status_of(self.name, instance_id=self.instance, **given))

    async def _slots(self, request):
        await self._quiet()
        page = wire.SlotPage(items=tuple(self.rows), slots_total=8, slots_used=len(self.rows))
        return _json(page)

    async def _complete(self, request):
        await self._quiet()
        body = await request.body()
        self.asked.append((request.headers, body))
        if self.answer is not None:
            return failure(self.answer)
        rev = request.headers.get("x-lorad-rev")
        if rev is not None:
            name = msgspec.json.decode(body)["model"]
            if rev not in (self.serves.get(name), *self.held.get(name, ())):
                return failure(LoradError("model_not_found", f"no {name} of {rev[:8]}"))
        if self.queued is not None:
            self.queued.append(turn := asyncio.get_running_loop().create_future())
            turn.moves = "x-lorad-moves" in request.headers
            if (error := await turn) is not None:
                return failure(error)
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

        headers = {"x-lorad-rev": rev or "base"}
        return StreamingResponse(pieces(), headers=headers, media_type="text/event-stream")

    # ------------------------------------------------------------- adapters
    async def _adapters(self, request):
        items = tuple(row(name, rev, source="catalog") for name, rev in self.serves.items())
        return _json(wire.AdapterPage(items=items, total=len(items)))

    async def _adapter(self, request):
        name = request.path_params["name"]
        if name not in self.serves:
            return failure(LoradError("model_not_found", f"no {name}"))
        if request.method == "GET":
            return _json(self._detail(name))
        if request.method == "PATCH":
            if (error := self.refuses.get("patch")) is not None:
                return failure(error)
            patch = msgspec.json.decode(await request.body(), type=wire.AdapterPatch)
            self.wishes.append(("patch", name, patch))
            return _json(self._detail(name))
        self.wishes.append(("remove", name))
        self.held.pop(name, None)
        return _json(wire.Removed(name=name, rev=self.serves.pop(name)))

    def _detail(self, name):
        known = next((one for one in self.rows if one.name == name), None)
        shown = known or row(name, self.serves[name], state="registered", source="catalog")
        return wire.AdapterDetail(adapter=shown, serving=None, candidate=None)

    async def _events(self, request):
        since = int(request.query_params.get("since", 0))
        items = tuple(item for item in self.events if item.id > since)
        return _json(wire.EventPage(items=items, instance_id=self.instance))

    async def _board(self, request):
        await self._quiet()
        slots = {
            one.name: Slot(
                name=one.name,
                rev=one.rev,
                slot=0,
                state=one.state,
                pinned=False,
                priority=50,
                rank=8,
                gpu_bytes=1024,
                running=one.running,
            )
            for one in self.rows
        }
        status = status_of(self.name, state=self.state, instance_id=self.instance)
        board = Board(sequence=1, time="2026-01-01T00:00:00Z", interval_seconds=0, status=status)
        return _json(replace(board, slots=slots, load=Load(tokens_per_second=2.0)))

    async def _tenants(self, request):
        return _json(TenantPage(items=self.tenants))

    async def _version(self, request):
        return _json(Version(version="0", model="tiny", base="tiny", models=("tiny",)))

    async def _models(self, request):
        facts = ModelFacts(state="active")
        given = {"created": 1, "max_model_len": 64, "lorad": facts}
        base = ModelCard(id="tiny", root="base", parent=None, **given)
        cards = [ModelCard(id=n, root=r, parent="tiny", **given) for n, r in self.serves.items()]
        return _json(ModelList(data=[base, *cards]))

    async def _model(self, request):
        name, rev = request.path_params["id"], request.headers.get("x-lorad-rev")
        if name in self.secrets or (rev is not None and rev != self.serves.get(name)):
            return failure(LoradError("model_not_found", f"no {name}"))
        return JSONResponse({"id": name, "root": rev})

    async def _metrics(self, request):
        text = (
            f'# TYPE lorad_ready gauge\nlorad_ready 1.0\n# TYPE x counter\nx{{a="{self.name}"}} 2\n'
        )
        return Response(text, media_type="text/plain")

    async def _wish(self, request):
        word, raw = request.path_params["wish"], await request.body()
        self.wishes.append((word, msgspec.json.decode(raw)))
        if word == "shed":
            return _json(Shed(requests=self._shed(self.wishes[-1][1]["load"])))
        if word in ("drain", "resume"):
            return _json(Drained(name=None, draining=word == "drain", running=1))
        names = msgspec.json.decode(raw, type=wire.Names)
        if word == "verify":
            return _json(wire.Verifications(items=tuple(map(self._verified, names.names))))
        items = tuple(
            wire.ItemResult(name=n, ok=True, state="idle", rev=self.serves[n])
            if n in self.serves
            else wire.ItemResult(name=n, ok=False, code="model_not_found", message=f"no {n}")
            for n in names.names
        )
        return _json(wire.Results(items=items))

    def _shed(self, load):
        newest = [turn for turn in self.queued[load:] if turn.moves]
        self.queued = [turn for turn in self.queued if turn not in newest]
        for turn in newest:
            turn.set_result(LoradError("draining", "another member has room for it"))
        return len(newest)

    def _verified(self, name):
        if name not in self.serves:
            code = "model_not_found"
            return wire.Verification(name=name, ok=False, code=code, message="no")
        if (bad := self.refuses.get("verify")) is not None:
            return wire.Verification(name=name, ok=False, code=bad.code, message=bad.message)
        return wire.Verification(name=name, ok=True, rev=self.serves[name])

    async def _hold(self, request):
        ask = msgspec.json.decode(await request.body(), type=HoldAsk)
        if ask.seconds <= 0:
            self.held.pop(ask.name, None)
        elif ask.name in self.serves:
            self.held.setdefault(ask.name, set()).add(self.serves[ask.name])
        return _json(Held(name=ask.name, revs=tuple(self.held.get(ask.name, ()))))

    async def _open(self, request):
        start = msgspec.json.decode(await request.body(), type=wire.UploadStart)
        id = f"u{len(self.wishes)}-{len(self.uploads)}"
        self.uploads[id] = (start, {})
        return _json(wire.UploadOpen(upload_id=id, max_bytes=1 << 20, files=FILES))

    async def _put(self, request):
        files = self.uploads[request.path_params["id"]][1]
        files[request.path_params["file"]] = await request.body()
        return JSONResponse({})

    async def _commit(self, request):
        start, files = self.uploads.pop(request.path_params["id"])
        try:
            if self.on_commit is not None:
                await self.on_commit(start)
        except LoradError as error:
            return failure(error)
        if (error := self.refuses.get(start.name)) is not None:
            return failure(error)
        rev = rev_of(files)
        old = self.serves.get(start.name)
        self.wishes.append(("vet" if start.dry_run else "take", start.name, rev))
        if not start.dry_run:
            self.serves[start.name] = rev
        added = wire.Added(name=start.name, rev=rev, state="idle", replaced_rev=old)
        return _json(replace(added, num_bytes=4096, load_seconds=0.5) if start.load else added)

    async def _drop(self, request):
        self.uploads.pop(request.path_params["id"], None)
        return Response(status_code=204)


def rev_of(files):
    """What a small daemon makes of such files."""
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def _json(value):
    return Response(msgspec.json.encode(value), media_type="application/json")
