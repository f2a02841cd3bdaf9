"""`hf:ORG/REPO[@REV]`: a model repository of a Hugging Face hub, at one commit.

Goes in: a repository and a revision.  Comes out: the commit that it means, and that commit's files
in a folder, each held against the checksum that the hub has of it.  huggingface-hub knows endpoint,
token and API; the bytes come by `transfer`, into the hub's own cache, where another pull and other
programs find them.  Offline, by setting, by HF_HUB_OFFLINE or for one call, nothing is asked of
anybody: the cache has it, or not.
"""

from collections.abc import Callable
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, errors, hf_hub_url
from huggingface_hub.hf_api import ModelInfo

from engine.adapters.manifest import CONFIG_FILE, WEIGHTS_FILES
from lorad import __version__
from lorad.config import Settings
from lorad.sources import addresses, disk, transfer, wanted
from lorad.sources.errors import FetchError
from lorad.sources.fetch import Progress, Reference, RemoteFile, Resolved
from lorad.sources.hub_access import Hub, why_offline
from lorad.sources.hub_cache import HubCache
from lorad.sources.local import FILES
from lorad.sources.patience import BRIEF, Again, Meter, Patience, patiently, silent_meter
from lorad.sources.reference import parse_reference
from lorad.sources.transfer import Refused, Transfer

#: Whatever the HTTP library of huggingface-hub raises; which one it is depends on its version.
_NETWORK: type[Exception] = errors.HfHubHTTPError.__mro__[1]


