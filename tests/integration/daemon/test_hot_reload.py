"""Replacing under load: many streams on two names whose content changes again and again.

One name is replaced by `loractl add --replace`, the other through the inbox.  Every stream is
compared with a control run of the revision that it began with, asked alone; a revision that was
never served before finds no cached prefix; candidates that are refused change nothing and say why.
"""

import json
import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from safetensors.numpy import load_file, save_file

from lorad import wire
from lorad.client import ApiError

LENGTHS = (3, 9, 30)
UPLOADED, DROPPED = "reload/uploaded", "reload/dropped"
#: Contents that other names keep packed, so that most replacements cost no packing.
KEPT = (500, 501, 502)


@dataclass(frozen=True, slots=True)
class Heard:
    """One stream, from its first byte to its last.  Times are the test's clock."""

    name: str
    rev: str
    length: int
    text: str
    cached: int
    asked: float
    flips: int  # of its name between its first byte and its last


@dataclass
class Load:
    """Streams that ask without a pause until they are told to stop."""

    daemon: object
    streams: int
    heard: list[Heard] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    flips: Counter = field(default_factory=Counter)

    def __enter__(self):
        self.over = threading.Event()
        names = [UPLOADED, DROPPED] * (self.streams // 2)
        self.threads = [
            threading.Thread(target=self.work, args=(name, n)) for n, name in enumerate(names)
        ]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a stream never ended"

    def work(self, name, number):
        with self.daemon.http() as http:
            while not self.over.is_set() and len(self.failures) < 10:
                number += 1
                try:
                    self.heard.append(self.one(http, name, LENGTHS[number % len(LENGTHS)]))
                except Exception as error:
                    self.failures.append(f"{name}: {error!r}")

    def one(self, http, name, length):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = self.daemon.body(name, length, **options)
        parts, usage, asked = [], None, time.monotonic()
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            rev, flips = answer.headers["x-lorad-rev"], self.flips[name]
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        for line in lines:
            if line != "data: [DONE]":
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                parts += [choice["text"] for choice in chunk["choices"]]
                usage = chunk.get("usage") or usage
        assert lines[-1] == "data: [DONE]"
        assert usage["completion_tokens"] == length, usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Heard(name, rev, length, "".join(parts), cached, asked, self.flips[name] - flips)


def spoil(folder, how):
    """Make an adapter one that has to be refused."""
    path = folder / "adapter_model.safetensors"
    if how == "E_NONFINITE":
        tensors = load_file(path)
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, path)
    else:
        path.write_bytes(path.read_bytes()[:-100])


class Scene:
    """Replaces both names; `served` is what each meant, in order, with the time from which on."""

    def __init__(self, daemon, make_adapter, poll):
        self.daemon, self.make, self.poll = daemon, make_adapter, poll
        self.served = {UPLOADED: [], DROPPED: []}
        self.seeds = {}  # revision -> seed
        self.refusals = []

    def start(self):
        for seed in KEPT:
            added = self.daemon.upload(f"kept-{seed}", seed)
            self.seeds[added.rev] = seed
        self.replace(UPLOADED, KEPT[0])
        self.replace(DROPPED, KEPT[1])

    def replace(self, name, seed):
        """Until the name means content `seed`; returns its revision."""
        if name == UPLOADED:
            rev = self.daemon.upload(name, seed, replace=True).rev
        else:
            before = self.daemon.adapter(name)
            self.daemon.drop(name, seed)
            rev = self.poll(lambda: self.flipped(name, before), f"{name} to be replaced")
        self.served[name].append((rev, time.monotonic()))
        self.seeds[rev] = seed
        return rev

    def flipped(self, name, before):
        row = self.daemon.adapter(name)
        if row is None or not row.rev or row.state == "quarantined":
            return None
        return row.rev if before is None or row.rev != before.rev else None

    def refuse(self, name, seed, reason):
        """A candidate that fails; the old one serves on, and `show` says why."""
        before = self.daemon.adapter(name)
        folder = self.make(self.daemon.root / f".bad-{seed}", seed)
        spoil(folder, reason)
        if name == UPLOADED:
            with self.daemon.client() as client, pytest.raises(ApiError) as caught:
                start = wire.UploadStart(name=name, replace=True)
                client.upload(folder, start)
            assert caught.value.code == "adapter_invalid"
            assert caught.value.details["reason"] == reason
        else:
            aside = self.daemon.root / f".aside-{seed}"
            (self.daemon.inbox / name).rename(aside)
            folder.rename(self.daemon.inbox / name)
            self.poll(lambda: self.daemon.adapter(name).reason == reason, "the refusal")
            shutil.rmtree(aside)
        row = self.daemon.adapter(name)
        assert row.rev == before.rev and row.state != "quarantined"
        shutil.rmtree(folder, ignore_errors=True)

    def controls(self):
        """revision -> its text alone, with nothing cached; contents that have left are added once
        more."""
        found = {}
        for rev, seed in self.seeds.items():
            added = self.daemon.upload("control", seed, replace=True)
            assert added.rev == rev
            answer = self.daemon.ask("control", max(LENGTHS), cache_salt=rev).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            found[rev] = answer["choices"][0]["text"]
        return found


