"""Blobs: a shared place for bytes under keys, a folder or a bucket, as a catalog needs it.

Goes in: keys of plain words with slashes, bytes, files.  Comes out: the same.  What is created is
there whole or not at all, and by one writer of several.  Blocking: call it from threads.  Knows
nothing of what the bytes mean.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lorad import disk
from lorad.config import Settings
from lorad.errors import LoradError
from lorad.sources.patience import BRIEF, patiently, silent_meter
from lorad.sources.reference import parse_reference

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
#: What a file system says that has no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Blobs(Protocol):
    """Every method may raise LoradError: insufficient_storage, source_unreachable and the like."""

    def read(self, key: str) -> bytes | None:
        """All of one; None: it is not there."""
        ...

    def chunks(self, key: str) -> Iterator[bytes]:
        """The same in pieces; LoradError source_not_found."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """False, and nothing changed, if it is there already."""
        ...

    def put(self, key: str, data: bytes, *, rough: bool = False) -> None:
        """In place of what is there.  `rough`: whoever reads it can do with half of it, so that it
        may be written over where there is no room for two."""
        ...

    def put_file(self, key: str, path: Path) -> None: ...

    def names(self, prefix: str, after: str = "") -> list[str]:
        """What is right below `prefix`, which ends with a slash, sorted; later than `after`."""
        ...

    def marks(self, prefix: str, after: str = "") -> dict[str, str]:
        """The same, each with a word that is another one when it has been written anew."""
        ...

    def remove(self, key: str) -> None:
        """Gone already is fine."""
        ...


def open_blobs(where: str, settings: Settings) -> Blobs:
    """`s3://bucket/prefix`, or a folder's path.  Raises LoradError bad_reference."""
    if where.startswith("s3://"):
        return BucketBlobs(where, settings)
    if "://" in where or not where.startswith("/"):
        hint = "an absolute path that all machines share, or s3://BUCKET/PREFIX"
        raise LoradError("bad_reference", f"no place for a catalog: {where[:80]!r}", hint=hint)
    return FolderBlobs(Path(where))


