"""References to adapters elsewhere: `hf:ORG/REPO[@REV]`, `s3://bucket/prefix`, `https://host/path`.

Goes in: text that somebody typed.  Comes out: a Reference, or FetchError `bad_reference` that says
what is wrong with it.  Asks nobody whether it exists.  User and password of a URL, and its query,
which often is a signature, are kept apart from what is shown.
"""

import re
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from msgspec import Struct

from lorad.sources.errors import FetchError

Scheme = Literal["hf", "s3", "https", "http"]

MAX_CHARS = 4096

_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,254}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAGS = re.compile(r"#etags=([0-9a-f]{32})$")
_HUBS = ("huggingface.co", "www.huggingface.co", "hf.co")
_FORMS = "write hf:ORG/REPO[@COMMIT], s3://BUCKET/PREFIX, or https://HOST/PATH"


class Reference(Struct, frozen=True):
    """A reference that is well formed.  `text` is safe to show and to store; `url` is not."""

    scheme: Scheme
    text: str
    repo: str = ""  # hf: ORG/REPO
    revision: str = ""  # hf: branch, tag or commit, "" = main; s3: a digest of etags, if pinned
    bucket: str = ""  # s3
    prefix: str = ""  # s3: without a slash at its end; "" = the whole bucket
    url: str = ""  # http(s): all of it but the fragment, secrets included
    sha256: str = ""  # http(s): what the archive, or the weights file of a folder, must have

    def __repr__(self) -> str:
        return f"Reference({self.text!r})"

    @property
    def private(self) -> bool:
        """Whether `text` lacks what fetching needs: a password, or the query of a signed URL."""
        return bool(self.url) and self.url != self.text.partition("#")[0]

    @property
    def pinned(self) -> bool:
        """Whether it names a commit, or etags, or a checksum: it means the same for ever."""
        if self.scheme == "hf":
            return bool(_COMMIT.fullmatch(self.revision))
        return bool(self.revision or self.sha256)


def parse_reference(text: str, revision: str = "") -> Reference:
    """Read `text`; `revision` (of `--revision`) is for hf: alone.  Raises FetchError."""
    if not text or len(text) > MAX_CHARS or not text.isprintable() or " " in text:
        raise _bad(f"no reference: {_FORMS}", "a reference is one word without spaces")
    scheme, _, rest = text.partition(":")
    if scheme == "hf":
        return _hub(rest.removeprefix("//"), revision)
    if revision:
        raise _bad("a revision can be given of hf: references alone", "leave --revision out")
    if scheme == "s3" and rest.startswith("//"):
        return _s3(rest[2:])
    if scheme in ("http", "https") and rest.startswith("//"):
        return _web(text)
    if text.startswith((".", "/", "~")):
        raise _bad(f"{_cut(text)!r} is a path, not a source", "a folder here: loractl add FOLDER")
    raise _bad(f"{_cut((rest and scheme) or text)!r} is no source that lorad knows", _FORMS)


def _hub(rest: str, revision: str) -> Reference:
    repo, at, own = rest.partition("@")
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith(".git"):
        raise _bad(f"hf:{_cut(repo)} names no repository", "write hf:ORG/REPO[@COMMIT]")
    if at and revision and own != revision:
        raise _bad(
            f"hf:{repo} is asked for at {_cut(own)} and at {_cut(revision)}",
            "give the revision once",
        )
    wanted = own if at else revision
    if (at or wanted) and (not _REVISION.fullmatch(wanted) or ".." in wanted):
        raise _bad(
            f"{_cut(wanted)!r} cannot be a revision of hf:{repo}", "name a commit, branch or tag"
        )
    return Reference("hf", f"hf:{repo}@{wanted}" if wanted else f"hf:{repo}", repo, wanted)


def _s3(rest: str) -> Reference:
    etags = _ETAGS.search(rest)
    bucket, _, prefix = rest[: etags.start() if etags else None].partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        what = f"{_cut(bucket)!r} cannot be a bucket's name" if bucket else "s3:// names no bucket"
        raise _bad(what, "write s3://BUCKET/PREFIX")
    text = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
    if etags:
        return Reference("s3", text + etags[0], revision=etags[1], bucket=bucket, prefix=prefix)
    return Reference("s3", text, bucket=bucket, prefix=prefix)


def _web(text: str) -> Reference:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _bad("the URL cannot be read", "write https://HOST/PATH") from None
    if not host or "\\" in text:
        raise _bad("the URL names no host", "write https://HOST/PATH")
    shown = _without_secrets(parts, host, port)
    if host in _HUBS and len([part for part in parts.path.split("/") if part]) == 2:
        raise _bad(f"{shown} is a page of the hub", f"write hf:{parts.path.strip('/')}")
    if ".." in unquote(parts.path).split("/"):
        raise _bad(f"{shown} leads upwards", "write the path without `..`")
    digest = parts.fragment
    if digest:
        if not re.fullmatch(r"sha256=[0-9A-Fa-f]{64}", digest):
            raise _bad(
                f"what follows the # of {shown} is no checksum", "write #sha256= and 64 hex digits"
            )
        digest = digest[7:].lower()
    return Reference(
        "https" if parts.scheme == "https" else "http",
        f"{shown}#sha256={digest}" if digest else shown,
        url=urlunsplit(parts._replace(fragment="")),
        sha256=digest,
    )


def shown_url(url: str) -> str:
    """A URL without user, password, query and fragment, of bounded length."""
    try:
        parts = urlsplit(url)
        return _cut(_without_secrets(parts, parts.hostname or "", parts.port), 300)
    except ValueError:
        return "a URL that cannot be read"


def _without_secrets(parts: SplitResult, host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}{f':{port}' if port else ''}{parts.path}"


def _bad(message: str, hint: str) -> FetchError:
    return FetchError("bad_reference", message, hint=hint)


def _cut(text: str, most: int = 100) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
