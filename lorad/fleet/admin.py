"""What operators ask of a gateway, on all members: handlers where the daemon's own will not do.

Goes in: requests of operators.  Comes out: the same Structs as a daemon's.  Which of these answers
what is in `admin_routes.py`.
"""

from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad.api import asked
from lorad.api.respond import json
from lorad.errors import LoradError
from lorad.fleet import exposition
from lorad.fleet.asking import V1, alive, call, each, given
from lorad.fleet.catalog import Catalog
from lorad.fleet.going import ANSWER_SECONDS, Going
from lorad.fleet.inference import Inference
from lorad.fleet.listing import Listing
from lorad.fleet.members import Ask, Lost, Member, Members
from lorad.fleet.pulls import MAX_WAIT_SECONDS, Pulls
from lorad.fleet.taking import read
from lorad.fleet.wishes import Wishes
from lorad.wire_operate import DrainAsk, Drained, RollbackAsk
from lorad.wire_operations import PullStart


@dataclass(frozen=True, slots=True)
class Desk:
    """What the routes below need, beside what the daemon's own handlers find in `Deps`."""

    members: Members
    catalog: Catalog
    listing: Listing
    wishes: Wishes
    pulls: Pulls
    inference: Inference
    going: Going


def desk_of(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


async def adapter(request: Request) -> Response:
    """GET shows one adapter, PATCH changes it (and shows it), DELETE takes its name away."""
    desk, name = desk_of(request), request.path_params["name"]
    if request.method == "DELETE":
        keep = asked.flag(request, "keep_files")
        order = desk.wishes.remove(name, keep_files=keep)
        return json(await desk.going.within(f"rm {name}", order, ANSWER_SECONDS))
    if request.method == "PATCH":
        change = desk.wishes.patch(name, await asked.body(request, wire.AdapterPatch))
        await desk.going.within(f"set {name}", change, ANSWER_SECONDS)
    return json(await desk.listing.detail(name))


async def explain(request: Request) -> Response:
    name = request.path_params["name"]
    if request.method in ("PATCH", "DELETE") or "show" in request.query_params:
        request.path_params["name"] = f"{name}/explain"
        return await adapter(request)
    return json(await desk_of(request).listing.explain(name))


async def verify(request: Request) -> Response:
    return json(await desk_of(request).wishes.verify(await asked.body(request, wire.Names)))


async def rollback(request: Request) -> Response:
    desk, ask = desk_of(request), await asked.body(request, RollbackAsk)
    order = desk.wishes.rollback(ask.name, ask.rev)
    return json(await desk.going.within(f"rollback {ask.name}", order, max(ask.timeout_s, 0.0)))


# ----------------------------------------------------------------- operating
async def drain(request: Request) -> Response:
    return await _told_in_time(request, "drain")


async def resume(request: Request) -> Response:
    return await _told_in_time(request, "resume")


async def _told_in_time(request: Request, route: str) -> Response:
    """Its client waits for a drain as long as that may take, and a while."""
    desk, ask = desk_of(request), await asked.body(request, DrainAsk)
    seconds = ANSWER_SECONDS + (ask.timeout_s if route == "drain" else 0.0)
    what = f"{route} {ask.name}" if ask.name is not None else route
    return json(await desk.going.within(what, _all_drained(desk, ask, route), seconds))


async def _all_drained(desk: Desk, ask: DrainAsk, route: str) -> Drained:
    """On every member that answers; raises what one of them has against it, and deadline_exceeded
    with what still runs there.  A name is turned away by the gateways, too: it might be on another
    member by then."""
    seconds = ask.timeout_s + 30.0 if route == "drain" else 10.0

    async def one(member: Member) -> Drained:
        answer = await call(
            desk.members, member.name, "POST", f"{V1}/{route}", ask, seconds=seconds
        )
        return read(answer, Drained)

    changed = ask.name is not None and await desk.wishes.drain(ask.name, route == "drain")
    there = [member for member in desk.members.seen() if member.state != "lost"]
    outcomes = await each(there, one)
    for outcome in outcomes.values():
        unknown = isinstance(outcome, LoradError) and outcome.code == "model_not_found"
        if isinstance(outcome, LoradError) and not unknown:
            raise outcome
    done = list(given(outcomes).values())
    return Drained(
        name=ask.name,
        draining=route == "drain",
        running=sum(one.running for one in done),
        cancelled=sum(one.cancelled for one in done),
        changed=changed or any(one.changed for one in done),
        still=tuple(sorted({name for one in done for name in one.still})),
    )


async def cancel_request(request: Request) -> Response:
    """At the member that has it."""
    desk, id = desk_of(request), request.path_params["request_id"]
    path = f"{V1}/requests/{quote(id, safe='')}"
    outcomes = await each(alive(desk.members), lambda m: call(desk.members, m.name, "DELETE", path))
    for answer in given(outcomes).values():
        return Response(answer.body, media_type="application/json")
    raise LoradError("not_found", f"no request {id[:64]!r} runs or waits on any member")


async def scrape(request: Request) -> Response:
    """Of all members that answer, and of the gateway."""
    desk = desk_of(request)
    ask = Ask("GET", "/metrics", face="admin")

    async def one(member: Member) -> str:
        answer = await desk.members.ask(member.name, ask)
        if answer.status != 200:
            raise Lost(member.name, f"its metrics answer {answer.status}")
        return answer.body.decode()

    pages = given(await each(alive(desk.members), one))
    counts = desk.inference
    text = exposition.merged({member.name: page for member, page in pages.items()})
    text += exposition.own(
        desk.members.seen(), counts.moved, counts.broken, desk.catalog.table.generation
    )
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# ----------------------------------------------------------------- pulls
async def pull(request: Request) -> Response:
    pulls, start = desk_of(request).pulls, await asked.body(request, PullStart)
    if start.dry_run:
        return json(await pulls.plan(start))
    uid = asked.uid(request)
    begun = await pulls.begin(start, "" if uid is None else f"uid {uid}")
    return json(begun, status=202)


async def list_operations(request: Request) -> Response:
    live = asked.flag(request, "live")
    limit = asked.number(request, "limit", 100, 1, 1000)
    return json(await desk_of(request).pulls.page(live=live, limit=limit))


async def operation(request: Request) -> Response:
    pulls, id = desk_of(request).pulls, request.path_params["operation_id"]
    if request.method == "DELETE":
        return json(await pulls.cancel(id))
    wait = asked.number(request, "wait_ms", 0, 0, int(MAX_WAIT_SECONDS * 1000))
    return json(await pulls.wait(id, wait / 1000))
