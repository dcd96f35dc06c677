"""What others have published: models on the Hub that carry our tag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from certtool.plain_text import plain
from certtool.zoo import hub
from certtool.zoo.card import TAGS
from certtool.zoo.hub import Endpoint
from certtool.zoo.reference import COMMIT

MOST = 200


@dataclass(frozen=True)
class Remote:
    """One repository as the Hub describes it: claims, not proofs, until it is fetched and checked."""

    repo: str
    commit: str | None
    dataset: str | None
    eps: tuple[str, ...]
    downloads: int

    def as_json(self) -> dict[str, Any]:
        return self.__dict__ | {"eps": list(self.eps)}


def remote_models(*, dataset: str | None = None, eps: str | None = None) -> list[Remote]:
    """By tag, anonymously; the most downloaded first."""
    endpoint = Endpoint.from_environment()
    wanted = [TAGS[0], *([f"dataset:{dataset}"] if dataset else []), *([f"eps:{eps}"] if eps else [])]
    api = endpoint.api(None)
    with hub.sentences(TAGS[0], endpoint):
        found = hub.patiently(lambda: list(api.list_models(filter=wanted, limit=MOST, full=True)))
    models = [_remote(info.id, info.sha, info.tags or [], info.downloads) for info in found]
    return sorted(models, key=lambda model: -model.downloads)


def _remote(repo: str, commit: str | None, tags: list[str], downloads: int | None) -> Remote:
    texts = [plain(tag, 60) for tag in tags]
    datasets = [text.removeprefix("dataset:") for text in texts if text.startswith("dataset:")]
    return Remote(
        plain(repo, 100),
        commit if commit is not None and COMMIT.fullmatch(commit) else None,
        datasets[0] if datasets else None,
        tuple(text.removeprefix("eps:") for text in texts if text.startswith("eps:")),
        downloads if isinstance(downloads, int) else 0,
    )
