"""Shares: several engines on one card, each with its part of the memory.

Goes in: the engine links, and what each may take.  Comes out: an engine's turn to start, and what
it is told.  An engine measures what of the card is taken, by whomever, and fills up to
`gpu_memory_utilization`: so those that may be on a card start one after the other, and each is told
its own share and the shares of those that are there already, but no more than an engine takes.
One that pools has no share: what it holds, its weights and adapters, is taken for one.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from msgspec import structs

from engine.config import MOST_UTILIZATION, EngineConfig
from engine.messages import EngineInfo
from engine.pooling.config import PoolingConfig


class Link(Protocol):
    """Of EngineLink; `pid` None: no process of it lives."""

    config: EngineConfig | PoolingConfig
    info: EngineInfo | None

    @property
    def pid(self) -> int | None: ...


class Shares:
    """`links`: those that may be on the card."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, link: Link) -> AsyncIterator[EngineConfig | PoolingConfig]:
        """What `link`'s next process is told.  Hold it until that has taken its memory."""
        async with self._turn:
            config = link.config
            if isinstance(config, EngineConfig):
                taken = sum(_share(o) for o in self._links if o is not link and o.pid is not None)
                whole = min(config.gpu_memory_utilization + taken, MOST_UTILIZATION)
                config = structs.replace(config, gpu_memory_utilization=whole)
            yield config


def _share(link: Link) -> float:
    """The part of the card that a running engine has.  What a step of one that pools needs besides
    is not counted: the others leave it on the card."""
    if isinstance(link.config, EngineConfig):
        return link.config.gpu_memory_utilization
    info = link.info
    if info is None or not info.card_bytes:
        return 0.0
    return (info.weight_bytes + info.arena_bytes) / info.card_bytes
