"""Engines: the engine processes of one [[models]] entry, and how they are seen as one.

Goes in: settings, the model's place among them, what each process is told.  Comes out: a link and a
picture for each of `replicas`, and of all together.  Replica n has the n-th GPU to itself, or the
n-th few where `tensor_parallel` takes several; on the CPU all share it.  With one replica there is
nothing but that one.
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
from lorad.config_sections import Model
from lorad.service.engine_face import Turn
from lorad.service.engine_link import EngineLink
from lorad.service.engine_start import Refusal
from lorad.service.events import EventRing
from lorad.service.picture import Picture
from lorad.service.pictures import Pictures
from lorad.service.replica import Replica
from lorad.service.replicas import Replicas

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
            env = {VISIBLE: visible(n, os.environ, width_of(config))}
            refusal = Refusal(
                f"models.replicas = {entry.replicas}, and there is no GPU of its own for it",
                "as many replicas as this machine has GPUs for lorad",
            )
        link = EngineLink(
            config,
            self._events,
            new_client=partial(EngineClient, stall_seconds=entry.stall_after, env=env),
            replace_after=entry.replace_after,
            model=self._entry.name if self._several else "",
            replica=replica,
            no_device=refusal,
        )
        return One(replica, link, Picture(link))


def width_of(config: EngineConfig | PoolingConfig) -> int:
    """GPUs that one engine takes."""
    return config.tensor_parallel if isinstance(config, EngineConfig) else 1


def visible(n: int, env: Mapping[str, str], width: int = 1) -> str:
    """The n-th `width` GPUs of those that this daemon may use, as CUDA_VISIBLE_DEVICES says it; of
    fewer than that, none."""
    own, told = range(n * width, (n + 1) * width), env.get(VISIBLE)
    if told is None:
        return ",".join(map(str, own))
    each = [one.strip() for one in told.split(",") if one.strip()]
    return ",".join(each[i] for i in own) if own[-1] < len(each) else "-1"


def on_cards(every: Sequence[Engines]) -> list[list[EngineLink]]:
    """Engines of several models that may be on the same card: one list a card, or one for all cards
    that an engine takes together."""
    groups: list[tuple[set[int], list[EngineLink]]] = []
    for engines in every:
        for n, one in enumerate(engines.each):
            if one.link.config.device == "cpu":
                continue
            width = width_of(one.link.config)
            cards, links = set(range(n * width, (n + 1) * width)), [one.link]
            for group in [g for g in groups if g[0] & cards]:
                groups.remove(group)
                cards, links = cards | group[0], group[1] + links
            groups.append((cards, links))
    return [links for _, links in groups if len(links) > 1]


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
