"""Where fetched models are kept. A model is there whole and checked, or it is not there.

<cache>/models/<host>/<user>--<repo>/<commit>/      a fetched model
<cache>/models/<host>/<user>--<repo>/refs/<rev>     the commit a branch or tag led to, for when there is no network
<cache>/incoming/<host>/<user>--<repo>/<commit>/    what has arrived so far of one that is being fetched
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from certtool.files import disk_errors, write_atomically
from certtool.zoo.reference import COMMIT, HubRef


def cache_folder() -> Path:
    """CERTTOOL_CACHE, else the user's cache."""
    if os.environ.get("CERTTOOL_CACHE"):
        return Path(os.environ["CERTTOOL_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "certtool"


@dataclass(frozen=True)
class Cache:
    root: Path
    host: str

    def model(self, repo: str, commit: str) -> Path:
        return self._repo(repo) / commit

    def incoming(self, repo: str, commit: str) -> Path:
        return self.root / "incoming" / self.host / repo.replace("/", "--") / commit

    def known_commit(self, ref: HubRef) -> str | None:
        """The commit itself, or the one its branch or tag led to last."""
        if ref.commit is not None:
            return ref.commit
        file = self._ref(ref)
        text = file.read_text(encoding="ascii", errors="replace").strip() if file.is_file() else ""
        return text if COMMIT.fullmatch(text) else None

    def remember(self, ref: HubRef, commit: str) -> None:
        if ref.commit is None:
            with disk_errors(self.root):
                self._ref(ref).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._ref(ref), f"{commit}\n".encode())

    def _repo(self, repo: str) -> Path:
        return self.root / "models" / self.host / repo.replace("/", "--")

    def _ref(self, ref: HubRef) -> Path:
        return self._repo(ref.repo) / "refs" / quote(ref.revision, safe="")
