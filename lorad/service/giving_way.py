"""GivingWay: a model that pools leaves the device to one that generates beside it.

Goes in: the engine links, which of them may be on one card, and the share of the device's time that
each which pools keeps while a request runs on a generating one there.  Comes out: to each of them
its share, when it changes.  An idle generator costs nobody anything.  Measures nothing, and knows
neither names nor steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from engine.config import EngineConfig
from engine.messages import EngineInfo
from engine.pooling.config import PoolingConfig
from lorad.service.flights import Flights

#: Of auto.  A card gives two processes half of its time each, whatever their steps; the cores of a
#: CPU are divided by the system, and there nobody gives way unless told to.  On an H200 the pauses
#: of 64 streams beside a busy embedder were at their 99th percentile 1.24, 1.25 and 1.28 times as
#: long as without it, at 0.1, 0.2 and 0.3 (2.35 at 1); 1.3 is what they may be.
ON_A_CARD = 0.2


class Link(Protocol):
    """Of EngineLink; hashed by identity."""

    config: EngineConfig | PoolingConfig
    info: EngineInfo | None
    flights: Flights


class PoolLink(Link, Protocol):
    """Of one that pools: it asks for `share` when its process is there, and when told to."""

    def keep_share(self) -> None: ...


class GivingWay:
    """`cards`: links that may be on one card, a list each."""

    def __init__(self, links: Sequence[Link], cards: Sequence[Sequence[Link]]) -> None:
        self._cards = cards
        self._generate = [link for link in links if isinstance(link.config, EngineConfig)]
        self._pool: list[PoolLink] = []
        for link in self._generate:
            link.flights.on_busy = self._tell

    def join(self, link: PoolLink, share: float) -> partial[float]:
        """What `link` asks its share of; 1 for ever if it never gives way.  `share` 0 = auto."""
        if share < 1.0 and self._generate:
            self._pool.append(link)
        return partial(self._share, link, share)

    def _tell(self) -> None:
        for link in self._pool:
            link.keep_share()

    def _share(self, link: Link, share: float) -> float:
        share = share or (1.0 if _device(link) == "cpu" else ON_A_CARD)
        beside = (one for one in self._generate if self._share_a_device(link, one))
        return share if any(len(one.flights) for one in beside) else 1.0

    def _share_a_device(self, one: Link, other: Link) -> bool:
        """All that are on the CPU do."""
        on_cpu = _device(one) == "cpu", _device(other) == "cpu"
        if any(on_cpu):
            return all(on_cpu)
        return any(one in card and other in card for card in self._cards)


def _device(link: Link) -> str:
    """Once its process is there, what became of `auto`."""
    return link.info.device if link.info is not None else link.config.device
