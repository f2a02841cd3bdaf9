"""What the first rank tells the others between collectives, as frames on a socket.

Goes in: a message, for a step with its packed words behind it.  Comes out: the same on the other
side, in order.  A frame is two lengths, the message as msgpack, and raw words.  Knows neither steps
nor adapters.
"""

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.kernels.lora_meta import LoraClass
from engine.messages import PackedManifest

_LENGTHS = struct.Struct("<II")
#: Of a socket: a step of the largest prompts is told in one piece.
SOCKET_BYTES = 4 << 20
READ_BYTES = 1 << 18


class Kind(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Plans of this class are told by their number from now on, whatever it meant before."""

    number: int
    kind: LoraClass


class Slot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What is in a slot of the table, for the steps to come."""

    slot: int
    generation: int
    blocks: tuple[int, ...]
    manifest: PackedManifest


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A forward pass: `batch.Packed`, whose words follow, `types` of them; the plan, by its number
    (-1 = none) or by segments; owners of rows that adapters embed; prompt rows that are owed."""

    seqs: int
    rows: int
    draws: int
    width: int
    sizes: tuple[int, ...]  # of each part of the words, in items
    types: tuple[str, ...]
    kind: int
    segments: tuple[tuple[int, int, int], ...]
    owners: list[tuple[int, int]] | None
    owed: list[tuple[int, int]]


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bring a revision into these blocks: its shards begin at block `place` of host memory."""

    rev: str
    place: int
    blocks: tuple[int, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A copy is not wanted any more; it is reported all the same."""

    rev: str


class Serve(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The start is over; host memory has its size."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End."""


class Copied(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The other way: the copy of a revision has ended on this rank."""

    rev: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The other way, as last words: an EngineError that ends this rank."""

    code: str
    message: str
    hint: str


Told = Kind | Slot | Step | Copy | Cancel | Serve | Stop | Copied | Failed
_decoder = msgspec.msgpack.Decoder(Told)
_encoder = msgspec.msgpack.Encoder()


def frame(told: Told, words: Sequence[npt.NDArray[Any]] = ()) -> bytes:
    """A message and what follows it, as bytes."""
    head = _encoder.encode(told)
    parts = [part.tobytes() for part in words]
    return b"".join((_LENGTHS.pack(len(head), sum(map(len, parts))), head, *parts))


class Reader:
    """Messages as they come from `sock`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = bytearray()

    @property
    def has_more(self) -> bool:
        """A whole message is here."""
        if len(self._held) < _LENGTHS.size:
            return False
        head, words = _LENGTHS.unpack_from(self._held)
        return len(self._held) >= _LENGTHS.size + int(head) + int(words)

    def next(self) -> tuple[Told, bytes] | None:
        """The next message and its words; waits.  None: the other side is gone."""
        while not self.has_more:
            data = self._sock.recv(READ_BYTES)
            if not data:
                return None
            self._held += data
        head, words = _LENGTHS.unpack_from(self._held)
        middle = _LENGTHS.size + head
        end = middle + words
        told = _decoder.decode(memoryview(self._held)[_LENGTHS.size : middle])
        payload = bytes(memoryview(self._held)[middle:end])
        del self._held[:end]
        return told, payload


def words_of(step: Step, payload: bytes) -> tuple[npt.NDArray[Any], ...]:
    """The parts of a step's words; the last one, the tables, has a row a sequence."""
    found, at = [], 0
    for size, kind in zip(step.sizes, step.types, strict=True):
        part = np.frombuffer(payload, dtype=kind, count=size, offset=at)
        found.append(part)
        at += part.nbytes
    return (*found[:-1], found[-1].reshape(step.seqs, step.width))
