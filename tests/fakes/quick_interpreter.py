"""Triton's interpreter without what it does over and over and throws away: half of its time.

Goes in: nothing; `quicken()` changes `triton.runtime.interpreter`.
Comes out: the same values.  What a release of Triton has not, or otherwise, is left as it is.
"""

import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
from typing import Any

import pytest


def quicken() -> None:
    """From now on, in a process whose tests have asked for the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _forget_lost_checks(interpreter)
    _patch_once_a_launch(interpreter)
    _look_up_types_once(interpreter)


def check() -> None:
    """Raise UsageError if somebody imported a kernel before the first that asked for the
    interpreter: Triton's own functions are compiled ones then, and no kernel runs."""
    language = sys.modules.get("triton.language")
    if os.environ.get("TRITON_INTERPRET") != "1" or language is None:
        return
    if type(language.sum).__name__ == "JITFunction":
        raise pytest.UsageError(
            "a test file imports kernels and does not set TRITON_INTERPRET ahead of that, as "
            "tests/kernels/test_gemm.py does: no kernel would run on the interpreter"
        )


def _forget_lost_checks(interpreter: Any) -> None:
    """Every sum is made again in 64 bits, for an assertion that only `debug` makes."""
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _look_up_types_once(interpreter: Any) -> None:
    """Every value has a table of all types made to find its own."""
    find = getattr(interpreter, "_get_np_dtype", None)
    if find is None:
        return
    plain = interpreter.tl.dtype
    cached = functools.cache(find)
    # Types of pointers and blocks cannot be hashed.
    interpreter._get_np_dtype = lambda kind: (cached if type(kind) is plain else find)(kind)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Every call of a helper replaces in `triton.language` what the launch has replaced."""
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None or not hasattr(interpreter, "_patch_lang"):
        return
    patch = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    replaced: set[str] = set()  # in the launch that is under way

    @functools.cache
    def seen_by(fn: Any) -> frozenset[str]:
        found = [each for each in fn.__globals__.values() if inspect.ismodule(each)]
        return frozenset(each.__name__ for each in languages if each in found)

    class Launch(scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_once(fn: Any) -> Any:
        seen = seen_by(fn)
        launch = Launch()
        if not seen or not seen <= replaced:
            launch._changes = patch(fn)._changes
            replaced.update(seen)
        return launch

    interpreter._patch_lang = patch_once
