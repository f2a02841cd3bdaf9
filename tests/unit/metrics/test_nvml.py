"""The driver's library, through a stand-in with its C interface."""

import ctypes
from types import SimpleNamespace

import pytest

from lorad.metrics.nvml import Nvml, has_card

UUID = "GPU-1"


class Library:
    """Fills the structures that it is given, as libnvidia-ml does."""

    busy, cards = 25, 2

    def __init__(self):
        self.nvmlInit_v2 = lambda: 0

    def nvmlDeviceGetCount_v2(self, count):
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = self.cards
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == UUID.encode() else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        numbers = ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))
        numbers[0], numbers[1], numbers[2] = 1000, 400, 600
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, use):
        if self.busy is None:
            return 3
        ctypes.cast(use, ctypes.POINTER(ctypes.c_uint))[0] = self.busy
        return 0


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr("lorad.metrics.nvml.ctypes.CDLL", lambda name: made)
    return made


def test_a_card_tells_its_memory_and_how_busy_it_is(library):
    use = Nvml().look(UUID)
    assert (use.used_bytes, use.total_bytes, use.busy) == (600, 1000, 0.25)


def test_a_card_that_does_not_say_how_busy_it_is_tells_its_memory(library):
    library.busy = None
    assert Nvml().look(UUID).busy is None


def test_without_the_card_or_the_library_there_is_nothing(library):
    assert Nvml().look("GPU-2") is None
    assert Nvml().look("") is None
    library.nvmlInit_v2 = lambda: 9
    assert Nvml().look(UUID) is None


def test_a_card_is_there_unless_all_are_hidden(library, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert has_card()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_card()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert has_card()
    library.cards = 0
    assert not has_card() and not has_card("libno-such-library.so.1")


def test_a_machine_without_the_driver_says_nothing():
    nvml = Nvml("libno-such-library.so.1")
    assert nvml.look(UUID) is None
    assert nvml.look(UUID) is None


def test_the_gpu_is_named_by_its_uuid(world, library):
    world.sources.models[0].link.info = SimpleNamespace(device_uuid=UUID, dtype="bfloat16")
    assert world.value("gpu_memory_used_bytes", gpu=UUID) == 600
    assert world.value("gpu_utilization_ratio", gpu=UUID) == 0.25
    assert world.value("base_model_info", model="tiny", dtype="bfloat16") == 1
