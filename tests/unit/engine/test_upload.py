"""The ring of upload buffers on a card: none is filled again before its own copy has ended."""

from types import SimpleNamespace

import pytest
import torch

from engine import upload

DEVICE = SimpleNamespace(type="cuda")


class Event:
    """Records and waits are told to `said`."""

    def __init__(self, number: int, said: list[tuple[str, int]]) -> None:
        self.number, self.said = number, said

    def record(self, stream: object) -> None:
        self.said.append(("copied", self.number))

    def synchronize(self) -> None:
        self.said.append(("waited for", self.number))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What happens to the ring's events, where there is no card."""
    told: list[tuple[str, int]] = []
    numbers = iter(range(100))
    zeros = torch.zeros
    monkeypatch.setattr(upload, "_event", lambda: Event(next(numbers), told))
    monkeypatch.setattr(torch, "zeros", lambda words, dtype, **_: zeros(words, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return told


def test_a_buffer_is_filled_again_only_after_its_own_copy(said: list[tuple[str, int]]) -> None:
    ring = upload.UploadRing(8, DEVICE)  # type: ignore[arg-type]
    places: list[int] = []
    for turn in range(10):
        buffer = ring.next()
        places.append(buffer.ctypes.data)
        buffer[:] = turn
        ring.send(8)
        assert ring.device_words.tolist() == [turn] * 8
    count = len(set(places))
    assert count >= 3
    assert places == [*places[:count] * 10][:10], "in turns"
    waits = [number for what, number in said if what == "waited for"]
    copies = [number for what, number in said if what == "copied"]
    assert waits == copies, "each by the event of the buffer that is handed out"
    assert [what for what, _ in said] == ["waited for", "copied"] * 10


def test_words_beyond_those_that_were_sent_stay_where_they_are(said: list[tuple[str, int]]) -> None:
    ring = upload.UploadRing(4, DEVICE)  # type: ignore[arg-type]
    for first, end, value in ((0, 4, 1), (1, 3, 2)):
        ring.next()[:] = value
        ring.send(end, first)
    assert ring.device_words.tolist() == [1, 2, 2, 1]
