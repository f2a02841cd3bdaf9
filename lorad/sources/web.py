"""`https://host/path`: an archive, or a folder whose files are asked for by name.

Goes in: a URL; with `#sha256=` also what the archive, or the weights file of the folder, must have.
Comes out: the files in a folder of the caller's.  A URL that ends in .tar, .tar.gz, .tgz or .zip is
an archive.  Servers list nothing, so each name that lorad reads is asked for.
"""

import os
from collections.abc import Callable
from pathlib import Path

import httpx

from engine.adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_FILES
from lorad.config import Settings
from lorad.sources import addresses, archive, disk, transfer, wanted
from lorad.sources.errors import FetchError
from lorad.sources.fetch import Progress, Reference, RemoteFile, Resolved
from lorad.sources.local import FILES
from lorad.sources.patience import BRIEF, Meter, Patience, silent_meter
from lorad.sources.transfer import Refused, Transfer

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")


class WebFetcher:
    """`reference` is the whole of it: what is resolved later lacks the query of a signed URL."""

    def __init__(
        self, reference: Reference, settings: Settings, *, patience: Patience | None = None
    ) -> None:
        self._reference, self._settings, self._patience = reference, settings, patience
        self._brief = patience or BRIEF
        self._max_bytes = settings.watch.max_adapter_bytes
        try:
            self._url = httpx.URL(reference.url)
        except httpx.InvalidURL:
            raise FetchError(
                "bad_reference",
                f"{reference.text} cannot be read as a URL",
                hint="write https://HOST/PATH",
            ) from None
        addresses.need_allowed(self._url, settings.pull.plain_http)

    def resolve(self, reference: Reference) -> Resolved:
        """Sizes and etags; of a folder, also which files there are."""
        with Transfer(self._settings) as client:
            if self._is_archive:
                name = self._url.path.rsplit("/", 1)[-1]
                found = self._look(client, name, str(self._url))
                if found is None:
                    raise self._nothing()
                wanted.need_total(found.size or 0, self._max_bytes)
                files = [found]
            else:
                files = self._look_around(client)
        return Resolved(
            reference.text, tuple(files), wanted.total_of(files), commit=reference.sha256
        )

    def fetch(
        self,
        resolved: Resolved,
        folder: Path,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """An archive is downloaded whole beside its files, unpacked, and removed."""
        meter = Meter(progress, cancelled, resolved.total_bytes)
        disk.need_room(folder, resolved.total_bytes)
        with Transfer(self._settings, patience=self._patience) as client:
            for file in resolved.files:
                meter.begin()
                if self._is_archive:
                    self._bring_archive(client, file, folder, meter)
                else:
                    self._bring(client, file, folder / file.name, meter)

    # ------------------------------------------------------------- looking
    @property
    def _is_archive(self) -> bool:
        return self._url.path.lower().endswith(ARCHIVES)

    def _url_of(self, name: str) -> str:
        path = self._url.path.rstrip("/") + "/" + name
        return str(self._url.copy_with(path=path))

    def _look_around(self, client: Transfer) -> list[RemoteFile]:
        found = [f for name in FILES if (f := self._look(client, name, self._url_of(name)))]
        if not found:
            raise self._nothing()
        return wanted.choose(found, [file.name for file in found], self._max_bytes)

    def _look(self, client: Transfer, name: str, url: str) -> RemoteFile | None:
        """What HEAD says of a file; where HEAD is not allowed (as by URLs that are signed for GET),
        the headers of GET."""
        try:
            try:
                response = client.head(url, silent_meter(), self._brief)
            except Refused as refused:
                if refused.status in (401, 404, 410):
                    raise
                response = client.head(url, silent_meter(), self._brief, method="GET")
        except Refused as refused:
            # stores that may not be listed say 403 of what they lack
            absent = (404, 410) if name in (CONFIG_FILE, WEIGHTS_FILE) else (403, 404, 410)
            if refused.status in absent and not self._is_archive:
                return None
            raise self._refused(refused) from None
        length = response.headers.get("Content-Length", "")
        etag = response.headers.get("ETag", "")
        return RemoteFile(
            name,
            int(length) if length.isdecimal() and len(length) < 20 else None,
            sha256=self._reference.sha256 if self._is_archive or name in WEIGHTS_FILES else "",
            etag=etag if etag.startswith('"') else "",
        )

    # ------------------------------------------------------------- bringing
    def _bring(self, client: Transfer, file: RemoteFile, target: Path, meter: Meter) -> None:
        part = disk.part_of(target)
        if target.is_file() and not part.exists():
            meter.at(target.stat().st_size)
            return
        self._download(client, file, self._url_of(file.name), part, meter)
        with disk.writing(target.name):
            os.replace(part, target)

    def _bring_archive(
        self, client: Transfer, file: RemoteFile, folder: Path, meter: Meter
    ) -> None:
        part = folder / ".archive.partial"
        if not part.exists() and (folder / CONFIG_FILE).is_file():
            return  # it is removed last
        self._download(client, file, str(self._url), part, meter)
        with part.open("rb") as packed:
            archive.unpack(packed, folder, self._max_bytes, meter)
        part.unlink()

    def _download(
        self, client: Transfer, file: RemoteFile, url: str, part: Path, meter: Meter
    ) -> None:
        limit = wanted.limit_of(file.name, self._max_bytes)
        with disk.growing(part) as out:
            try:
                client.get(
                    url,
                    out,
                    meter,
                    limit=limit,
                    size=file.size,
                    etag=file.etag,
                    resume=bool(file.etag or file.sha256),
                )
            except Refused as refused:
                raise self._refused(refused) from None
            if file.sha256 and not disk.matches(out, file, meter):
                out.truncate(0)
                raise FetchError(
                    "source_corrupt",
                    f"{file.name} of {self._reference.text.partition('#')[0]} arrived with another "
                    "sha256 than was asked for",
                    hint="ask whoever gave you the checksum; pulling again starts anew",
                )

    # ------------------------------------------------------------- refusals
    def _refused(self, refused: Refused) -> FetchError:
        if refused.status in (401, 403, 407):
            why = (
                "user, password or signature may be wrong, or have expired"
                if self._reference.private
                else "it may want a user and a password, or a signed URL"
            )
            return FetchError(
                "source_denied", f"{refused.url} answers {refused.status}: {why}", hint=_HINT
            )
        if refused.status in (404, 410):
            return FetchError("source_not_found", f"there is no {refused.url}", hint=_HINT)
        return transfer.unreachable(refused.url, f"it answers {refused.status}")

    def _nothing(self) -> FetchError:
        return FetchError(
            "source_not_found",
            f"{self._reference.text} holds neither {CONFIG_FILE} nor {WEIGHTS_FILE}",
            hint=f"name the folder that holds them, or an archive: {', '.join(ARCHIVES)}",
        )


_HINT = "open the address in a browser, or with curl, from this machine"
