"""A hub in a folder: repositories that a test writes, breaks and holds up, also from outside.

`root/ORG/REPO/` holds the files, `root/ORG/REPO.json` how it behaves: `commit`, `error` (a code
that every call fails with), `fetch_error` (a code after `hold_at` bytes), `hold_at` (a fetch waits
there for as long as that is set).  Every call is a line of `root/calls`.  As a program it is a
daemon that fetches from such a folder: `sources.py ROOT [arguments of lorad]`.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorad.sources import choice
from lorad.sources.errors import Cancelled, FetchError
from lorad.sources.fetch import RemoteFile, Resolved
from lorad.sources.reference import Reference

CHUNK = 4096


def commit_of(word: str) -> str:
    """A commit that a test can name."""
    return hashlib.sha1(word.encode(), usedforsecurity=False).hexdigest()


class Hub:
    """`root` is steered by whoever holds it; `fetcher` is what `fetcher_for` returns."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tokens: list[str] = []

    # ------------------------------------------------------------- for tests
    def put(self, repo: str, files: dict[str, bytes], commit: str = "1", **rules: Any) -> str:
        """Publish; returns the commit."""
        folder = self.root / repo
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        self.rule(repo, commit=commit_of(commit), **rules)
        return commit_of(commit)

    def rule(self, repo: str, **rules: Any) -> None:
        """Change how it behaves, from one moment to the next."""
        path = self.root / f"{repo}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(known | rules))
        temporary.replace(path)

    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    # ------------------------------------------------------------- for the daemon
    def fetcher(self, reference: Reference, **options: Any) -> "HubFetcher":
        self.tokens.append(options.get("token", ""))
        return HubFetcher(self, reference)

    def rules(self, repo: str) -> dict[str, Any]:
        path = self.root / f"{repo}.json"
        if not path.exists():
            raise FetchError("source_not_found", f"hf:{repo}: no such repository")
        rules: dict[str, Any] = json.loads(path.read_text())
        return rules

    def note(self, *words: object) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "calls").open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")


class HubFetcher:
    """One reference's."""

    def __init__(self, hub: Hub, reference: Reference) -> None:
        self.hub, self.reference = hub, reference

    def resolve(self, reference: Reference) -> Resolved:
        self.hub.note("resolve", reference.text)
        rules = self.hub.rules(reference.repo)
        if code := rules.get("error"):
            raise FetchError(code, f"{reference.text}: {code}", retry_after=rules.get("after"))
        commit = reference.revision if reference.pinned else rules["commit"]
        folder = self.hub.root / reference.repo
        files = tuple(
            RemoteFile(path.name, path.stat().st_size) for path in sorted(folder.iterdir())
        )
        total = sum(file.size or 0 for file in files)
        return Resolved(f"hf:{reference.repo}@{commit}", files, total, commit)

    def fetch(
        self,
        resolved: Resolved,
        folder: Path,
        progress: Callable[[int, int | None], None],
        cancelled: Callable[[], bool],
    ) -> None:
        repo = self.reference.repo
        done = sum(path.stat().st_size for path in folder.iterdir())
        self.hub.note("fetch", resolved.reference, done)
        for file in resolved.files:
            if (folder / file.name).exists():
                continue
            data = (self.hub.root / repo / file.name).read_bytes()
            part = folder / f"{file.name}.part"
            with part.open("ab") as out:
                for start in range(out.tell(), len(data), CHUNK):
                    self._hold(repo, done, cancelled)
                    chunk = data[start : start + CHUNK]
                    out.write(chunk)
                    out.flush()
                    done += len(chunk)
                    progress(done, resolved.total_bytes)
            part.rename(folder / file.name)

    def _hold(self, repo: str, done: int, cancelled: Callable[[], bool]) -> None:
        while True:
            if cancelled():
                raise Cancelled
            rules = self.hub.rules(repo)
            if done < rules.get("hold_at", 1 << 62):
                return
            if code := rules.get("fetch_error"):
                raise FetchError(code, f"hf:{repo}: {code}")
            time.sleep(0.005)


def main() -> None:
    """A daemon that fetches from a folder."""
    hub = Hub(Path(sys.argv[1]))

    def fetcher_for(reference: Reference, settings: object, **options: Any) -> HubFetcher:
        return hub.fetcher(reference, **options)

    choice.fetcher_for = fetcher_for
    sys.argv = ["lorad", *sys.argv[2:]]
    from lorad.cli.serve import main as serve

    serve()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
