"""What a command holds while it runs: the options and a client.

Goes in: the Typer context.  Comes out: `Session` with a connected client on demand.  The client
module is imported only when a command really talks, so that `--help` stays fast.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from lorad import wire
from lorad.cli.options import Options, may_ask
from lorad.cli.output import plain

if TYPE_CHECKING:
    from lorad.client import LoradClient


class Usage(Exception):
    """The command line asks for something that cannot be: exit 2, nothing was done."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Interrupted(Exception):
    """Ctrl+C, with what became of the work."""


class Failed(Exception):
    """One thing was asked for and refused; `code` is a row of `lorad.errors.TABLE`."""

    def __init__(self, result: wire.ItemResult) -> None:
        super().__init__(result.message)
        self.code = result.code
        self.message = result.message
        self.hint = result.hint
        self.details = result.details


class Broken(Exception):
    """Something on this side of the socket failed; `code` is a row of `lorad.cli.app.OWN_EXITS`."""

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


@dataclass(slots=True)
class Session:
    """One invocation of `loractl`."""

    options: Options
    _client: "LoradClient | None" = None

    @property
    def client(self) -> "LoradClient":
        """The admin client; nothing is sent before the first call."""
        if self._client is None:
            from lorad.cli.reach import checked_host, default_host

            host = self.options.host or default_host(os.environ)
            try:
                self._client = self._connect(checked_host(host))
            except ValueError as error:
                raise Usage(str(error)) from None
        return self._client

    @contextmanager
    def inference(self) -> "Iterator[LoradClient]":
        """A client of the inference socket: the one that the daemon names, else the neighbour."""
        from lorad.caller import ApiError, Unreachable

        try:
            socket = self.client.status().inference_socket
            host = f"unix://{socket}" if socket else self.client.host  # of a gateway in Ray: both
        except ApiError as error:
            if error.code != "not_found":
                raise
            host = self.client.host  # no admin routes there: it is an inference socket
        except Unreachable as error:
            host = self.client.host.replace("/admin.sock", "/inference.sock")
            if error.kind != "denied" or host == self.client.host:
                raise
        with self._connect(host) as client:
            yield client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def timeout(self, default: float) -> float:
        """Seconds to wait for an operation."""
        return default if self.options.timeout is None else self.options.timeout

    def confirm(self, question: str, names: Sequence[str] = ()) -> None:
        """Ask, default No.  Without a terminal `--yes` is needed: exit 2, nothing done."""
        if self.options.yes:
            return
        listed = f" ({plain(', '.join(names))})" if names else ""
        if not self.options.interactive:
            why = "--no-input was given" if may_ask() else "there is no terminal to ask on"
            raise Usage(f"{question}{listed}: needs --yes, as {why}", hint="the same with --yes")
        try:
            if not typer.confirm(f"{question}{listed}?", default=False, err=True):
                raise typer.Exit(1)
        except typer.Abort:
            raise Interrupted("nothing was done") from None

    def _connect(self, host: str) -> "LoradClient":
        from lorad.caller import TIMEOUT_SECONDS
        from lorad.client import LoradClient

        # Ctrl+C in the midst of importing httpx can be swallowed there: it waits until afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return LoradClient(host, timeout=self.timeout(TIMEOUT_SECONDS))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def session(context: typer.Context) -> Session:
    """The Session that the root command made."""
    found = context.find_root().obj
    assert isinstance(found, Session)
    return found
