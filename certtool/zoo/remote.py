"""What others have published: models on the Hub that carry our tag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from certtool.plain_text import plain
from certtool.zoo import hub
from certtool.zoo.card import TAGS
from certtool.zoo.endpoint import Endpoint
from certtool.zoo.reference import COMMIT
from certtool.zoo.refusals import sentences, understood

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
    question: dict[str, str | list[str]] = {"filter": wanted, "limit": str(MOST), "sort": "downloads", "full": "true"}
    with sentences(TAGS[0], endpoint):
        found = hub.patiently(lambda: hub.ask("models", endpoint, None, question))
        models = understood(lambda: [_remote(info) for info in found[:MOST]])
    return sorted(models, key=lambda model: -model.downloads)


def _remote(info: Any) -> Remote:
    texts = [plain(tag, 60) for tag in info.get("tags", []) if isinstance(tag, str)]
    datasets = [text.removeprefix("dataset:") for text in texts if text.startswith("dataset:")]
    commit, downloads = info.get("sha"), info.get("downloads")
    return Remote(
        plain(info["id"], 100),
        commit if isinstance(commit, str) and COMMIT.fullmatch(commit) else None,
        datasets[0] if datasets else None,
        tuple(text.removeprefix("eps:") for text in texts if text.startswith("eps:")),
        downloads if isinstance(downloads, int) else 0,
    )
