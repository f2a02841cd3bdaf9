"""Loads run beside the step loop: its thread never reads, packs, pins, allocates or waits."""

import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.adapters.copier import ThreadCopier
from engine.adapters.host import HostCache
from engine.adapters.reader import Readers
from engine.messages import Abort, AddRevision, Evict, Load, RemoveRevision

#: What C functions read, or wait: by module and name.
READING = {
    ("io", "open"),
    ("_io", "open"),
    ("time", "sleep"),
    *(("posix", name) for name in ("open", "read", "pread", "readv", "preadv", "stat", "fstat")),
}
#: Python functions of `threading` that wait, or make a thread.
WAITING = {"wait", "wait_for", "join", "start"}
#: Of the engine's modules that touch files, what the step loop may call.
FILES = {"reader.py": {"read", "poll"}, "checksums.py": set(), "pack.py": set()}


class Watch(TorchDispatchMode):
    """Steps a core, and notes what its thread must not do: everywhere, and in `advance` alone
    memory from torch, which the steps of a CPU ask for elsewhere."""

    def __init__(self, core):
        super().__init__()
        self.core, self.wrong, self.steps = core, [], 0
        self._step, self._advance = core.step, core.residency.advance
        core.step, core.residency.advance = self.step, self.advance

    def step(self):
        self.steps += 1
        sys.setprofile(self._profile)
        try:
            return self._step()
        finally:
            sys.setprofile(None)

    def advance(self):
        with self:
            self._advance()

    def _profile(self, frame, event, arg):
        if event == "c_call":
            name = getattr(arg, "__module__", None), getattr(arg, "__name__", "")
            if name in READING or name[1] in ("readinto", "pin_memory"):
                self.wrong.append(name)
        elif event == "call":
            file, function = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
            if file == "threading.py" and function in WAITING:
                self.wrong.append((file, function))
            if function not in FILES.get(file, {function}) and not function.startswith("<"):
                self.wrong.append((file, function))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.wrong.append(("torch", str(func)))
        return made


def churn(driver, adapters, prompt, tmp_path):
    """Loads from disk and host memory, by request and by command, evictions, and a broken file."""
    base = driver.submit("base", prompt(20), max_tokens=150, ignore_eos=True)
    driver.add(*adapters)
    broken = msgspec.structs.replace(
        adapters[0].manifest, rev="b" * 64, path=str(tmp_path / "nowhere.bin")
    )
    driver.call(lambda i: AddRevision(command_id=i, manifest=broken))
    for turn in range(2):
        for n, adapter in enumerate(adapters):
            driver.submit(f"{turn}-{n}", prompt(9, n), adapter.rev, max_tokens=3, ignore_eos=True)
        failed = driver.submit(f"{turn}-broken", prompt(9), broken.rev)
        served = [driver.stories[f"{turn}-{n}"] for n in range(len(adapters))]
        driver.until(lambda served=served, last=failed: all(s.finish for s in (*served, last)))
        assert (failed.finish, failed.code) == ("error", "load_failed")
        for adapter in adapters:
            to = "ram" if turn else "disk"
            driver.call(lambda i, a=adapter, t=to: Evict(command_id=i, rev=a.rev, to=t))
            driver.call(lambda i, a=adapter: Load(command_id=i, rev=a.rev))
    driver.call(lambda i: RemoveRevision(command_id=i, rev=adapters[0].rev))
    driver.finish()
    assert len(base.tokens) == 150
    loads = [e for e in driver.events if (e.before, e.after) == ("loading", "idle")]
    assert len(loads) >= 3 * len(adapters)


def test_the_step_thread_does_nothing_that_a_load_takes_time_for(
    start_core, adapters, prompt, tmp_path
) -> None:
    driver = start_core()
    watch = Watch(driver.core)
    churn(driver, adapters, prompt, tmp_path)
    assert watch.steps > 100
    assert watch.wrong == []


def reads(plain):
    def want(self, rev, path, num_bytes):
        Path(path).exists()
        return plain(self, rev, path, num_bytes)

    return want


def sleeps(plain):
    def want(self, *args):
        time.sleep(0)
        return plain(self, *args)

    return want


