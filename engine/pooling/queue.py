"""The queue of a pooling core: who goes with the next step.

Goes in: inputs as they come.  Comes out: as many as fit into a budget of rows.  Torch-free, and
knows nothing of adapters but whether one may run.

Those go who came first.  One that does not fit into what is left of a step is passed by, PATIENCE
times at the most: then the step ends with it, so that long inputs do not wait for ever while short
ones keep arriving.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.pooling.requests import PoolRequest

Ids = NDArray[np.int64]

#: So often may one that does not fit be passed by.
PATIENCE = 4
#: So many budgets ahead is looked for one that fits: beyond it a long queue costs nothing.
LOOKS_AHEAD = 4


@dataclass(slots=True, eq=False)
class Item:
    """A request that waits.  `tokens` and `types` fit the model; `deadline` is the core's clock."""

    request: PoolRequest
    tokens: Ids
    types: Ids | None
    order: int
    num_cut: int = 0
    deadline: float | None = None
    passed: int = 0  # how often others went past it
    length: int = field(init=False)  # rows; it is asked for a dozen times

    def __post_init__(self) -> None:
        self.length = len(self.tokens)


@dataclass(slots=True)
class Queue:
    """By priority, then by arrival."""

    max_tokens: int
    max_items: int
    rows: int = 0  # of all who wait
    _items: dict[str, Item] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._items

    def __iter__(self) -> Iterator[Item]:
        return iter(list(self._items.values()))

    def add(self, item: Item) -> None:
        """At the end of its priority."""
        self._items[item.request.request_id] = item
        self.rows += item.length

    def remove(self, request_id: str) -> Item | None:
        """Whoever it is, if it waits."""
        item = self._items.pop(request_id, None)
        self.rows -= item.length if item is not None else 0
        return item

    def waiting_for(self, rev: str | None) -> int:
        """Requests on `rev`, None = the base model."""
        return sum(item.request.rev == rev for item in self._items.values())

    def turn_of(self, rev: str | None) -> tuple[int, int]:
        """When the queue comes to `rev`, 1 = first, and to how many it comes; 0: none waits."""
        line = list(dict.fromkeys(item.request.rev for item in self._line()))
        return (line.index(rev) + 1 if rev in line else 0), len(line)

    def take(self, may_run: Callable[[str | None], bool], rows: int | None = None) -> list[Item]:
        """The next step's; [] if nobody may run.  One that is longer than the budget, which is
        `rows` where that is less than usual, goes alone."""
        line, budget = self._line(), self.max_tokens if rows is None else rows
        chosen: list[Item] = []
        passed: list[Item] = []
        left, ahead, overtaken = budget, 0, 0
        for item in line:
            if not may_run(item.request.rev):
                continue
            ahead += item.length
            if not chosen or item.length <= left:
                chosen.append(item)
                left -= item.length
                overtaken = len(passed)
            elif item.passed >= PATIENCE:
                break
            else:
                passed.append(item)
            if left <= 0 or len(chosen) == self.max_items or ahead > LOOKS_AHEAD * budget:
                break
        for item in passed[:overtaken]:
            item.passed += 1
        for item in chosen:
            self.remove(item.request.request_id)
        return chosen

    def _line(self) -> list[Item]:
        return sorted(self._items.values(), key=lambda i: (-i.request.priority, i.order))