class HubFetcher:
    """One hub.  `token` goes before the settings' and the environment's."""

    def __init__(
        self,
        settings: Settings,
        *,
        token: str = "",
        offline: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self._settings, self._patience = settings, patience
        self._brief = patience or BRIEF
        self._max_bytes = settings.watch.max_adapter_bytes
        self._offline = why_offline(settings, asked=offline)
        self._hub = Hub(settings, token)
        usual = Path(constants.HF_HUB_CACHE)
        self._cache = HubCache(Path(settings.hf.cache_dir or usual).absolute(), (usual,))

    def resolve(self, reference: Reference) -> Resolved:
        """The commit, and its files that an adapter consists of."""
        if self._offline:
            return self._from_cache(reference)
        info = self._ask(reference)
        commit, found = self._read(info)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        files = wanted.choose(found, names, self._max_bytes)
        return _resolved(reference, commit, files)

    def fetch(
        self,
        resolved: Resolved,
        folder: Path,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """By way of the cache, so every file is on the disk twice."""
        reference = parse_reference(resolved.reference)
        meter = Meter(progress, cancelled, resolved.total_bytes)
        with Transfer(self._settings, patience=self._patience) as client:
            for file in resolved.files:
                meter.begin()
                target = folder / file.name
                if not target.is_file() and not self._copy(reference, file, target, meter):
                    self._need_online(reference)
                    self._download(client, reference, file, target, meter)
                meter.at(target.stat().st_size)
        if not self._offline:
            revision = resolved.revision or resolved.commit
            self._cache.remember(reference.repo, revision, resolved.commit)

    # ------------------------------------------------------------- asking
    def _ask(self, reference: Reference) -> ModelInfo:
        addresses.need_allowed(httpx.URL(self._hub.endpoint), self._settings.pull.plain_http)
        api = HfApi(
            self._hub.endpoint,
            token=self._hub.token() or False,
            library_name="lorad",
            library_version=__version__,
        )

        def attempt() -> ModelInfo:
            try:
                return api.model_info(
                    reference.repo,
                    revision=reference.revision or "main",
                    files_metadata=True,
                    timeout=self._settings.pull.timeout,
                )
            except errors.HfHubHTTPError as error:
                status, headers = error.response.status_code, error.response.headers
                raise self._hub.refusal(reference, status, headers) from None
            except (_NETWORK, ConnectionError) as error:
                raise Again(self._unreachable(reference, error)) from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._hub.no_hub() from None

        return patiently(attempt, silent_meter(), self._brief)

    def _read(self, info: ModelInfo) -> tuple[str, list[RemoteFile]]:
        """The commit and the files of an answer, which may be anybody's."""
        commit = info.sha
        if not isinstance(commit, str) or len(commit) != 40 or not _is_hex(commit):
            raise self._hub.no_hub()
        found = []
        for sibling in info.siblings or ():
            if sibling.rfilename in FILES:
                size = sibling.lfs.size if sibling.lfs else sibling.size
                found.append(
                    RemoteFile(
                        sibling.rfilename,
                        size if isinstance(size, int) and size >= 0 else None,
                        sha256=sibling.lfs.sha256 if sibling.lfs else "",
                        blob_id="" if sibling.lfs else sibling.blob_id or "",
                    )
                )
        if any(not _is_hex(file.sha256) or not _is_hex(file.blob_id) for file in found):
            raise self._hub.no_hub()
        return commit, found

    # ------------------------------------------------------------- files
    def _copy(self, reference: Reference, file: RemoteFile, target: Path, meter: Meter) -> bool:
        """From the cache, if it is there and still what it should be."""
        found = self._cache.find(reference.repo, reference.revision, file.name)
        if found is None:
            return False
        try:
            with found.open("rb") as source:
                return disk.copy_checked(source, target, file, meter)
        except OSError:  # not ours to read: then it is fetched
            return False

    def _download(
        self,
        client: Transfer,
        reference: Reference,
        file: RemoteFile,
        target: Path,
        meter: Meter,
    ) -> None:
        repo, commit = reference.repo, reference.revision
        with self._cache.growing(repo, commit, file, meter) as blob:
            if self._copy(reference, file, target, meter):
                return  # somebody else brought it, while we waited for the lock
            for place in (target.parent, self._cache.folder):
                disk.need_room(place, file.size)
            url = hf_hub_url(repo, file.name, revision=commit, endpoint=self._hub.endpoint)
            checked = bool(file.sha256 or (file.blob_id and file.size is not None))
            try:
                client.get(
                    url,
                    blob.out,
                    meter,
                    limit=wanted.limit_of(file.name, self._max_bytes),
                    size=file.size,
                    resume=checked,
                    headers=self._hub.headers(),
                )
            except Refused as refused:
                raise self._hub.refused(reference, refused) from None
            blob.out.seek(0)
            if not disk.copy_checked(blob.out, target, file, meter):
                blob.drop()
                raise FetchError(
                    "source_corrupt",
                    f"{file.name} of {reference.text} arrived with another checksum than the hub's",
                    hint="pull it again: it starts anew; a proxy on the way may change files",
                )
            self._cache.link(repo, commit, file.name, blob.keep())

    # ------------------------------------------------------------- offline
    def _from_cache(self, reference: Reference) -> Resolved:
        commit = self._cache.commit(reference.repo, reference.revision)
        found = []
        for name in FILES if commit else ():
            path = self._cache.find(reference.repo, commit, name)
            if path:
                found.append(RemoteFile(name, path.stat().st_size, **_named_by(path)))
        names = {file.name for file in found}
        if CONFIG_FILE not in names or not names & set(WEIGHTS_FILES):
            raise self._missing(reference)
        files = wanted.choose(found, names, self._max_bytes)
        return _resolved(reference, commit, files)

    def _need_online(self, reference: Reference) -> None:
        if self._offline:
            raise self._missing(reference)

    def _missing(self, reference: Reference) -> FetchError:
        return FetchError(
            "source_offline",
            f"{reference.text} is not whole in the hub's cache at {self._cache.folder}, and lorad "
            f"is offline ({self._offline})",
            hint=f"unset {self._offline}, or fill the cache: HF_HUB_CACHE={self._cache.folder} "
            f"hf download {reference.repo}",
        )

    def _unreachable(self, reference: Reference, error: Exception) -> FetchError:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        failed = transfer.unreachable(self._hub.endpoint, why)
        commit = self._cache.commit(reference.repo, reference.revision)
        if commit and self._cache.find(reference.repo, commit, CONFIG_FILE):
            failed.hint = f"the cache at {self._cache.folder} has it: pull it with --offline"
        return failed


def _resolved(reference: Reference, commit: str, files: list[RemoteFile]) -> Resolved:
    return Resolved(
        f"hf:{reference.repo}@{commit}",
        tuple(files),
        wanted.total_of(files),
        commit,
        "" if reference.pinned else reference.revision or "main",
    )


def _named_by(path: Path) -> dict[str, str]:
    """The checksum that a blob of the cache is named by, if it is named by one."""
    if not _is_hex(path.name):
        return {}
    return {64: {"sha256": path.name}, 40: {"blob_id": path.name}}.get(len(path.name), {})


def _is_hex(text: str) -> bool:
    return isinstance(text, str) and all(c in "0123456789abcdef" for c in text)