def waits(plain):
    def start(self, *args):
        plain(self, *args)
        threading.Event().wait(0.001)

    return start


def allocates(plain):
    def start(self, rev, blocks):
        torch.empty(1)
        plain(self, rev, blocks)

    return start


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "seen"),
    [
        (HostCache, "want", reads, ("posix", "stat")),
        (HostCache, "want", sleeps, ("time", "sleep")),
        (ThreadCopier, "start", waits, ("threading.py", "wait")),
        (ThreadCopier, "start", allocates, ("torch", "aten.empty.memory_format")),
    ],
)
def test_the_watch_notices_a_load_that_does(
    start_core, adapters, prompt, tmp_path, monkeypatch, owner, name, wrong, seen
) -> None:
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    driver = start_core()
    watch = Watch(driver.core)
    churn(driver, adapters[:1], prompt, tmp_path)
    assert seen in watch.wrong


def test_the_adapter_of_a_request_that_has_no_seat_yet_comes_up_meanwhile(
    start_core, adapters, prompt
) -> None:
    driver = start_core(max_num_seqs=1)
    driver.add(adapters[0])
    seated = driver.submit("seated", prompt(9), max_tokens=150, ignore_eos=True)
    driver.until(lambda: seated.tokens)
    queued = driver.submit("queued", prompt(9), adapters[0].rev)
    driver.until(lambda: driver.status(adapters[0].rev).state == "idle")
    assert not seated.finish and not queued.tokens
    driver.finish()


def test_files_that_hang_keep_no_other_adapter_from_its_requests(
    start_core, adapters, prompt, tmp_path
) -> None:
    """With room in flight for one load; pipes that nobody writes to hang whoever opens them."""
    size = adapters[0].manifest.num_blocks
    driver = start_core(load_bytes_in_flight=size, ram_cache=1 << 24)
    hung = []
    for n in range(3):
        pipe = tmp_path / f"pipe{n}"
        os.mkfifo(pipe)
        rev = f"{n}" * 64
        manifest = msgspec.structs.replace(adapters[0].manifest, rev=rev, path=str(pipe))
        assert driver.call(lambda i, m=manifest: AddRevision(command_id=i, manifest=m)).code == ""
        hung.append((pipe, driver.submit(pipe.name, prompt(9, n), rev)))
        driver.step()
    driver.add(*adapters)
    for n, adapter in enumerate(adapters):
        story = driver.submit(f"r{n}", prompt(20, n), adapter.rev)
        driver.until(lambda story=story: story.finish)
        control = start_core()
        control.add(adapter)
        alone = control.submit("alone", prompt(20, n), adapter.rev)
        control.finish()
        assert story.tokens == alone.tokens
    for pipe, story in hung:
        assert not story.finish
        with open(pipe, "wb"):
            pass
    driver.finish()
    assert {story.code for _, story in hung} == {"load_failed"}


def test_a_request_that_is_cancelled_leaves_the_load_no_claim(
    start_core, adapters, prompt, monkeypatch
) -> None:
    """What is read when nobody wants it any more may give way at once, and takes no GPU."""
    gate, begin = threading.Event(), Readers._begin

    def slow(readers, file):
        assert gate.wait(20)
        begin(readers, file)

    monkeypatch.setattr(Readers, "_begin", slow)
    blocks = adapters[0].manifest.num_blocks
    driver = start_core()
    block_bytes = driver.core.machine.layout.block_bytes
    driver = start_core(ram_cache=blocks * block_bytes, load_bytes_in_flight=1)
    driver.add(adapters[0], adapters[3])
    left = driver.submit("left", prompt(9), adapters[0].rev)
    driver.step()
    driver.core.take(Abort("left"))
    driver.until(lambda: left.finish)
    stays = driver.submit("stays", prompt(9), adapters[3].rev)
    driver.step()
    gate.set()
    driver.finish()
    assert (left.finish, stays.finish) == ("abort", "length")
    assert driver.status(adapters[0].rev).state == "registered"
    assert driver.core.residency.host.used_bytes <= blocks * block_bytes
