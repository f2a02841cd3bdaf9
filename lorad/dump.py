"""A picture of the daemon for its log, on SIGUSR1: status, tasks, stacks of every thread.

Goes in: `wire_status.Status`.  Comes out: lines on stderr.  Shows no prompt, no key and no
local variable.
"""

import asyncio
import faulthandler
import logging
import sys

import msgspec

from lorad import wire_status

log = logging.getLogger("lorad.dump")


def dump_state(status: wire_status.Status) -> None:
    """From the event loop."""
    log.info("state %s", msgspec.json.encode(status).decode())
    for task in asyncio.all_tasks():
        frames = [f"{f.f_code.co_filename}:{f.f_lineno}" for f in task.get_stack(limit=8)]
        log.info("task %s %s", task.get_name(), " < ".join(reversed(frames)))
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
