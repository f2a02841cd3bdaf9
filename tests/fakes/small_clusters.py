"""Small daemons with real gateways before them, over sockets."""

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from lorad import wire
from lorad.api.server import HttpServer, bind_unix
from lorad.fleet.catalog import open_catalog
from lorad.fleet.gateway import Gateway
from lorad.fleet.local import LocalMembers
from tests.fakes.small_daemons import SmallDaemon, rev_of


def files_of(number):
    return {"adapter_config.json": b"%d" % number, "adapter_model.safetensors": b"w" * 100}


class Front:
    """One gateway on a socket, with its own view of the members and the catalog."""

    def __init__(self, cluster, number, **options):
        self.path = cluster.folder / f"g{number}.sock"
        self.catalog = open_catalog(str(cluster.folder / "catalog"))
        self.members = LocalMembers([d.site for d in cluster.daemons.values()], self.catalog)
        folder = cluster.folder / f"g{number}"
        self.gateway = Gateway(self.members, self.catalog, folder, **options)
        transport = httpx.AsyncHTTPTransport(uds=str(self.path), verify=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://lorad", timeout=20)
        self.server = None

    async def start(self):
        while any(member.state != "ready" for member in self.members.seen()):
            await self.members.look()
        await self.gateway.start()
        app = self.gateway.admin_app()
        app.router.routes[:0] = self.gateway.inference_app().router.routes
        self.server = HttpServer(app, bind_unix(self.path, 0o600))
        await self.server.start()
        return self

    async def stop(self):
        await self.http.aclose()
        if self.server is not None:
            await self.server.stop(0.0)
        await self.gateway.stop()
        await self.members.close()

    # ------------------------------------------------------------- what tests ask of it
    async def ask(self, model, **more):
        """A completion: the whole response."""
        return await self.http.post("/v1/completions", json={"model": model, **more})

    async def rev(self, model):
        """The revision that answered."""
        answer = await self.ask(model)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-lorad-rev"]

    async def add(self, name, number, **start):
        """As `loractl add` does it: the response of the commit."""
        begin = msgspec.json.encode(wire.UploadStart(name=name, **start))
        opened = await self.http.post("/admin/v1/uploads", content=begin)
        assert opened.status_code == 201, opened.text
        path = f"/admin/v1/uploads/{opened.json()['upload_id']}"
        for file, data in files_of(number).items():
            put = await self.http.put(f"{path}/files/{file}", content=data)
            assert put.status_code == 200, put.text
        return await self.http.post(f"{path}/commit", json={})

    async def get(self, path, kind):
        answer = await self.http.get(f"/admin/v1/{path}")
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=kind)


class Cluster:
    """`daemons` by name, and `fronts`."""

    def __init__(self, folder):
        self.folder, self.daemons, self.fronts = folder, {}, []

    def rev(self, number):
        return rev_of(files_of(number))

    async def front(self, **options):
        front = Front(self, len(self.fronts), **options)
        self.fronts.append(front)
        return await front.start()


@asynccontextmanager
async def cluster(names, gateways=1, **options):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Cluster(Path(folder))
        for name in names:
            made.daemons[name] = await SmallDaemon(made.folder, name).start()
        try:
            async with asyncio.timeout(30):
                for _ in range(gateways):
                    await made.front(**options)
                yield made
        finally:
            for front in made.fronts:
                await front.stop()
            for daemon in made.daemons.values():
                await daemon.stop()


def run(scenario, names=("a", "b", "c"), gateways=1, **options):
    """`scenario(cluster, front)`, or with several gateways `scenario(cluster, *fronts)`."""

    async def inner():
        async with cluster(names, gateways, **options) as made:
            await scenario(made, *made.fronts)

    asyncio.run(inner())
