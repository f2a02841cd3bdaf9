"""Launches by form: found again where Triton would take the same one, and never another."""

from typing import Any

import torch

from engine.kernels.launch import Launcher, compiling, launch, launcher_of

ALIGNED, ODD = torch.zeros(8), torch.zeros(8)[1:]


class Compiled:
    def __init__(self, told: list[Any], what: Any) -> None:
        self.told, self.what = told, what

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.told.append((self.what, grid, args))


class Kernel:
    """Compiles for what Triton tells apart: types, alignment, 1, multiples of 16, constants."""

    arg_names = ("x", "count", "WIDTH", "FLAG")

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.slow = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(x: torch.Tensor, count: int, **options: Any) -> Compiled:
            self.slow += 1
            kind = "one" if count == 1 else "long" if count >= 2**31 else count % 16 == 0
            what = x.dtype, x.data_ptr() % 16 == 0, kind, options["WIDTH"], options["FLAG"]
            self.told.append((what, grid, (x, count, options["WIDTH"], options["FLAG"])))
            return Compiled(self.told, what)

        return run


def test_a_form_is_launched_with_its_constants_in_the_kernels_order() -> None:
    kernel = Kernel()
    for count in (3, 5):
        launch(kernel, (2, 1), ALIGNED, count, FLAG=True, WIDTH=7, num_warps=4)
    assert kernel.slow == 1
    assert [args[1:] for _, _, args in kernel.told] == [(3, 7, True), (5, 7, True)]
    assert [grid for _, grid, _ in kernel.told] == [(2, 1), (2, 1, 1)]  # compiled forms want three


def test_whatever_triton_tells_apart_is_told_apart_here() -> None:
    kernel = Kernel()
    tensors = ALIGNED, ODD, ALIGNED.double()
    for _ in range(2):
        for x in tensors:
            for count in (1, 2, 32, 33, 2**31):
                for width in (4, 8):
                    launch(kernel, (1,), x, count, WIDTH=width, FLAG=False)
    for what, _, (x, count, width, flag) in kernel.told:
        kind = "one" if count == 1 else "long" if count >= 2**31 else count % 16 == 0
        assert what == (x.dtype, x.data_ptr() % 16 == 0, kind, width, flag)
    assert kernel.slow <= len(kernel.told) // 2  # the second time all are known


def test_a_kernel_whose_constants_have_defaults_goes_triton_s_own_way_each_time() -> None:
    kernel = Kernel()
    kernel.arg_names = (*Kernel.arg_names, "MORE")
    for _ in range(3):
        launch(kernel, (1,), ALIGNED, 2, WIDTH=1, FLAG=True)
    assert kernel.slow == 3


def test_one_launcher_serves_all_who_name_the_same_constants() -> None:
    kernel = Kernel()
    first = launcher_of(kernel, WIDTH=1, FLAG=True)
    assert isinstance(first, Launcher) and launcher_of(kernel, WIDTH=1, FLAG=True) is first
    assert launcher_of(kernel, WIDTH=2, FLAG=True) is not first
    assert launcher_of(Kernel(), WIDTH=1, FLAG=True) is not first


def test_within_compiling_nothing_is_launched() -> None:
    asked = []

    class Warm(Kernel):
        def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
            asked.append((args, grid, options))

    kernel = Warm()
    with compiling(1):
        launch(kernel, (3,), ALIGNED, 2, WIDTH=1, FLAG=True)
    assert asked == [((ALIGNED, 2), (3,), {"WIDTH": 1, "FLAG": True})] and not kernel.told
