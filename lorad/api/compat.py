"""vLLM's routes for adapters at run time, on the admin socket.

Goes in: a name and a folder on this machine.  Comes out: vLLM's line of text, or our envelope:
clients of vLLM look at the status, and the envelope says what to do.  Decides nothing itself.
"""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorad.api.asked import body
from lorad.api.deps import deps_of
from lorad.wire_compat import LoadAdapter, UnloadAdapter


async def load_lora_adapter(request: Request) -> Response:
    """Added and on the GPU when it answers; goes on when its client stops waiting."""
    deps, ask = deps_of(request), await body(request, LoadAdapter)
    request.path_params["name"] = ask.lora_name  # for the audit, if it is refused; below as well
    adding = deps.folders.add(ask.lora_name, ask.lora_path, replace=ask.load_inplace)
    await deps.uploads.keep(adding)
    return PlainTextResponse(f"Success: LoRA adapter '{ask.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    deps, ask = deps_of(request), await body(request, UnloadAdapter)
    request.path_params["name"] = ask.lora_name
    await deps.adapters.remove(ask.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{ask.lora_name}' removed successfully.")
