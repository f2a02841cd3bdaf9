"""httpx without reading all certificate authorities anew for each client, which takes 30 ms.

Goes in: nothing; `quicken()` changes httpx, if somebody has imported it.  Comes out: clients that
ask for the usual verification share one context of it.
"""

import functools
import os
import ssl
import sys
from typing import Any


def quicken() -> None:
    transports: Any = sys.modules.get("httpx._transports.default")
    make = getattr(transports, "create_ssl_context", None)
    if make is None:
        return

    @functools.cache
    def usual(_way: Any) -> Any:
        return make()

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        own = cert is not None or (trust_env and {"SSL_CERT_FILE", "SSL_CERT_DIR"} & {*os.environ})
        # A test may have put something in the place of `create_default_context`.
        return (
            make(verify, cert, trust_env)
            if own or verify is not True
            else usual(ssl.create_default_context)
        )

    transports.create_ssl_context = context
