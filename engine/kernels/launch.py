"""Launching kernels, or having them compiled beforehand, many at a time.

Goes in: a kernel, its grid and its arguments.  Comes out: nothing; it was launched, or within
`compiling` its form for such arguments was asked of Triton's compiler, on another thread.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)
#: More threads than that gain nothing: some of a compilation holds the interpreter.
MOST_THREADS = 16


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options); within `compiling` nothing runs."""
    if _compiling.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compiling(threads: int = 0) -> Iterator[None]:
    """Launches within are only compiled for, `threads` at a time (0: as many as there are cores);
    all of it is there at the end.  What the compiler refuses is left to the launch itself."""
    import triton

    count = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with (
        ThreadPoolExecutor(count, "compiler") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        before = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(before)
