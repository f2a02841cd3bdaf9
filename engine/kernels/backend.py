"""Which implementation an op takes, and what the kernels need to know of the card.

Goes in: a tensor.  Comes out: whether the Triton kernels take it, and numbers of its device.
Imports no triton: an engine on the CPU starts without it.
"""

from functools import cache

import torch
from torch import Tensor

#: What is assumed of a device that cannot be asked, such as the interpreter's.
_PLAIN_SMS, _PLAIN_SHARED_BYTES = 4, 96 << 10


def use_kernels(x: Tensor) -> bool:
    """True if x goes through the Triton kernels."""
    return x.is_cuda


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of `device`."""
    if device.type != "cuda":
        return _PLAIN_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take on `device`."""
    if device.type != "cuda":
        return _PLAIN_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _PLAIN_SHARED_BYTES))


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may be launched before the one ahead has ended (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the card has Hopper's own instructions: products of warp groups, the copy engine."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