class FolderBlobs:
    """A folder that every machine has mounted at the same or another path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error

    def chunks(self, key: str) -> Iterator[bytes]:
        try:
            with open(self._path(key), "rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    yield piece
        except FileNotFoundError:
            raise LoradError("source_not_found", f"{self._path(key)} is not there") from None
        except OSError as error:
            raise self._unreadable(error) from error

    def create(self, key: str, data: bytes) -> bool:
        path, fresh = self._path(key), self._fresh(key)
        with self._writing(len(data)):
            try:
                _write(fresh, data)
                os.link(fresh, path)  # NFS does it at once, too, and for one of several
            except FileExistsError:
                return fresh.stat().st_nlink > 1  # ours, if NFS had to ask twice for it
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise _unfit(self._folder) from error
                raise
            finally:
                fresh.unlink(missing_ok=True)
            _sync(path.parent)
        return True

    def put(self, key: str, data: bytes, *, rough: bool = False) -> None:
        path, fresh = self._path(key), self._fresh(key)
        with self._writing(len(data)):
            try:
                _write(fresh, data)
                os.replace(fresh, path)
            except OSError as error:
                fresh.unlink(missing_ok=True)  # once a second otherwise, on a disk that is full
                if not (rough and error.errno in disk.FULL and path.exists()):
                    raise
                _write_over(path, data)

    def put_file(self, key: str, path: Path) -> None:
        fresh = self._fresh(key)
        with self._writing(path.stat().st_size):
            try:
                shutil.copyfile(path, fresh)
                _sync(fresh)
                os.replace(fresh, self._path(key))
            except BaseException:
                fresh.unlink(missing_ok=True)
                raise

    def names(self, prefix: str, after: str = "") -> list[str]:
        try:
            found = os.listdir(self._folder / prefix)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error
        return sorted(name for name in found if name > after and not name.startswith("."))

    def marks(self, prefix: str, after: str = "") -> dict[str, str]:
        found = {}
        for name in self.names(prefix, after):
            with suppress(FileNotFoundError):
                stat = (self._folder / prefix / name).stat()
                found[name] = f"{stat.st_mtime_ns} {stat.st_size}"
        return found

    def remove(self, key: str) -> None:
        path = self._path(key)
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()  # if it was the last

    def _path(self, key: str) -> Path:
        return self._folder / key

    def _fresh(self, key: str) -> Path:
        """Where it is written before it gets its name, on the same file system."""
        path = self._path(key)
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path.parent / f".{uuid.uuid4().hex}"

    @contextmanager
    def _writing(self, num_bytes: int = 0) -> Iterator[None]:
        try:
            with disk.writing("write to the catalog", self._folder, num_bytes):
                yield
        except OSError as error:  # a network file system has more ways to fail
            raise self._unreadable(error, "written to") from error

    def _unreadable(self, error: OSError, what: str = "read") -> LoradError:
        message = f"the catalog in {self._folder} cannot be {what}: {error.strerror}"
        return LoradError("source_unreachable", message, hint="is it mounted on this machine?")


class BucketBlobs:
    """Objects below a prefix of an S3 bucket, or of a store that knows If-None-Match."""

    def __init__(self, where: str, settings: Settings) -> None:
        from lorad.sources import s3, s3_answers  # boto3 is an extra

        reference = parse_reference(where)
        self._where, self._bucket = where, reference.bucket
        self._prefix = f"{reference.prefix}/" if reference.prefix else ""
        self._probed = False
        self._told = s3_answers.told
        self._client = self._ask(lambda: s3.client_of(settings))

    def read(self, key: str) -> bytes | None:
        try:
            answer = self._ask(lambda: self._client.get_object(**self._at(key)))
            data: bytes = self._ask(answer["Body"].read)
            return data
        except LoradError as error:
            if error.code == "source_not_found" and self._there():
                return None
            raise

    def chunks(self, key: str) -> Iterator[bytes]:
        answer = self._ask(lambda: self._client.get_object(**self._at(key)))
        yield from answer["Body"].iter_chunks(CHUNK_BYTES)

    def create(self, key: str, data: bytes) -> bool:
        if not self._probed:
            self._probe()
        return self._create(key, data)

    def _probe(self) -> None:
        """A store that does not know the condition would let two gateways write one table."""
        word = uuid.uuid4().hex
        self._create("probe", b"")
        if self._create("probe", word.encode()):
            message = f"the store of {self._where} overwrites what it was told to create once"
            hint = "a store that knows If-None-Match, or a shared folder"
            raise LoradError("bad_reference", message, hint=hint)
        self._probed = True

    def _create(self, key: str, data: bytes) -> bool:
        try:
            self._ask(lambda: self._client.put_object(Body=data, IfNoneMatch="*", **self._at(key)))
        except LoradError as error:
            if error.code == "conflict":
                # An attempt whose answer was lost may have been ours.
                return self.read(key) == data
            raise
        return True

    def put(self, key: str, data: bytes, *, rough: bool = False) -> None:
        self._ask(lambda: self._client.put_object(Body=data, **self._at(key)))

    def put_file(self, key: str, path: Path) -> None:
        def put() -> None:
            with open(path, "rb") as file:
                self._client.put_object(Body=file, **self._at(key))

        self._ask(put)

    def names(self, prefix: str, after: str = "") -> list[str]:
        return sorted(self.marks(prefix, after))

    def marks(self, prefix: str, after: str = "") -> dict[str, str]:
        whole, found = self._prefix + prefix, dict[str, str]()
        more: dict[str, str] = {"StartAfter": whole + after} if after else {}
        while True:
            page = self._ask(
                lambda: self._client.list_objects_v2(
                    Bucket=self._bucket,
                    Prefix=whole,
                    Delimiter="/",
                    **more,  # noqa: B023
                )
            )
            found |= {o["Key"].removeprefix(whole): o["ETag"] for o in page.get("Contents", ())}
            for folder in page.get("CommonPrefixes", ()):
                found[folder["Prefix"].removeprefix(whole)[:-1]] = ""
            if not page.get("IsTruncated"):
                return {name: mark for name, mark in found.items() if name > after}
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, key: str) -> None:
        self._ask(lambda: self._client.delete_object(**self._at(key)))

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _there(self) -> bool:
        """A bucket that is gone is no catalog without that key."""
        self._ask(lambda: self._client.head_bucket(Bucket=self._bucket))
        return True

    def _ask(self, call: Callable[[], T]) -> T:
        return patiently(lambda: self._told(call, self._where), silent_meter(), BRIEF)


def _unfit(folder: Path) -> LoradError:
    """Without them nothing can appear as a whole, and once."""
    message = f"the file system of {folder} has no hard links, which a catalog needs"
    return LoradError("bad_reference", message, hint="a local disk or NFS, or s3://BUCKET/PREFIX")


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_over(path: Path, data: bytes) -> None:
    """Within the room that it has."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
