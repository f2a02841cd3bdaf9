"""What a command holds while it runs: the options and a client.

Goes in: the Typer context.  Comes out: `Session` with a connected client on demand.  The client
module is imported only when a command really talks, so that `--help` stays fast.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from lorad import wire
from lorad.cli.options import Options

if TYPE_CHECKING:
    from lorad.client import LoradClient


class Failed(Exception):
    """One thing was asked for and refused; `code` is a row of `lorad.errors.TABLE`."""

    def __init__(self, result: wire.ItemResult) -> None:
        super().__init__(result.message)
        self.code = result.code
        self.message = result.message
        self.hint = result.hint
        self.details = result.details


@dataclass(slots=True)
class Session:
    """One invocation of `loractl`."""

    options: Options
    _client: "LoradClient | None" = None

    @property
    def client(self) -> "LoradClient":
        """The admin client; nothing is sent before the first call."""
        if self._client is None:
            from lorad.cli.reach import default_host
            from lorad.client import LoradClient

            self._client = LoradClient(self.options.host or default_host(os.environ))
        return self._client

    @contextmanager
    def inference(self) -> "Iterator[LoradClient]":
        """A client of the inference socket, which the admin socket names."""
        from lorad.client import LoradClient

        with LoradClient(f"unix://{self.client.status().inference_socket}") as client:
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
        if not self.options.interactive:
            raise typer.BadParameter(f"{question} needs --yes when there is no terminal to ask on")
        listed = f" ({', '.join(names)})" if names else ""
        if not typer.confirm(f"{question}{listed}?", default=False, err=True):
            raise typer.Exit(1)


def session(context: typer.Context) -> Session:
    """The Session that the root command made."""
    found = context.find_root().obj
    assert isinstance(found, Session)
    return found