@pytest.fixture
def scene(make_daemon, make_adapter, poll):
    daemon = make_daemon()
    daemon.inbox.mkdir(parents=True)
    daemon.start()
    yield Scene(daemon, make_adapter, poll)
    assert daemon.stop() == 0, daemon.tail()


def reload_under_load(scene, times, fresh_every, streams):
    """`times` replacements under so many streams, every `fresh_every`th with new content."""
    scene.start()
    fresh, bad = iter(range(1000, 9000)), iter(range(9000, 9999))
    with Load(scene.daemon, streams) as load:
        for n in range(times):
            name = (UPLOADED, DROPPED)[n % 2]
            is_fresh = (n // 2) % fresh_every == fresh_every - 1
            seed = next(fresh) if is_fresh else KEPT[(n // 2) % len(KEPT)]
            scene.replace(name, seed)
            load.flips[name] += 1
            if n % (times // 2) == times // 4:
                reason = ("E_NONFINITE", "E_TRUNCATED")[n * 2 // times]
                for name in (UPLOADED, DROPPED):
                    scene.refuse(name, next(bad), reason)
                    scene.replace(name, next(fresh))
                    load.flips[name] += 1
    return load


def judge(scene, load):
    """Everything that has to hold of what was heard."""
    assert load.failures == []
    assert any(one.cached for one in load.heard), "nothing was ever found in the cache"
    controls = scene.controls()
    over_a_flip, first_ones = 0, 0
    for one in load.heard:
        whole = one.text.rstrip("\ufffd")  # its last character may be cut
        assert controls[one.rev].startswith(whole), f"not what {one.rev[:8]} says alone"
        flips = scene.served[one.name]
        told = [rev for rev, when in flips if when <= one.asked]
        later = [rev for rev, when in flips if when > one.asked]
        assert one.rev in (told[-1], *later), "an old revision after the flip was told"
        over_a_flip += one.flips > 0
    for rev, seed in scene.seeds.items():
        if seed in KEPT:
            continue  # it was served before: its own prefix may be cached
        own = [one for one in load.heard if one.rev == rev]
        first_ones += bool(own)
        assert not own or min(one.cached for one in own) == 0, f"{rev[:8]} began with a prefix"
    return over_a_flip, first_ones


@pytest.mark.parametrize(
    ("times", "streams"), [(10, 16), pytest.param(16, 32, marks=pytest.mark.late)]
)
def test_replacements_under_load_lose_and_confuse_nothing(scene, times, streams):
    load = reload_under_load(scene, times, fresh_every=4, streams=streams)
    over_a_flip, first_ones = judge(scene, load)
    assert over_a_flip > 20, over_a_flip
    assert first_ones >= 4, first_ones


@pytest.mark.slow
def test_a_thousand_replacements_under_load_lose_and_confuse_nothing(scene):
    load = reload_under_load(scene, 1000, fresh_every=10, streams=32)
    over_a_flip, first_ones = judge(scene, load)
    assert over_a_flip > 200, over_a_flip
    assert first_ones > 20, first_ones
