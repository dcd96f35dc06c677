"""Publish a model with its proof: recheck, stage, plan, one commit, tag, read back and compare."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from certtool.checkpoint import Checkpoint
from certtool.data import Split
from certtool.errors import CertToolError, Exit, InputError, OutsideError
from certtool.plain_text import plain
from certtool.verification import LadderSettings
from certtool.verification.recheck import Recheck, recheck
from certtool.zoo import hub
from certtool.zoo.card import card
from certtool.zoo.describe import Cost, record_of
from certtool.zoo.endpoint import LOGIN, Endpoint, token_stays_home
from certtool.zoo.fetch import retrieve
from certtool.zoo.layout import CARD, PICTURE, check_name, digest
from certtool.zoo.listing import checked_commit, listing
from certtool.zoo.records import Record, render
from certtool.zoo.reference import COMMIT, HubRef, parse_repo
from certtool.zoo.refusals import sentences
from certtool.zoo.staging import Staged, certificate_of, stage


class Refused(CertToolError):
    """The certificate does not hold: nothing is published."""

    exit_code = Exit.ANSWER_IS_NO


@dataclass(frozen=True)
class Plan:
    """What would be published where; nothing has left the machine yet."""

    repo: str
    private: bool
    tag: str | None
    staged: Staged
    record: Record
    rechecked: tuple[Recheck, ...]

    def as_json(self) -> dict[str, Any]:
        files = {name: {"bytes": len(data), "sha256": digest(data)} for name, data in sorted(self.staged.files.items())}
        return {
            "schema": "certtool.publish/1",
            "repo": self.repo,
            "private": self.private,
            "tag": self.tag,
            "files": files,
            "recheck": [outcome.as_json() for outcome in self.rechecked],
        }


@dataclass(frozen=True)
class Published:
    ref: HubRef
    url: str
    record: Record

    @property
    def record_text(self) -> str:
        return render(self.record)


def proven(
    checkpoint: Checkpoint,
    split: Split,
    certificates: list[Path],
    sample: int | None,
    settings: LadderSettings,
    progress: Callable[[str, int, int], None] = lambda rung, done, total: None,
) -> tuple[Recheck, ...]:
    """Every certificate recomputed; one that does not hold is refused with all that is wrong."""
    outcomes = []
    for file in certificates:
        try:
            outcome = recheck(checkpoint, split, file, sample=sample, settings=settings, progress=progress)
        except InputError as error:
            hint = "`certtool verify MODEL --certificate FILE` makes one"
            raise Refused(f"the certificate does not hold: {error}", hint) from None
        if outcome.differences:
            more = f" (and {len(outcome.differences) - 1} more)" if len(outcome.differences) > 1 else ""
            raise Refused(
                f"the certificate `{file}` does not hold: {outcome.differences[0]}{more}",
                f"`certtool verify MODEL --recheck {file}` shows all",
            )
        outcomes.append(outcome)
    return tuple(outcomes)


def plan(
    checkpoint: Checkpoint,
    certificates: list[Path],
    rechecked: tuple[Recheck, ...],
    *,
    repo: str,
    private: bool,
    tag: str | None,
    licence: str,
    cost: Cost,
    picture: Callable[[Record], bytes],
) -> Plan:
    """The staged files, card and picture included. The first certificate is the record's."""
    name = parse_repo(repo).split("/")[1]
    if tag is not None and COMMIT.fullmatch(tag):
        raise InputError(f"`{tag}` looks like a commit, not like a tag", "as in `--tag v1`")
    first = certificates[0]
    pinned = f"hf://{repo}@{'0' * 40}"
    record = record_of(
        checkpoint, certificate_of(first), first, name=name, licence=licence, sources=[pinned], cost=cost
    )
    staged = stage(checkpoint, certificates)
    staged = staged.with_files({CARD: card(record, repo).encode(), PICTURE: picture(record)})
    return Plan(repo, private, tag, staged, record, rechecked)


def publish(plan: Plan, *, bars: bool = False) -> Published:
    """One commit on top of the one we saw, a tag, and everything read back."""
    endpoint = Endpoint.from_environment()
    token = endpoint.token()
    if token is None:
        raise OutsideError(f"publishing on {endpoint.url} needs a token", LOGIN)
    if not bars:
        disable_progress_bars()
    api = endpoint.api(token)
    with sentences(plan.repo, endpoint), token_stays_home(endpoint):
        hub.patiently(api.whoami)
        parent, present = _head(api, plan)
        commit = _commit(api, plan, parent, present)
        if plan.tag is not None:
            hub.patiently(lambda: api.create_tag(plan.repo, tag=str(plan.tag), revision=commit))
    ref = HubRef(plan.repo, commit)
    _read_back(plan, ref, endpoint)
    record = plan.record.model_copy(update={"sources": [str(ref)]})
    return Published(ref, f"{endpoint.url}/{plan.repo}", record)


def _head(api: HfApi, plan: Plan) -> tuple[str, list[str]]:
    """The commit the repository stands at, made if it is not there, and its files."""
    try:
        info = hub.patiently(lambda: api.model_info(plan.repo, timeout=hub.TIMEOUT))
    except RepositoryNotFoundError:
        hub.patiently(lambda: api.create_repo(plan.repo, private=plan.private, exist_ok=False))
        info = hub.patiently(lambda: api.model_info(plan.repo, timeout=hub.TIMEOUT))
    if plan.private and not info.private:
        raise OutsideError(f"{plan.repo} exists and is public", "leave out `--private`, or choose another name")
    return checked_commit(info.sha), [sibling.rfilename for sibling in info.siblings or []]


def _commit(api: HfApi, plan: Plan, parent: str, present: list[str]) -> str:
    """`parent_commit` makes the Hub refuse when somebody else was quicker. What an older version left is removed."""
    stale = [name for name in present if check_name(name) and name not in plan.staged.files]
    foreign = [n for n in present if not check_name(n) and n not in (".gitattributes", ".gitignore")]
    if foreign:
        raise OutsideError(
            f"{plan.repo} holds `{plain(foreign[0])}`, which is not part of a certtool model",
            "publish to a repository of its own",
        )
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, content) for name, content in sorted(plan.staged.files.items())
    ]
    operations += [CommitOperationDelete(name) for name in stale]
    best = plan.record.headline
    message = f"{plan.record.name}: {100 * best.certified_rigorous:.2f} % certified (rigorous) at eps {best.eps}"
    try:
        with warnings.catch_warnings(action="ignore"):  # the Hub's remarks on the card, word for word
            done = api.create_commit(plan.repo, operations, commit_message=message, parent_commit=parent)
    except ValueError as error:
        if isinstance(error, HfHubHTTPError):
            raise
        raise OutsideError(f"the Hub does not take the model card: {plain(str(error))}") from None
    except httpx2.TransportError:  # the answer was lost, perhaps not the commit; reading back will tell
        head = checked_commit(hub.patiently(lambda: api.model_info(plan.repo, timeout=hub.TIMEOUT)).sha)
        if head == parent:
            raise
        return head
    return checked_commit(done.oid)


def _read_back(plan: Plan, ref: HubRef, endpoint: Endpoint) -> None:
    """What anybody would fetch is what was meant to be published, byte for byte."""
    with tempfile.TemporaryDirectory(prefix="certtool-") as folder:
        found = listing(ref, endpoint)
        got = retrieve(found, endpoint, Path(folder) / "back")
        for name, content in plan.staged.files.items():
            if (got.path / name).read_bytes() != content:
                raise OutsideError(f"read back, `{name}` of {ref} is not what was published", "remove the repository")
