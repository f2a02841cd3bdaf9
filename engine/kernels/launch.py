"""Launching kernels quickly, or having them compiled beforehand, many at a time.

Goes in: a kernel, its grid and its arguments.  Comes out: nothing; it was launched, or within
`compiling` its form for such arguments was asked of Triton's compiler, on another thread.

Triton's own launch finds the compiled form anew each time, from every argument and every constant.
On the host of an H200 that was 125 us for a kernel with sixty of them and made prompts wait for the
interpreter.  Here a form is found by what the arguments are and by constants that are hashed once.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)
#: More threads than that gain nothing: some of a compilation holds the interpreter.
MOST_THREADS = 16

_launchers: dict[tuple[object, ...], "Launcher"] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options); within `compiling` nothing runs."""
    launcher_of(kernel, **options)(grid, *args)


def launcher_of(kernel: Any, **options: object) -> "Launcher":
    """The one for the kernel with these constants and options."""
    key = (id(kernel), *options.items())  # the launcher keeps the kernel, and so its id
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = Launcher(kernel, **options)
    return launcher


class Launcher:
    """A kernel with all its constants and options, for whoever launches it again and again."""

    __slots__ = ("_forms", "kernel", "options")

    def __init__(self, kernel: Any, **options: object) -> None:
        self.kernel, self.options = kernel, options
        #: What the arguments are -> the compiled form, and the constants in its order.
        self._forms: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __call__(self, grid: tuple[int, ...], *args: object) -> None:
        """Launch it on the current stream; `args` are its first parameters."""
        if _compiling.get():
            self.kernel.warmup(*args, grid=grid, **self.options)
            return
        what = (*map(_told_apart, args),)
        try:
            form = self._forms.get(what)
        except TypeError:  # something that cannot be looked up: Triton's own way
            self.kernel[grid](*args, **self.options)
            return
        if form is not None:
            compiled, constants = form
            compiled[(*grid, 1, 1)[:3]](*args, *constants)
            return
        compiled = self.kernel[grid](*args, **self.options)
        if compiled is None:
            return  # the interpreter compiles nothing
        names = self.kernel.arg_names[len(args) :]
        if all(name in self.options for name in names):
            self._forms[what] = compiled, tuple(self.options[name] for name in names)


def _told_apart(value: object) -> object:
    """What a kernel may be compiled for: finer than Triton's own distinctions, never coarser."""
    if isinstance(value, Tensor):
        return value.device, value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return type(value), value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63
    if isinstance(value, float):
        return float
    shape = getattr(value, "block_shape", None)  # of a tensor descriptor
    if shape is None:
        return value
    base: Tensor = value.base  # type: ignore[attr-defined]
    layout = getattr(value, "layout", None)
    return type(value), base.device, base.dtype, *shape, layout, value.padding  # type: ignore[attr-defined]


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
