"""openai-python over a daemon's inference socket, whichever of its major versions is installed.

Goes in: where the socket is.  Comes out: the SDK's own client.  The SDK is imported when first
asked for.
"""

import os
from typing import Any

from lorad.caller import address


def openai(sock: str | os.PathLike[str], **options: Any) -> Any:
    """An `openai.OpenAI` over the inference socket; `options` are its own.  Its key is that of
    `LORAD_API_KEY`, unless another one is given.

    From version 3 openai-python speaks through httpx2, before that through httpx.
    """
    import openai as sdk

    _, base_url, path = address(sock)
    options.setdefault("api_key", os.environ.get("LORAD_API_KEY") or "unused")
    if not path:
        return sdk.OpenAI(base_url=f"{base_url}/v1", **options)
    if hasattr(sdk, "DefaultHttpx2Client"):
        import httpx2

        transport: Any = httpx2.HTTPTransport(uds=path, verify=False)
        http: Any = sdk.DefaultHttpx2Client(transport=transport, trust_env=False)
    else:
        import httpx

        transport = httpx.HTTPTransport(uds=path, verify=False)  # without TLS
        http = sdk.DefaultHttpxClient(transport=transport, trust_env=False)
    return sdk.OpenAI(base_url=f"{base_url}/v1", http_client=http, **options)
