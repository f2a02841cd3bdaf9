"""Which source fetches a reference: the one place that knows all of them.

Each is imported when the first reference asks for it, so that what nobody asks for need not be
installed.
"""

from lorad.config import Settings
from lorad.sources.errors import FetchError
from lorad.sources.fetch import Fetcher
from lorad.sources.reference import Reference


def fetcher_for(
    reference: Reference, settings: Settings, *, token: str = "", offline: bool = False
) -> Fetcher:
    """The source of `reference`.  `token` goes before the one that the settings name (hf: alone).
    `offline`: nobody is asked, whatever the settings say.  Raises FetchError if the source cannot
    be had: an extra that is not installed, plain http to another machine, no cache to go by."""
    if reference.scheme == "hf":
        from lorad.sources.hub import HubFetcher

        return HubFetcher(settings, token=token, offline=offline)
    if offline:
        raise FetchError(
            "source_offline",
            f"{reference.text} cannot be fetched with --offline: only the hub has a cache here",
            hint="leave --offline out, or add the files with `loractl add`",
        )
    if reference.scheme == "s3":
        from lorad.sources.s3 import S3Fetcher

        return S3Fetcher(settings)
    from lorad.sources.web import WebFetcher

    return WebFetcher(reference, settings)
