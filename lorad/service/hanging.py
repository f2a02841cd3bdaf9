"""Hanging: nobody waits for an engine that hangs.

Goes in: work that waits for an engine's answer.  Comes out: whether it was answered.  What an
engine was told it does when it goes on; if it is replaced instead, the next one is told what is
wanted then.
"""

import asyncio
from typing import Any, Protocol


class Hangs(Protocol):
    """Of EngineLink: set while the engine's step loop does not move."""

    hanging: asyncio.Event


async def answered(work: "asyncio.Future[Any]", engine: Hangs) -> bool:
    """Wait until `work` is done, or no longer than until the engine hangs; False: it hangs, and the
    work goes on."""
    hangs = asyncio.ensure_future(engine.hanging.wait())
    try:
        await asyncio.wait({work, hangs}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hangs.cancel()
    return work.done()
