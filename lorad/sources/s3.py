"""`s3://bucket/prefix`: the objects right below a prefix, of Amazon's or any other S3 endpoint.

Goes in: bucket and prefix.  Comes out: the adapter's files among the objects, each fetched only as
long as it has the etag that it was listed with.  boto3 knows endpoints, regions and credentials,
and is an extra of lorad.  An etag is no checksum (of a multipart upload it is of its parts), so it
tells versions apart and no more; where a store keeps the sha256 of a whole object, it is checked.
"""

import base64
import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import httpx

from lorad import __version__
from lorad.config import Settings
from lorad.sources import addresses, disk, transfer, wanted
from lorad.sources.errors import FetchError
from lorad.sources.fetch import Progress, Reference, RemoteFile, Resolved
from lorad.sources.local import MAX_TRACES
from lorad.sources.patience import (
    BRIEF,
    Again,
    Meter,
    Patience,
    patiently,
    silent_meter,
)
from lorad.sources.reference import parse_reference
from lorad.sources.s3_answers import boto3, botocore, corrupt, failures, told

T = TypeVar("T")

#: Pages of a thousand objects; a prefix with more is no adapter's.
MAX_PAGES = 100
_CHUNK_BYTES = 64 << 10


class S3Fetcher:
    """One endpoint with one set of credentials."""

    def __init__(self, settings: Settings, *, patience: Patience | None = None) -> None:
        self._patience, self._brief = patience or Patience(), patience or BRIEF
        self._max_bytes = settings.watch.max_adapter_bytes
        try:
            self._client = told(lambda: client_of(settings), "s3")
        except (Again, ValueError) as error:
            raise FetchError(
                "bad_reference",
                f"boto3 cannot be set up: {' '.join(str(error).split())[:200]}",
                hint="look at `[s3]`, AWS_ENDPOINT_URL, and ~/.aws/config",
            ) from None
        self._where = str(self._client.meta.endpoint_url)
        addresses.need_allowed(httpx.URL(self._where), settings.pull.plain_http)

    def resolve(self, reference: Reference) -> Resolved:
        """The objects and their etags.  A reference with a digest of etags must still have it."""
        found, names = self._list(reference)
        if not names:
            raise FetchError(
                "source_not_found",
                f"{reference.text} holds no objects",
                hint="look at the prefix: `aws s3 ls` says what there is",
            )
        listed = wanted.choose(found, names, self._max_bytes)
        digest = _digest(listed)
        if reference.revision not in ("", digest):
            raise FetchError(
                "conflict",
                f"{reference.text} has changed: its etags are #etags={digest} now",
                hint="leave #etags= out to pull what is there now",
            )
        files = [self._checked(reference, file) for file in listed]
        text = f"{reference.text.partition('#etags=')[0]}#etags={digest}"
        return Resolved(text, tuple(files), wanted.total_of(files), digest)

    def fetch(
        self,
        resolved: Resolved,
        folder: Path,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        reference = parse_reference(resolved.reference)
        meter = Meter(progress, cancelled, resolved.total_bytes)
        disk.need_room(folder, resolved.total_bytes)
        for file in resolved.files:
            meter.begin()
            target = folder / file.name
            if not target.is_file():
                self._bring(reference, file, target, meter)
            meter.at(target.stat().st_size)

    # ------------------------------------------------------------- asking
    def _list(self, reference: Reference) -> tuple[list[RemoteFile], list[str]]:
        """The objects right below the prefix, and the names of all that lies there."""
        prefix = f"{reference.prefix}/" if reference.prefix else ""
        found: list[RemoteFile] = []
        names: list[str] = []
        more: dict[str, str] = {}
        for _ in range(MAX_PAGES):
            page = self._ask(
                reference,
                lambda: self._client.list_objects_v2(
                    Bucket=reference.bucket,
                    Prefix=prefix,
                    Delimiter="/",
                    **more,  # noqa: B023
                ),
            )
            for thing in page.get("Contents", ()):
                name = thing["Key"].removeprefix(prefix)
                found.append(RemoteFile(name, int(thing["Size"]), etag=thing.get("ETag", "")))
                names.append(name)
            names += [p["Prefix"].removeprefix(prefix) for p in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        return found, [name for name in names if name][:MAX_TRACES]

    def _checked(self, reference: Reference, file: RemoteFile) -> RemoteFile:
        """With its sha256, if the store has one of the whole object."""
        told_of = self._ask(
            reference,
            lambda: self._client.head_object(
                Bucket=reference.bucket, Key=_key(reference, file), ChecksumMode="ENABLED"
            ),
        )
        text = told_of.get("ChecksumSHA256", "")
        if not text or "-" in text:  # of the parts' checksums
            return file
        sha256 = base64.b64decode(text).hex()
        return RemoteFile(file.name, file.size, sha256 if len(sha256) == 64 else "", file.etag)

    def _ask(self, reference: Reference, call: Callable[[], T]) -> T:
        return patiently(
            lambda: told(call, reference.text, self._where), silent_meter(), self._brief
        )

    # ------------------------------------------------------------- bringing
    def _bring(self, reference: Reference, file: RemoteFile, target: Path, meter: Meter) -> None:
        part = disk.part_of(target)
        with disk.growing(part) as out:
            patiently(
                lambda: told(
                    lambda: self._receive(reference, file, out, meter), reference.text, self._where
                ),
                meter,
                self._patience,
            )
            if file.sha256 and not disk.matches(out, file, meter):
                out.truncate(0)
                raise corrupt(f"{file.name} of {reference.text}")
        with disk.writing(target.name):
            os.replace(part, target)

    def _receive(self, reference: Reference, file: RemoteFile, out: Any, meter: Meter) -> None:
        """The object, or the rest of it, as long as it is the one that was listed."""
        have = out.seek(0, 2)
        if file.size is not None and have >= file.size:
            if have == file.size:
                return
            out.truncate(0)
            have = out.seek(0)
        asked = {"Range": f"bytes={have}-"} if have else {}
        if file.etag:
            asked["IfMatch"] = file.etag
        answer = self._client.get_object(
            Bucket=reference.bucket, Key=_key(reference, file), **asked
        )
        if have and not answer.get("ContentRange", "").startswith(f"bytes {have}-"):
            out.truncate(0)
            have = out.seek(0)
        body = answer["Body"]
        try:
            for chunk in body.iter_chunks(_CHUNK_BYTES):
                have += len(chunk)
                if file.size is not None and have > file.size:
                    raise corrupt(f"{file.name} of {reference.text}")
                disk.write(out, chunk)
                meter.at(have)
        except failures.FlexibleChecksumError:
            out.truncate(0)
            raise corrupt(f"{file.name} of {reference.text}") from None
        finally:
            body.close()
        if file.size is not None and have != file.size:
            raise Again(transfer.unreachable(self._where, "the connection ended too early"))


@lru_cache(maxsize=1)
def _loader() -> Any:
    """What boto3 knows of services: reading it is most of the 160 ms that a client takes."""
    return botocore.loaders.create_loader()


def client_of(settings: Settings) -> Any:
    """A client that tries once: the patience is ours."""
    env = os.environ
    named = settings.s3.endpoint or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    config = botocore.config.Config(
        connect_timeout=settings.pull.timeout,
        read_timeout=settings.pull.timeout,
        retries={"total_max_attempts": 1},
        user_agent_extra=f"lorad/{__version__}",
        # other stores rarely have a host name for each bucket
        s3={"addressing_style": "path"} if named else None,
        signature_version=botocore.UNSIGNED if settings.s3.unsigned else None,
    )
    core = botocore.session.get_session()
    core.register_component("data_loader", _loader())
    return boto3.session.Session(botocore_session=core).client(
        "s3",
        endpoint_url=settings.s3.endpoint or None,
        region_name=settings.s3.region or None,
        config=config,
    )


def _key(reference: Reference, file: RemoteFile) -> str:
    return f"{reference.prefix}/{file.name}" if reference.prefix else file.name


def _digest(files: list[RemoteFile]) -> str:
    """One word for all etags; another as soon as any file is."""
    rows = sorted(f"{file.name}\0{file.etag}\0{file.size}\n" for file in files)
    return hashlib.sha256("".join(rows).encode()).hexdigest()[:32]
