"""An app that hangs below somebody's path: to all in it, it is at the root.

Goes in: scopes whose path may begin with `root_path`.  Comes out: the same without.  Who may use a
route is decided by its path, and so must not depend on where the app hangs.
"""

from typing import AnyStr

from starlette.types import ASGIApp, Receive, Scope, Send


class AtRoot:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if root and scope["type"] == "http":
            raw = scope.get("raw_path") or b""
            scope = {
                **scope,
                "root_path": "",
                "path": below(root, scope["path"]),
                "raw_path": below(root.encode(), raw),
            }
        await self._app(scope, receive, send)


def below(root: AnyStr, path: AnyStr) -> AnyStr:
    """What follows `root`; all of a path that is elsewhere."""
    rest = path.removeprefix(root)
    return rest if rest[:1] in ("/", b"/", "", b"") else path
