"""The header of a safetensors file, read by hand and believed in nothing.

Goes in: a descriptor.  Comes out: a TensorRef for every tensor, in file order, with offsets that
are contiguous, inside the file, and equal to shape x dtype; or AdapterInvalid.  Cheap counts come
before the JSON parser, so that a hostile header costs at most a few tens of MiB and milliseconds.
Reads no tensor byte, and knows nothing of LoRA.
"""

import os
from typing import Any

from engine.adapters.adapter_folder import gguf, pickle, refuse_pointer
from engine.adapters.manifest import WEIGHTS_FILE, Limits, TensorRef
from engine.adapters.reasons import refuse, shown
from engine.adapters.strict_json import read_object

#: dtype -> bytes an element.  Those below a byte are missing: no factor is stored so.
ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

MAX_DIMS = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIM = 1 << 48
#: No module of a model is nested so deeply.  To look at 8 Mi characters takes 30 ms.
_MAX_NAME = 4096
#: A tensor's entry has two commas between its fields, one between offsets, and one a dimension.
_MAX_COMMAS_EACH = 16
#: Above this a header must be ASCII: one wide character makes Python take four bytes for each.
_MAX_WIDE_BYTES = 1 << 20

_PICKLE_HEADS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_AGAIN = "copy or save the file again; safetensors.torch.save_file writes a correct one"


def read_header(fd: int, limits: Limits, file: str = WEIGHTS_FILE) -> tuple[TensorRef, ...]:
    """Every tensor of the file, which messages call `file`.  Raises AdapterInvalid."""
    size = os.fstat(fd).st_size
    length = _header_length(fd, size, limits, file)
    raw = os.pread(fd, length, 8)
    if len(raw) < length:
        raise _truncated(file, size, 8 + length)
    _count_first(raw, limits)
    entries = read_object(raw, what="the safetensors header", code="E_HEADER", hint=_AGAIN)
    entries.pop("__metadata__", None)
    if len(entries) > limits.max_tensors:
        raise _too_many(f"{len(entries)}", limits)
    refs = tuple(_tensor(name, entry, 8 + length) for name, entry in entries.items())
    _check_offsets(refs, 8 + length, size, file)
    return refs


def _header_length(fd: int, size: int, limits: Limits, file: str) -> int:
    head = os.pread(fd, 64, 0)
    refuse_pointer(file, head)
    if head.startswith(b"GGUF"):
        raise gguf(f"{file} begins with GGUF")
    # A zip (torch.save) or a bare pickle.  Some of these are possible lengths, but then a brace
    # follows them.
    if head.startswith(_PICKLE_HEADS) and head[8:9] != b"{":
        raise pickle(file)
    if size > limits.max_bytes:
        raise refuse(
            "E_FILE_TOO_LARGE",
            f"{file} has {size} bytes, allowed are {limits.max_bytes}",
            "raise `[watch] max_adapter_bytes`",
        )
    if len(head) < 8:
        raise _truncated(file, size, 8)
    length = int.from_bytes(head[:8], "little")
    if length > limits.max_header:
        raise refuse(
            "E_HEADER_TOO_LARGE",
            f"the header says it has {length} bytes, allowed are {limits.max_header}",
            _AGAIN,
        )
    if length > size - 8:
        raise _truncated(file, size, 8 + length)
    if length < 2 or head[8:9] != b"{":
        raise refuse(
            "E_HEADER",
            f"{file} is not a safetensors file: no JSON object after the length {length}",
            _AGAIN,
        )
    return length


def _count_first(raw: bytes, limits: Limits) -> None:
    """Bound what parsing can allocate, by counting punctuation."""
    tensors = limits.max_tensors
    if raw.count(b"data_offsets") > tensors or raw.count(b"{") > 2 * tensors + 2:
        raise _too_many(f"about {raw.count(b'{') - 1}", limits)
    if raw.count(b"[") > 4 * tensors or raw.count(b",") > _MAX_COMMAS_EACH * tensors:
        raise refuse("E_HEADER", "the header is not a flat list of tensors", _AGAIN)
    if len(raw) > _MAX_WIDE_BYTES and not raw.isascii():
        raise refuse(
            "E_HEADER", f"a header of {len(raw)} bytes holds other than ASCII characters", _AGAIN
        )


def _tensor(name: str, entry: Any, data_start: int) -> TensorRef:
    if len(name) > _MAX_NAME:
        raise _bad_entry(name, f"has a name of {len(name)} characters")
    if not name.isprintable():  # lone surrogates too, which no encoder takes
        raise _bad_entry(name, "has a name with unprintable characters")
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise _bad_entry(name, "wants exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise refuse(
            "E_DTYPE",
            f"{shown(name)} has dtype {shown(dtype)}",
            "save the adapter as float32, bfloat16 or float16",
        )
    if not _are_sizes(shape, MAX_DIMS):
        raise _bad_entry(name, f"has the shape {shown(shape)}")
    if not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise _bad_entry(name, f"has the data_offsets {shown(offsets)}")
    span = ITEMSIZES[dtype]
    for dim in shape:
        span *= dim
    begin, end = offsets
    if end - begin != span:
        raise refuse(
            "E_SPAN",
            f"{shown(name)}: shape {shown(shape)} of {dtype} takes {shown(span)} bytes,"
            f" its offsets give {end - begin}",
            _AGAIN,
        )
    return TensorRef(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _are_sizes(value: Any, most: int) -> bool:
    """Their number first: a hostile shape has hundreds of thousands."""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(number) is int and 0 <= number <= _MAX_DIM for number in value)
    )


def _check_offsets(refs: tuple[TensorRef, ...], data_start: int, size: int, file: str) -> None:
    at = data_start
    for ref in sorted(refs, key=lambda ref: (ref.begin, ref.end)):
        if ref.begin != at:
            fault = "overlaps the tensor before it" if ref.begin < at else "leaves a gap before it"
            raise refuse("E_OFFSETS", f"{shown(ref.name)} {fault}", _AGAIN)
        at = ref.end
    if at > size:
        raise _truncated(file, size, at)
    if at < size:
        raise refuse("E_OFFSETS", f"{size - at} bytes follow the last tensor", _AGAIN)


def _truncated(file: str, size: int, wanted: int) -> Exception:
    return refuse(
        "E_TRUNCATED",
        f"{file}: size {size}, header says {wanted}",
        "the copy is not complete: copy the file again",
    )


def _too_many(found: str, limits: Limits) -> Exception:
    return refuse(
        "E_TOO_MANY_TENSORS",
        f"the header lists {found} tensors, allowed are {limits.max_tensors}",
        "check that this is an adapter and not a whole model",
    )


def _bad_entry(name: str, fault: str) -> Exception:
    return refuse("E_HEADER", f"the header's entry {shown(name)} {fault}", _AGAIN)
