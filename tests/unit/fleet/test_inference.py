"""Requests through a gateway: bytes as they are, losses made good once, streams that break."""

import asyncio
import json
import re

import httpx
import pytest

from lorad import key_file
from lorad.api.app import OPEN
from lorad.api.tcp import TcpKeys
from lorad.errors import LoradError
from lorad.fleet import presence
from lorad.fleet.gateway import Gateway
from lorad.fleet.inference import events, model_of
from lorad.fleet.members import Lost
from lorad.wire_tenants import Tenant
from tests.fakes.small_clusters import run

LIMITS = {"rpm": 0, "tokens_per_minute": 0, "queue": 0, "max_priority": 100, "weight": 1.0}
WHO = {"name": "acme", "adapters": ("*",), "base": True, "uids": (), "keys": ()}
TENANT = Tenant(**WHO, **LIMITS, created_at="")


@pytest.fixture(autouse=True)
def quick_gateways(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.05)


def home_of(c):
    return max(c.daemons.values(), key=lambda daemon: len(daemon.asked))


def test_bytes_and_headers_go_both_ways_and_only_a_gateway_says_a_revision():
    async def scenario(c, front):
        await front.add("poet", 1)
        body = b'{"model": "poet",  "prompt": "\xc3\xa4", "stream": true}'
        headers = {
            "content-type": "application/json",
            "authorization": "Bearer sk-lorad-1",
            "x-request-id": "req-7",
            "x-lorad-rev": "0" * 64,
            "traceparent": "00-ab-cd-01",
        }
        answer = await front.http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200 and answer.content == b"data: a\n\ndata: b\n\n"
        assert answer.headers["x-request-id"] == "req-7"
        assert answer.headers.get_list("content-type") == ["text/event-stream; charset=utf-8"]
        got, sent = home_of(c).asked[-1]
        assert sent == body and got["x-lorad-rev"] == c.rev(1)
        for name in ("authorization", "x-request-id", "traceparent"):
            assert got[name] == headers[name]

    run(scenario)


def test_a_refusal_of_a_member_is_passed_on_with_its_retry_after():
    async def scenario(c, front):
        error = LoradError("queue_full", "too many wait", retry_after=3)
        for daemon in c.daemons.values():
            daemon.answer = error
        answer = await front.ask("tiny")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert answer.json()["error"]["code"] == "queue_full"
        assert sum(len(daemon.asked) for daemon in c.daemons.values()) == 1, "nobody else is asked"

    run(scenario)


