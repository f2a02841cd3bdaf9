"""The ranks of one model, and what they tell each other in a step: sums, logits, drawn tokens.

Goes in: a rank, how many there are, and a file that all of them have open.  Comes out: the few
collectives that a forward pass needs, counted.  Every rank has to call the same ones in the same
order, with tensors of one shape.  NCCL on cards, gloo elsewhere.  Knows no layers and no requests.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: How long a rank waits for the others before it gives up: a step takes milliseconds, but one that
#: compiles kernels or captures a graph may keep the others for a minute.
PATIENCE = timedelta(minutes=10)
#: Set where nothing else is.  All ranks are on one host.  Multicast over NVLink stays off: it takes
#: a fabric manager that not every host has, and fails when a group is made without one.  What
#: graphs sum is not registered either: hundreds of them would each keep handles of their own.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Ranks:
    """This rank among `size`.  One at a time in a process, and from one thread.

    `store_fd` is an open file that all ranks have inherited.  The first call waits for them all.
    """

    def __init__(self, rank: int, size: int, *, store_fd: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        #: Collectives so far, those of replayed graphs included.
        self.count = 0
        self._device = device
        cards = device.type == "cuda"
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        store = dist.FileStore(f"/proc/self/fd/{store_fd}", size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if cards else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
            device_id=torch.device("cuda", torch.cuda.current_device()) if cards else None,
        )
        self._gather = _gather_op()

    @staticmethod
    def taken() -> bool:
        """Whether this process is a rank already, of ours or of somebody else's group."""
        return dist.is_initialized()

    def add_up(self, x: Tensor) -> None:
        """x of every rank becomes the sum of all of them, in place."""
        self.count += 1
        dist.all_reduce(x)

    def side_by_side(self, x: Tensor, out: Tensor) -> None:
        """x (rows, width) of every rank, in order of rank, to out (rows, size * width or less)."""
        self.count += 1
        rows, width = x.shape
        parts = x.new_empty(self.size * rows, width)
        self._gather(parts, x)
        for rank, part in enumerate(parts.view(self.size, rows, width)):
            own = out[:, rank * width : (rank + 1) * width]
            own.copy_(part[:, : own.shape[1]])

    def from_first(self, x: Tensor) -> None:
        """x of every rank becomes that of the first, in place."""
        self.count += 1
        dist.broadcast(x, 0)

    def least(self, number: int) -> int:
        """The least of every rank's `number`.  Waits for it."""
        told = torch.tensor([number], device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return int(told.item())

    def close(self) -> None:
        """Leave the others.  Nothing may be under way."""
        dist.destroy_process_group()


def _gather_op() -> Callable[[Tensor, Tensor], Any]:
    """all_gather of one tensor by its newer name where there is one: the older one warns."""
    newer = getattr(dist, "all_gather_single", None)
    op: Callable[[Tensor, Tensor], Any] = newer or dist.all_gather_into_tensor
    return op
