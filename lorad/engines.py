"""Engines: the engine processes of one [[models]] entry, and how they are seen as one.

Goes in: settings, the model's place among them, what each process is told.  Comes out: a link and a
picture for each of `replicas`, and of all together.  Replica n has the n-th GPU to itself; on the
CPU all share it.  With one replica there is nothing but that one.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.pooling.config import PoolingConfig
from lorad.config import Model
from lorad.service.engine_link import EngineLink, Refusal, Turn
from lorad.service.events import EventRing
from lorad.service.picture import Picture
from lorad.service.pictures import Pictures
from lorad.service.replicas import Replica, Replicas

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class One:
    """One engine process; `replica` "" where the model has no other."""

    replica: str
    link: EngineLink
    picture: Picture


class Engines:
    """Nothing of it runs yet."""

    def __init__(
        self,
        entry: Model,
        config: EngineConfig | PoolingConfig,
        events: EventRing,
        *,
        several: bool,
    ) -> None:
        """`several`: there are other models, and events say whose engine it is."""
        self._entry, self._events, self._several = entry, events, several
        names = [str(n) for n in range(entry.replicas)] if entry.replicas > 1 else [""]
        self.each = tuple(self._make(n, name, config) for n, name in enumerate(names))
        self.replicas: Replicas | None = None
        self.link: EngineLink | Replicas = self.each[0].link
        self.picture: Picture | Pictures = self.each[0].picture
        if len(names) > 1:
            replicas = [Replica(one.replica, one.link, one.picture) for one in self.each]
            self.link = self.replicas = Replicas(replicas)
            pictures = {one.replica: one.picture for one in self.each}
            self.picture = Pictures(pictures, replicas=True)

    def agree(self) -> None:
        """All of them are on the kind of device that the first one finds.  Once their turns are
        what they are to be, as those are waited for behind it."""
        first = self.each[0].link
        for one in self.each[1:] if first.config.device == "auto" else ():
            one.link.turn = partial(_as_the_first, first, one.link, one.link.turn)

    def _make(self, n: int, replica: str, config: EngineConfig | PoolingConfig) -> One:
        entry, env, refusal = self._entry, {}, None
        if replica and config.device != "cpu":
            env = {VISIBLE: visible(n, os.environ)}
            refusal = Refusal(
                f"models.replicas = {entry.replicas}, and there is no GPU of its own for it",
                "as many replicas as this machine has GPUs for lorad",
            )
        link = EngineLink(
            config,
            self._events,
            new_client=partial(EngineClient, stall_seconds=entry.stall_after, env=env),
            replace_after=entry.replace_after,
            model=self._label(replica),
            no_device=refusal,
        )
        return One(replica, link, Picture(link))

    def _label(self, replica: str) -> str:
        """Whose engine it is, where there is another."""
        name = self._entry.name if self._several else ""
        return f"{name} replica {replica}".strip() if replica else name


def visible(n: int, env: Mapping[str, str]) -> str:
    """The n-th GPU of those that this daemon may use, as CUDA_VISIBLE_DEVICES says it; of fewer
    than that, none."""
    told = env.get(VISIBLE)
    if told is None:
        return str(n)
    each = [one.strip() for one in told.split(",") if one.strip()]
    return each[n] if n < len(each) else "-1"


def on_cards(every: Sequence[Engines]) -> list[list[EngineLink]]:
    """Engines of several models that may be on the same card: one list a card."""
    cards: dict[int, list[EngineLink]] = {}
    for engines in every:
        for n, one in enumerate(engines.each):
            if one.link.config.device != "cpu":
                cards.setdefault(n, []).append(one.link)
    return [links for links in cards.values() if len(links) > 1]


@contextlib.asynccontextmanager
async def _as_the_first(
    first: EngineLink, link: EngineLink, turn: Turn
) -> AsyncIterator[EngineConfig | PoolingConfig]:
    """On the kind of device that the first one found: `auto` on a machine with too few GPUs would
    make a slow replica of the CPU, and nobody would be told."""
    await first.informed.wait()
    assert first.info is not None
    link.config = structs.replace(link.config, device=first.info.device)
    async with turn() as config:
        yield structs.replace(config, device=first.info.device)
