"""Routes of uploads where several gateways stand behind one address: see SharedUploads."""

from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad.api import admin, asked
from lorad.api.respond import json
from lorad.fleet.admin_routes import Handler
from lorad.fleet.catalog import FILES
from lorad.fleet.shared_uploads import SharedUploads
from lorad.fleet.taking import V1


def handlers(uploads: SharedUploads) -> dict[str, Handler]:
    """In place of the daemon's own, by its patterns."""

    async def open_upload(request: Request) -> Response:
        start = await asked.body(request, wire.UploadStart)
        id = await uploads.open(start, asked.uid(request))
        files = tuple(sorted(FILES))
        answer = wire.UploadOpen(upload_id=id, max_bytes=uploads.max_bytes, files=files)
        return json(answer, status=201)

    async def put_file(request: Request) -> Response:
        id, file = request.path_params["upload_id"], request.path_params["file"]
        size = await uploads.put(id, asked.uid(request), file, request.stream())
        return json({"file": file, "num_bytes": size})

    async def commit_upload(request: Request) -> Response:
        commit = await asked.body(request, wire.UploadCommit)
        id = request.path_params["upload_id"]
        start, staging = await uploads.take(id, asked.uid(request))
        return await admin.added(request, commit, start, staging)

    async def drop_upload(request: Request) -> Response:
        await uploads.drop(request.path_params["upload_id"], asked.uid(request))
        return Response(status_code=204)

    one = f"{V1}/uploads/{{upload_id}}"
    return {
        f"{V1}/uploads": open_upload,
        f"{one}/files/{{file}}": put_file,
        f"{one}/commit": commit_upload,
        one: drop_upload,
    }
