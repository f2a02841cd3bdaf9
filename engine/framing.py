"""Messages as bytes: msgpack frames with a four-byte big-endian length in front.

Goes in: messages, or what a socket gave.  Comes out: frames, or messages.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from engine.messages import Command, Event, StepFrame
from engine.pooling_messages import FRAME_VALUE_BYTES, Pooled

#: Frames above this are a broken peer, not a message (a 128k-token prompt is under 1 MiB).
MAX_FRAME_BYTES = 256 << 20
T = TypeVar("T", Command, Event)
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Command | Event) -> bytes:
    """One message as a length-prefixed msgpack frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def in_parts(frame: StepFrame) -> Iterator[StepFrame]:
    """The same in order, in frames of at most FRAME_VALUE_BYTES of values, or of one result."""
    part: list[Pooled] = []
    held = 0
    for one in frame.pooled:
        if part and held + len(one.values) > FRAME_VALUE_BYTES:
            yield StepFrame(step=frame.step, pooled=tuple(part))
            part, held = [], 0
        part.append(one)
        held += len(one.values)
    yield msgspec.structs.replace(frame, pooled=tuple(part)) if frame.pooled else frame


class FrameReader(Generic[T]):
    """Cuts a byte stream into messages.  Feed it what `recv` returned, in any pieces."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[T]") -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield every message that `data` completes; raises ValueError on an oversized frame."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            if len(self._buffer) < 4 + size:
                return
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            yield self._decoder.decode(body)


def command_reader() -> "FrameReader[Command]":
    """The engine's side of the socket."""
    return FrameReader(msgspec.msgpack.Decoder(Command))


def event_reader() -> "FrameReader[Event]":
    """The daemon's side of the socket."""
    return FrameReader(msgspec.msgpack.Decoder(Event))
