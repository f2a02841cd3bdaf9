"""An engine's start, and how often one may fail: the first pass, last words, crashes.

Goes in: flights and inputs of a new engine, the Fatal of one that is gone.  Comes out: nothing, or
the error that it means.
"""

import asyncio
from collections import deque
from typing import NamedTuple

from engine.messages import Fatal, SamplingParams, SequenceDelta, Submit
from engine.pooling.config import PoolingInfo
from engine.pooling.requests import PoolingTask, PoolRequest
from lorad.errors import BadConfig, LoradError, NoUsableDevice, StartError
from lorad.service.flights import Flights
from lorad.service.inputs import Inputs

#: This many crashes within this many seconds, and the daemon gives up.
MAX_CRASHES, CRASH_WINDOW = 5, 600.0
WARM_UP_ID = "warm-up"

#: Last words of an engine that never became ready -> how the daemon ends.
_START_ERRORS: dict[str, type[StartError]] = {
    "invalid_config": BadConfig,
    "model_unsupported": BadConfig,
    "no_device": NoUsableDevice,
}


class Refusal(NamedTuple):
    """What went wrong, and the next step."""

    message: str
    hint: str


def start_error(fatal: Fatal, no_device: Refusal | None) -> StartError:
    """Of an engine that never was ready; `no_device` in place of its words, if it finds none."""
    if fatal.code == "no_device" and no_device is not None:
        return NoUsableDevice(no_device.message, hint=no_device.hint)
    wrong = _START_ERRORS.get(fatal.code, StartError)
    return wrong(f"the engine did not start: {fatal.message}", hint=fatal.hint)


async def first_token(flights: Flights) -> None:
    """Of an engine that generates.  Raises LoradError."""
    done = asyncio.get_running_loop().create_future()

    def ended(delta: SequenceDelta) -> None:
        if delta.finish_reason and not done.done():
            done.set_result(delta)

    # Its prompt is scored, so that it asks nothing of the prefix cache: what is counted there is of
    # requests alone.
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    flights.begin(Submit(request_id=WARM_UP_ID, prompt=[0], sampling=one_token), ended)
    delta = await done
    if delta.finish_reason == "error":
        raise LoradError("internal_error", f"the first forward pass failed: {delta.message}")


async def first_result(inputs: Inputs, pools: PoolingInfo | None) -> None:
    """Of one that pools: a vector, or of late interaction that of a token.  Raises LoradError."""
    task: PoolingTask = "embed" if pools is None or pools.kinds else "tokens"
    try:
        await inputs.run(PoolRequest(request_id=WARM_UP_ID, tokens=[0], task=task))
    except LoradError as error:
        message = f"the first forward pass failed: {error.message}"
        raise LoradError("internal_error", message) from error


class Crashes:
    """Those of the last minutes."""

    def __init__(self) -> None:
        self._at: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._at)

    def note(self, now: float) -> None:
        """One more, `now` in seconds."""
        self._at.append(now)
        while self._at[0] < now - CRASH_WINDOW:
            self._at.popleft()

    def give_up(self, fatal: Fatal) -> StartError | None:
        """How the daemon ends, once there are too many; `fatal`: the last one's words."""
        if len(self._at) < MAX_CRASHES:
            return None
        return StartError(
            f"the engine crashed {MAX_CRASHES} times in {CRASH_WINDOW / 60:.0f} minutes"
            f": {fatal.message}",
            hint="the log above holds each crash",
        )
