"""Where adapters may be fetched from, and the face that all such sources have.

    choice.fetcher_for(reference, settings) -> Fetcher      resolve, then fetch
    ├── hf:ORG/REPO[@commit]    hub.py        a model repository of a Hugging Face hub
    ├── s3://bucket/prefix      s3.py         objects of any S3 endpoint
    └── https://host/path       web.py        an archive, or a folder's files by name

Goes in: the text of a reference (`reference.parse_reference`) and the settings.  Comes out: what is
there, pinned (`Resolved`), then the files themselves in a folder of the caller's; or FetchError,
which names the cause and the next step.  Everything here blocks and is called on a thread.  Knows
nothing of names, of the registry, or of what the files say.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from lorad.sources.errors import Cancelled, FetchError
from lorad.sources.reference import Reference, Scheme, parse_reference

__all__ = [
    "Cancelled",
    "FetchError",
    "Fetcher",
    "Progress",
    "Reference",
    "RemoteFile",
    "Resolved",
    "Scheme",
    "parse_reference",
]

#: (bytes so far, bytes in all or None); called for every chunk, and never goes back.
Progress = Callable[[int, int | None], None]


class RemoteFile(Struct, frozen=True):
    """One file of an adapter at its source, or the one archive that holds them all.  What is None
    or "" the source does not tell."""

    name: str
    size: int | None
    sha256: str = ""
    etag: str = ""  # s3:, https: as it was sent; a file with another has changed
    blob_id: str = ""  # hf: git's, a checksum too


class Resolved(Struct, frozen=True):
    """What a reference means now.  `reference` is pinned, and safe to show and to store: hf: with
    the full commit, s3: with a digest of the etags, https: with its checksum if one was given."""

    reference: str
    files: tuple[RemoteFile, ...]
    total_bytes: int | None
    commit: str = ""  # hf: the commit; s3: a digest of the etags; https: "" or the checksum
    revision: str = ""  # hf: what was asked for, if that was no commit


class Fetcher(Protocol):
    """One source.  Both methods block; both raise FetchError.  Cancelling is seen at each chunk and
    in every wait, and with a silent source after `[pull] timeout` at the latest."""

    def resolve(self, reference: Reference) -> Resolved:
        """Ask what is there; nothing is downloaded but, of an https: archive, its headers."""
        ...

    def fetch(
        self,
        resolved: Resolved,
        folder: Path,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Put exactly the files into `folder`, which is empty or holds what an earlier call for the
        same `resolved` left there: that goes on where it ended.  Raises Cancelled, too."""
        ...
