"""Routes of uploads where several gateways stand behind one address: see SharedUploads."""

from starlette.requests import Request
from starlette.responses import Response

from lorad import wire
from lorad.api import admin, asked
from lorad.api.app import Route
from lorad.api.respond import json
from lorad.fleet.catalog import FILES
from lorad.fleet.shared_uploads import SharedUploads
from lorad.fleet.taking import V1


def routes(uploads: SharedUploads) -> list[Route]:
    """In place of the daemon's own."""

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
    return [
        Route(f"{V1}/uploads", open_upload, methods=["POST"]),
        Route(f"{one}/files/{{file}}", put_file, methods=["PUT"]),
        Route(f"{one}/commit", commit_upload, methods=["POST"]),
        Route(one, drop_upload, methods=["DELETE"]),
    ]