def test_one_that_cannot_take_it_now_is_passed_by_once():
    async def scenario(c, front):
        error = LoradError("engine_restarting", "the engine died")
        first, *others = c.daemons.values()
        first.answer = error
        answers = [await front.ask("tiny") for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        for daemon in others:
            daemon.answer, daemon.asked = error, []
        first.asked = []
        answer = await front.ask("tiny")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert sum(len(daemon.asked) for daemon in c.daemons.values()) == 2

    run(scenario)


def test_a_loss_before_the_first_byte_is_made_good_once():
    async def scenario(c, front):
        first, *others = c.daemons.values()
        await first.stop()
        answers = [await front.ask("tiny") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        assert front.gateway.inference.moved == 1, "it is doubted from then on"
        for daemon in others:
            await daemon.stop()
        answer = await front.ask("tiny")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        for daemon in c.daemons.values():
            await daemon.start()

    run(scenario)


def test_a_member_that_takes_no_more_is_passed_by_after_a_loss_too():
    async def scenario(c, front):
        a, b, last = c.daemons.values()
        b.answer = LoradError("draining", "another member has room for it")
        await a.stop()
        answer = await front.ask("tiny")
        assert answer.status_code == 200 and len(last.asked) == len(b.asked) == 1
        assert front.gateway.inference.moved == 2
        last.answer = b.answer
        assert (await front.ask("tiny")).json()["error"]["code"] == "draining", "as nobody is left"
        await a.start()

    run(scenario)


def test_of_many_requests_none_that_had_not_begun_is_lost_with_its_member():
    async def scenario(c, front):
        for number in range(4):
            await front.add(f"a{number}", number)
        victim = max(c.daemons.values(), key=lambda daemon: len(daemon.serves))
        for daemon in c.daemons.values():
            daemon.hold = asyncio.Event()
        victim.silent = True  # what it gets from now on does not begin
        names = [f"a{n % 4}" for n in range(40)]
        asking = [asyncio.create_task(front.ask(name)) for name in names]
        while sum(m.replica.load for m in front.members.seen()) < 40:
            await asyncio.sleep(0.001)
        for daemon in c.daemons.values():
            daemon.hold.set()
        await victim.stop()
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.content for answer in answers} == {b"data: a\n\ndata: b\n\n"}
        assert front.gateway.inference.moved > 0
        victim.silent = False
        await victim.start()
        while any(member.state != "ready" for member in front.members.seen()):
            await front.members.look()
        assert {answer.status_code for answer in [await front.ask(n) for n in names]} == {200}

    run(scenario)


def test_a_client_that_leaves_before_anything_came_ends_its_request_too():
    async def scenario(c, front):
        for daemon in c.daemons.values():
            daemon.silent = True
        with pytest.raises(httpx.ReadTimeout):
            await front.http.post("/v1/completions", json={"model": "tiny"}, timeout=0.05)
        while any(m.replica.load for m in front.members.seen()):
            await asyncio.sleep(0.001)

    run(scenario)


def test_a_loss_in_mid_stream_ends_with_an_error_event():
    async def scenario(c, front):
        for daemon in c.daemons.values():
            daemon.hold = asyncio.Event()
        async with front.http.stream("POST", "/v1/completions", json={"model": "tiny"}) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: a\n\n"
            await home_of(c).stop()
            rest = b"".join([piece async for piece in pieces])
        name, _, data = rest.partition(b": ")
        error = json.loads(data)["error"]
        assert name == b"data" and error["code"] == "engine_restarting" and rest.endswith(b"\n\n")
        assert b"[DONE]" not in rest and front.gateway.inference.broken == 1
        await home_of(c).start()

    run(scenario)


def test_a_client_that_leaves_ends_its_request_at_the_member():
    async def scenario(c, front):
        for daemon in c.daemons.values():
            daemon.hold = asyncio.Event()
        async with front.http.stream("POST", "/v1/completions", json={"model": "tiny"}) as answer:
            assert await anext(answer.aiter_raw()) == b"data: a\n\n"
        while not home_of(c).gone:
            await asyncio.sleep(0.001)
        assert all(m.replica.load == 0 for m in front.members.seen())

    run(scenario)


def test_names_that_the_catalog_does_not_have_are_served_by_no_member():
    async def scenario(c, front):
        for daemon in c.daemons.values():
            daemon.serves["stray"] = "0" * 63 + "1"
        for name in ("stray", "poet@abababab", "stray@00000000", "hf:a/b"):
            answer = await front.ask(name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        for daemon in c.daemons.values():
            for headers, body in daemon.asked:
                assert json.loads(body)["model"] == "stray"
                assert headers["x-lorad-rev"] == "0" * 64, "of which nothing is"

    run(scenario)


def test_who_is_not_let_in_is_told_so_before_what_there_is():
    async def scenario(c, front):
        await front.add("poet", 1)
        for daemon in c.daemons.values():
            daemon.answer = LoradError("invalid_api_key", "an API key is needed here")
        for name in ("poet", "nobody", "tiny"):
            assert (await front.ask(name)).status_code == 401

    run(scenario)


def test_what_is_not_for_a_tenant_is_sent_to_a_member_once():
    async def scenario(c, front):
        await front.add("poet", 1)
        for daemon in c.daemons.values():
            daemon.answer = LoradError("model_not_found", "The model 'poet' does not exist")
            daemon.wishes = []
        for _ in range(5):
            assert (await front.ask("poet")).status_code == 404
        assert not any(daemon.wishes for daemon in c.daemons.values())

    run(scenario)


def test_a_body_without_a_model_is_a_members_to_refuse():
    assert model_of(b'{"model": "a", "x": {"model": "b"}}') == "a"
    for body in (b"", b"{", b'{"model": 5}', b"[]", b'"a"', b'{"x": 1}', b"[" * 100_000):
        assert model_of(body) == ""


def test_models_are_those_of_the_catalog_whether_a_member_has_them_or_not():
    async def scenario(c, front):
        await front.add("poet", 1)
        await front.add("clerk", 2)
        await front.gateway.look()
        cards = (await front.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [
            ("tiny", "base"),
            ("clerk", c.rev(2)),
            ("poet", c.rev(1)),
        ]
        for daemon in c.daemons.values():
            daemon.tenants = (TENANT,)
            daemon.serves.pop("clerk", None)
        await front.gateway.look()
        cards = (await front.http.get("/v1/models")).json()["data"]
        assert "clerk" not in {card["id"] for card in cards}, "a member tells whom it may be told"

    run(scenario)


def test_it_is_ready_as_long_as_one_member_is():
    async def scenario(c, front):
        first, *others = c.daemons.values()
        for daemon in others:
            daemon.state = "draining"
        await front.members.look()
        assert (await front.http.get("/readyz")).status_code == 200
        first.state = "loading_base"
        await front.members.look()
        answer = await front.http.get("/readyz")
        assert answer.status_code == 503
        assert "a: loading_base; b: draining" in answer.json()["error"]["message"]
        assert (await front.http.get("/livez")).status_code == 200

    run(scenario)


def test_a_stream_is_passed_on_in_whole_events():
    async def scenario(pieces, lost):
        async def parts():
            for piece in pieces:
                yield piece
            if lost:
                raise Lost("a", "gone", began=True)

        return [data async for data in events(parts())]

    pieces = [b"data: 1\n\nda", b"ta: 2\n", b"\n", b"data: 3"]
    assert asyncio.run(scenario(pieces, False)) == [b"data: 1\n\n", b"data: 2\n\n", b"data: 3"]
    *whole, last = asyncio.run(scenario(pieces, True))
    assert whole == [b"data: 1\n\n", b"data: 2\n\n"] and b"engine_restarting" in last


def test_over_tcp_keys_of_the_gateway_let_in_and_go_no_further(tmp_path):
    async def scenario(c, front):
        await front.add("poet", 1)
        keys = TcpKeys(inference=read_keys(tmp_path, "app"), admin=read_keys(tmp_path, "admin"))
        gateway = Gateway(front.members, front.catalog, c.folder / "g9", keys=keys)
        await gateway.start()
        transport = httpx.ASGITransport(gateway.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://gpu.example") as http:
            for path, good in (("/v1/models", "app"), ("/admin/v1/status", "admin")):
                for key, status in (("", 401), ("other", 401), (good, 200)):
                    headers = {"authorization": f"Bearer {key * 10}"} if key else {}
                    assert (await http.get(path, headers=headers)).status_code == status
            body = {"model": "poet"}
            headers = {"authorization": f"Bearer {'app' * 10}"}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert (await http.get("/readyz")).status_code == 200
        got = [headers for daemon in c.daemons.values() for headers, _ in daemon.asked]
        assert len(got) == 1 and "authorization" not in got[0]
        open_to_all = httpx.ASGITransport(
            Gateway(front.members, front.catalog, c.folder / "g8").app()
        )
        async with httpx.AsyncClient(transport=open_to_all, base_url="http://evil.example") as http:
            assert (await http.get("/v1/models")).status_code == 403
        await gateway.stop()

    run(scenario)


@pytest.mark.parametrize("root", ["/team", "/v1"])
def test_below_a_prefix_the_same_keys_are_asked_for_and_the_same_is_passed_on(tmp_path, root):
    """As Ray Serve has it with a `route_prefix`, which it leaves in the path."""

    async def scenario(c, front):
        await front.add("poet", 1)
        keys = TcpKeys(inference=read_keys(tmp_path, "app"), admin=read_keys(tmp_path, "admin"))
        gateway = Gateway(front.members, front.catalog, c.folder / "g9", keys=keys)
        await gateway.start()
        transport = httpx.ASGITransport(gateway.app(), root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://a{root}") as http:
            http.headers["authorization"] = f"Bearer {'app' * 10}"
            assert (await http.get("/admin/v1/status")).status_code == 401
            assert (await http.get("/metrics")).status_code == 401
            answer = await http.post("/v1/completions", json={"model": "poet"})
            assert answer.status_code == 200
            http.headers["authorization"] = "Bearer nobody"
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.get("/livez")).status_code == 200
        await gateway.stop()

    run(scenario)


def read_keys(folder, word):
    path = folder / word
    path.write_text(word * 10)
    path.chmod(0o600)
    return key_file.read(str(path), word)


def test_a_gateway_is_ready_once_it_knows_what_its_members_serve():
    async def scenario(c, front):
        known, front.gateway._bases = front.gateway._bases, frozenset()
        for answer in (await front.http.get("/readyz"), await front.ask("tiny")):
            assert answer.status_code == 503
            assert "does not know yet what its members serve" in answer.json()["error"]["message"]
        front.gateway._bases = known
        assert (await front.http.get("/readyz")).status_code == 200

    run(scenario, names=("a",))


def test_no_route_over_tcp_is_without_its_key(tmp_path):
    async def scenario(c, front):
        keys = TcpKeys(inference=read_keys(tmp_path, "app"), admin=read_keys(tmp_path, "admin"))
        app = Gateway(front.members, front.catalog, c.folder / "g9", keys=keys).app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            for route in app.router.routes:
                path = re.sub(r"\{.*?\}", "x", route.path)
                operators = path.startswith("/admin/") or path == "/metrics"
                for key in ("", "other", "app" if operators else "admin"):
                    headers = {"authorization": f"Bearer {key * 10}"} if key else {}
                    answer = await http.request(max(route.methods), path, headers=headers)
                    assert (answer.status_code == 401) != (path in OPEN), (path, key)

    run(scenario, names=("a",))


def test_a_name_that_moves_again_while_it_is_asked_for_is_looked_up_again():
    async def scenario(c, front):
        await front.add("poet", 1)
        inference = front.gateway.inference
        once, moves = inference._once, [2, 3, 4]

        async def moving(ask, entry, without):
            """It moves, and the member lets go of what it meant, before the request is there."""
            if moves:
                await front.add("poet", moves.pop(0), replace=True)
            return await once(ask, entry, without)

        inference._once = moving
        assert await front.rev("poet") == c.rev(4)

    run(scenario, names=("a",))
