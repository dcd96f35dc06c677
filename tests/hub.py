"""A small Hugging Face Hub on the loopback interface: the real client talks to it, and nothing is mocked.

    with Hub() as hub:
        sha = hub.add_repo("ada/net", {"model.safetensors": weights}, tags=["certtool"])
        hub.faults["GET */resolve/*"] = DropAfter(1000, times=1)
        HfApi(endpoint=hub.endpoint, token=READ).hf_hub_download("ada/net", "model.safetensors")
        assert [seen.method for seen in hub.requests] == ["HEAD", "GET", "GET"]

The state lives in memory and survives `stop()` and `start()`. Only models, no pull requests, and no xet: the client
needs `HF_HUB_DISABLE_XET=1`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import unquote

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

WRITE, READ, STRANGER = "hf_ada_write", "hf_ada_read", "hf_bob_write"
LARGE = 10_000  # bytes; anything longer, and all weights, are kept by LFS
DATE = "2026-01-01T00:00:00.000Z"
CHUNK = 1 << 16


# What a repository is made of.


class Account(NamedTuple):
    user: str
    role: Literal["write", "read"]


TOKENS = {WRITE: Account("ada", "write"), READ: Account("ada", "read"), STRANGER: Account("bob", "write")}


@dataclass(frozen=True)
class Blob:
    data: bytes
    large: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git itself stores for a large file."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @cached_property
    def git_oid(self) -> str:
        stored = self.pointer if self.large else self.data
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.git_oid

    def lfs(self, sha256_key: str) -> dict[str, Any]:
        """The `lfs` entry of a listing; the Hub spells its key `sha256` in model info and `oid` in a tree."""
        pointer = {sha256_key: self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}
        return {"lfs": pointer} if self.large else {}


def is_large(path: str, size: int) -> bool:
    return size > LARGE or path.endswith(".safetensors")


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: Mapping[str, Blob]

    @property
    def card(self) -> dict[str, Any]:
        """The front matter of README.md; nothing if it cannot be read, as on the real Hub."""
        try:
            return front_matter(self.files["README.md"].data.decode()) if "README.md" in self.files else {}
        except (ValueError, yaml.YAMLError):
            return {}

    @property
    def tags(self) -> list[str]:
        licence = [f"license:{self.card['license']}"] if "license" in self.card else []
        return [*self.card.get("tags", []), *licence]


@dataclass
class Repo:
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    def visible_to(self, account: Account | None) -> bool:
        return not self.private or (account is not None and account.user == self.owner)

    def find(self, revision: str) -> Commit | None:
        """A branch, a tag, a commit or at least seven characters of one."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        oid = self.branches.get(name, self.tags.get(name, revision))
        return next((self.commits[known] for known in self.commits if len(oid) >= 7 and known.startswith(oid)), None)

    def commit(self, files: Mapping[str, Blob], title: str, branch: str = "main") -> str:
        """A new head of the branch that holds exactly these files."""
        parent = self.branches.get(branch)
        content = [self.id, parent, title, sorted((path, blob.git_oid) for path, blob in files.items())]
        oid = hashlib.sha1(json.dumps(content).encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, dict(files))
        self.branches[branch] = oid
        return oid


def front_matter(readme: str) -> dict[str, Any]:
    match = re.match(r"---\r?\n(.*?)\r?\n---\s*(\n|$)", readme, re.DOTALL)
    data = yaml.safe_load(match[1]) if match else {}
    if not isinstance(data, dict) or not isinstance(data.get("tags", []), list):
        raise ValueError("the metadata must be a mapping, and its tags a list")
    found: dict[str, Any] = json.loads(json.dumps(data, default=str))  # YAML knows dates, JSON does not
    return found


# Faults: `hub.faults[pattern] = fault` for requests whose "METHOD /path" matches, as in "GET */resolve/*".


@dataclass(frozen=True)
class Answer:
    """A whole response, and how it travels."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: int | None = None
    rate: float | None = None
    pause: Pause | None = None

    @classmethod
    def json(cls, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        return cls(status, headers or {}, b"").with_body(json.dumps(content).encode(), "application/json")

    def with_header(self, name: str, value: str | None) -> Answer:
        others = {known: value for known, value in self.headers.items() if known.lower() != name.lower()}
        return replace(self, headers=others if value is None else others | {name: value})

    def with_body(self, body: bytes, content_type: str) -> Answer:
        answer = self.with_header("Content-Length", str(len(body))).with_header("Content-Type", content_type)
        return replace(answer, body=body)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong. After `times` answers it takes itself out of `hub.faults`; without `times` it stays."""

    times: int | None = None

    def instead(self) -> Answer | None:
        """An answer given before the Hub has even looked at the request."""
        return None

    def change(self, answer: Answer) -> Answer:
        return answer


class BodyFault(Fault):
    """A fault that HEAD requests do not meet, nor use up."""


@dataclass(frozen=True)
class Status(Fault):
    """Refuse, and do nothing: 503, 500, 429 with `{"Retry-After": "1"}`, 302 with `{"Location": ...}`."""

    code: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def instead(self) -> Answer:
        return Answer.json({"error": f"declared fault {self.code}"}, self.code, self.headers)


@dataclass(frozen=True)
class Header(Fault):
    """Another value for a header; None leaves it out."""

    name: str
    value: str | None

    def change(self, answer: Answer) -> Answer:
        return answer.with_header(self.name, self.value)


@dataclass(frozen=True)
class Replace(Fault):
    """Another body, honest about its own size: a login page where the weights should be."""

    body: bytes
    content_type: str = "text/html"

    def change(self, answer: Answer) -> Answer:
        return answer.with_header("X-Linked-Size", None).with_body(self.body, self.content_type)


@dataclass(frozen=True)
class Json(BodyFault):
    """Another JSON document, computed from the right one."""

    edit: Callable[[Any], Any]

    def change(self, answer: Answer) -> Answer:
        return answer.with_body(json.dumps(self.edit(json.loads(answer.body))).encode(), "application/json")


@dataclass(frozen=True)
class Corrupt(BodyFault):
    """The same size, one byte changed, in the middle."""

    def change(self, answer: Answer) -> Answer:
        middle = len(answer.body) // 2
        return replace(answer, body=answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :])


@dataclass(frozen=True)
class DropAfter(BodyFault):
    """The connection breaks after so many bytes of the body. The Hub has done what it was asked."""

    bytes: int

    def change(self, answer: Answer) -> Answer:
        return replace(answer, cut=self.bytes)


@dataclass(frozen=True)
class Slow(BodyFault):
    bytes_per_second: float

    def change(self, answer: Answer) -> Answer:
        return replace(answer, rate=self.bytes_per_second)


@dataclass(frozen=True)
class Pause(BodyFault):
    """Stand still after so many bytes, say so with `reached`, and go on when the test sets `go_on`."""

    after_bytes: int
    go_on: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def change(self, answer: Answer) -> Answer:
        return replace(answer, pause=self)


# The Hub.


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    range: str | None
    token: str | None


Handler = Callable[[Request], Awaitable[Any]]  # returns an Answer, or what an answer in JSON should hold


class Refusal(Exception):
    """An error as the Hub words it. On plain http the client knows it only by the code in the header."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        coded = {} if code is None else {"X-Error-Code": code}
        self.answer = Answer.json({"error": message}, status, {"X-Error-Message": message, **coded, **(headers or {})})


def parameter(request: Request, name: str, default: str = "") -> str:
    return unquote(request.path_params.get(name, default))


def bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme == "Bearer" else None


class Hub:
    def __init__(self, tokens: Mapping[str, Account] = TOKENS) -> None:
        self.tokens = dict(tokens)
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[Seen] = []
        self.faults: dict[str, Fault] = {}
        self._bugs: list[Exception] = []
        self._port = 0
        model, git = "/api/models/{owner}/{name}", "/{owner}/{name}.git/info/lfs/objects"
        routes = {
            "GET /api/whoami-v2": self._whoami,
            "GET /api/models": self._list,
            f"GET {model}": self._info,
            f"GET {model}/revision/{{revision}}": self._info,
            f"GET {model}/tree/{{revision}}": self._tree,
            f"GET {model}/refs": self._refs,
            "GET /{owner}/{name}/resolve/{revision}/{path:path}": self._resolve,
            "POST /api/repos/create": self._create,
            "POST /api/validate-yaml": self._validate_yaml,
            f"POST {model}/preupload/{{revision}}": self._preupload,
            f"POST {git}/batch": self._lfs_batch,
            "PUT /lfs/{oid}": self._lfs_store,
            f"POST {git}/verify": self._lfs_verify,
            f"POST {model}/commit/{{revision}}": self._commit,
            f"POST {model}/tag/{{revision}}": self._tag,
            "GET|POST|PUT|DELETE /{path:path}": self._nowhere,
        }
        self._app = Starlette(
            routes=[
                Route(path, self._endpoint(handler), methods=method.split("|"))
                for (method, path), handler in ((key.split(), handler) for key, handler in routes.items())
            ]
        )

    # What tests call.

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """For a process of its own. Without a token an empty one, so that a developer's own never gets here."""
        here = "127.0.0.1,localhost"
        off = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "NO_PROXY": here, "no_proxy": here}
        return settings | dict.fromkeys(off, "1") | {"HF_TOKEN": "" if token is None else token}

    def add_repo(
        self, id: str, files: Mapping[str, bytes], private: bool = False, tags: Sequence[str] = (), gated: bool = False
    ) -> str:
        """A repository with one commit; tags become the front matter of a README.md."""
        card = {"README.md": f"---\n{yaml.safe_dump({'tags': [*tags]})}---\n".encode()} if tags else {}
        assert not card.keys() & files.keys(), "tags or a README.md of your own, not both"
        self.repos[id] = Repo(id, private, gated)
        return self.commit(id, {**card, **files}, "initial commit")

    def commit(self, id: str, files: Mapping[str, bytes], title: str = "somebody else's commit") -> str:
        """Add or replace files on main."""
        repo = self.repos[id]
        before = repo.commits[repo.branches["main"]].files if repo.branches else {}
        added = {path: Blob(data, is_large(path, len(data))) for path, data in files.items()}
        self.lfs |= {blob.sha256: blob.data for blob in added.values() if blob.large}
        return repo.commit({**before, **added}, title)

    def files(self, id: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repos[id].find(revision)
        assert commit is not None, f"{id} has no revision {revision}"
        return {path: blob.data for path, blob in commit.files.items()}

    def head(self, id: str) -> str:
        return self.repos[id].branches["main"]

    def clear(self) -> None:
        """Forget everything, for the next test."""
        for memory in (self.repos, self.lfs, self.requests, self.faults):
            memory.clear()

    def start(self) -> None:
        """Listen, the second time on the same port."""
        listener = socket.create_server(("127.0.0.1", self._port))
        # asyncio sees to this only where it makes the socket; without it every answer waits 40 ms for the client's ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._serve, interface="asgi3", lifespan="off", http="h11", ws="none", loop="asyncio",
            log_config=None, log_level="critical", access_log=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="hub", daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the Hub did not start"
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop listening and break every connection, as a killed server would; the state stays."""
        self._server.should_exit = True
        for connection in list(self._server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the Hub did not stop"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert not self._bugs, f"the Hub itself failed: {self._bugs}"

    # Requests, faults, delivery.

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Routes see the path as it was sent, so that a revision `a%2Fb` stays one segment."""
        await self._app({**scope, "path": scope["raw_path"].decode()}, receive, send)

    def _endpoint(self, handler: Handler) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def endpoint(request: Request) -> ASGIApp:
            await request.body()  # whole, also when the answer does not depend on it
            try:
                return self._delivery(await self._answer(handler, request))
            except Exception as bug:
                self._bugs.append(bug)
                raise

        return endpoint

    async def _answer(self, handler: Handler, request: Request) -> Answer:
        method, path = request.method, unquote(request.url.path)
        self.requests.append(Seen(method, path, request.headers.get("range"), bearer(request)))
        faults = self._faults_for(method, path)
        early = [answer for fault in faults if (answer := fault.instead()) is not None]
        try:
            result = early[0] if early else await handler(request)
        except Refusal as refusal:
            result = refusal.answer
        answer = result if isinstance(result, Answer) else Answer.json(result)
        for fault in faults:
            answer = fault.change(answer)
        return answer

    def _faults_for(self, method: str, path: str) -> list[Fault]:
        """The faults this request meets; what is used up is taken out."""
        met = []
        for pattern, fault in list(self.faults.items()):
            if not fnmatchcase(f"{method} {path}", pattern) or (method == "HEAD" and isinstance(fault, BodyFault)):
                continue
            met.append(fault)
            if fault.times is not None and fault.times > 1:
                self.faults[pattern] = replace(fault, times=fault.times - 1)
            elif fault.times is not None:
                del self.faults[pattern]
        return met

    def _delivery(self, answer: Answer) -> ASGIApp:
        """Ending before the promised length is reached makes uvicorn close the connection."""
        size = len(answer.body)
        end = size if answer.cut is None else min(answer.cut, size)
        step = CHUNK if answer.rate is None else max(int(answer.rate / 20), 1)
        hold = size if answer.pause is None else min(answer.pause.after_bytes, end)

        async def deliver(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            for first, last in pairwise(sorted({*range(0, end, step), min(hold, end), end})):
                if answer.pause is not None and first >= hold:
                    await self._wait(answer.pause)
                if self._server.should_exit:
                    return
                await send({"type": "http.response.body", "body": answer.body[first:last], "more_body": True})
                if answer.rate is not None:
                    await asyncio.sleep((last - first) / answer.rate)
            if end == size:
                await send({"type": "http.response.body", "body": b""})

        return deliver

    async def _wait(self, pause: Pause) -> None:
        pause.reached.set()
        while not pause.go_on.is_set() and not self._server.should_exit:
            await asyncio.sleep(0.01)

    # Who may do what.

    def _account(self, request: Request) -> Account | None:
        token = bearer(request)
        if token is not None and token not in self.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return None if token is None else self.tokens[token]

    def _repo(self, request: Request) -> Repo:
        """What one may not see does not exist: 404, or 401 for those without a token."""
        account = self._account(request)
        repo = self.repos.get(f"{parameter(request, 'owner')}/{parameter(request, 'name')}")
        if repo is not None and repo.visible_to(account):
            return repo
        if account is None:
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        raise Refusal(404, "Repository not found", "RepoNotFound")

    def _repo_to_write(self, request: Request) -> Repo:
        repo = self._repo(request)
        self._require_writer(request, repo.owner, "RepoNotFound")
        return repo

    def _require_writer(self, request: Request, owner: str | None, code: str | None = None) -> Account:
        """Without an owner, the account may write into its own namespace."""
        account = self._account(request)
        if account is None:
            raise Refusal(401, "Invalid username or password.", code)
        if account.role != "write" or owner not in (None, account.user):
            raise Refusal(403, "Forbidden: you have no write access with this token")
        return account

    def _commit_of(self, request: Request, repo: Repo) -> Commit:
        revision = parameter(request, "revision", "main")
        if (commit := repo.find(revision)) is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Reading.

    async def _nowhere(self, request: Request) -> Any:
        raise Refusal(404, "Sorry, we can't find the page you are looking for.")

    async def _whoami(self, request: Request) -> Any:
        account = self._account(request)
        if account is None:
            raise Refusal(401, "Invalid username or password.")
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": account.role}}
        return {"type": "user", "id": account.user, "name": account.user, "orgs": [], "auth": auth}

    async def _info(self, request: Request) -> Any:
        repo = self._repo(request)
        return describe(repo, self._commit_of(request, repo), with_blobs="blobs" in request.query_params)

    async def _list(self, request: Request) -> Any:
        account, query = self._account(request), request.query_params
        # The real Hub lists neither commit nor files unless asked for them.
        hidden = set() if "full" in query or "expand" in query else {"sha", "siblings", "lastModified", "cardData"}
        return [
            {key: value for key, value in describe(repo, head).items() if key not in hidden}
            for repo, head in ((repo, repo.commits[repo.branches["main"]]) for repo in self.repos.values())
            if repo.visible_to(account)
            and set(query.getlist("filter")) <= set(head.tags)
            and query.get("search", "").lower() in repo.id.lower()
            and query.get("author", repo.owner) == repo.owner
        ]

    async def _tree(self, request: Request) -> Any:
        """Every file, as with `recursive=True`; folders are not listed."""
        commit = self._commit_of(request, self._repo(request))
        return [
            {"type": "file", "path": path, "oid": blob.git_oid, "size": len(blob.data)} | blob.lfs("oid")
            for path, blob in commit.files.items()
        ]

    async def _refs(self, request: Request) -> Any:
        def refs(kind: str, names: Mapping[str, str]) -> list[dict[str, str]]:
            return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in names.items()]

        repo = self._repo(request)
        return {"branches": refs("heads", repo.branches), "tags": refs("tags", repo.tags), "converts": []}

    async def _resolve(self, request: Request) -> Any:
        repo, account = self._repo(request), self._account(request)
        commit, path = self._commit_of(request, repo), parameter(request, "path")
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if repo.gated and (account is None or account.user != repo.owner):
            message = f"Access to model {repo.id} is restricted."
            raise Refusal(401 if account is None else 403, message, "GatedRepo", headers)
        if path not in commit.files:
            raise Refusal(404, "Entry not found", "EntryNotFound", headers)
        blob = commit.files[path]
        headers["ETag"] = f'"{blob.etag}"'
        if blob.large:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        return in_range(request.headers.get("range"), Answer(200, headers, blob.data))

    # Writing.

    async def _create(self, request: Request) -> Any:
        wish = await request.json()
        account = self._require_writer(request, wish.get("organization"))
        id = f"{account.user}/{wish['name']}"
        answer = {"url": f"{self.endpoint}/{id}", "name": id}
        if id in self.repos:
            return Answer.json(answer | {"error": "You already created this model repo"}, 409)
        self.add_repo(id, {".gitattributes": b"*.safetensors filter=lfs\n"}, wish.get("visibility") == "private")
        return answer

    async def _validate_yaml(self, request: Request) -> Any:
        try:
            metadata = front_matter((await request.json())["content"])
        except (ValueError, yaml.YAMLError) as error:
            return Answer.json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        missing = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return {"errors": [], "warnings": missing}

    async def _preupload(self, request: Request) -> Any:
        known = self._commit_of(request, self._repo_to_write(request)).files
        modes = []
        for file in (await request.json())["files"]:
            path, mode = file["path"], "lfs" if is_large(file["path"], file["size"]) else "regular"
            oid = known[path].etag if path in known else None
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": modes}

    async def _lfs_batch(self, request: Request) -> Any:
        repo = self._repo_to_write(request)
        verify = {"href": f"{self.endpoint}/{repo.id}.git/info/lfs/objects/verify"}
        objects = []
        for wish in (await request.json())["objects"]:
            upload = {"href": f"{self.endpoint}/lfs/{wish['oid']}"}
            missing = wish["oid"] not in self.lfs
            objects.append(wish | ({"actions": {"upload": upload, "verify": verify}} if missing else {}))
        return {"transfer": "basic", "objects": objects}

    async def _lfs_store(self, request: Request) -> Any:
        """The storage beside the Hub: it knows no tokens, only contents by their hash."""
        body = await request.body()
        if hashlib.sha256(body).hexdigest() != parameter(request, "oid"):
            raise Refusal(400, "The content does not have this sha256")
        self.lfs[parameter(request, "oid")] = body
        return {}

    async def _lfs_verify(self, request: Request) -> Any:
        self._repo_to_write(request)
        wish = await request.json()
        if len(self.lfs.get(wish["oid"], b"")) != wish["size"]:
            raise Refusal(404, "The object was not uploaded")
        return {}

    async def _commit(self, request: Request) -> Any:
        repo, branch = self._repo_to_write(request), parameter(request, "revision")
        if branch not in repo.branches:
            raise Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        header, *operations = [json.loads(line) for line in (await request.body()).splitlines()]
        head = repo.commits[repo.branches[branch]]
        if not head.oid.startswith(header["value"].get("parentCommit", "")):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(head.files)
        for operation in operations:
            self._apply(operation["key"], operation["value"], files)
        oid = repo.commit(files, header["value"]["summary"], branch)
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{repo.id}/commit/{oid}"}

    def _apply(self, key: str, value: Mapping[str, Any], files: dict[str, Blob]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]), large=False)
        elif key == "lfsFile" and value["oid"] in self.lfs:
            files[path] = Blob(self.lfs[value["oid"]], large=True)
        elif key == "deletedFile" and path in files:
            del files[path]
        else:
            raise Refusal(400, f"{key} {path}: no such object or file")

    async def _tag(self, request: Request) -> Any:
        repo = self._repo_to_write(request)
        commit, name = self._commit_of(request, repo), (await request.json())["tag"]
        if name in repo.tags:
            raise Refusal(409, "Tag reference exists already")
        repo.tags[name] = commit.oid
        return {}


def in_range(header: str | None, whole: Answer) -> Answer:
    """The part that a Range header asks for, or the whole."""
    match, size = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "bytes=-"), len(whole.body)
    if match is None or not any(match.groups()):
        return whole.with_body(whole.body, "application/octet-stream")
    first = int(match[1]) if match[1] else max(size - int(match[2]), 0)
    last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
    if first > last:
        raise Refusal(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    part = replace(whole, status=206).with_header("Content-Range", f"bytes {first}-{last}/{size}")
    return part.with_body(whole.body[first : last + 1], "application/octet-stream")


def describe(repo: Repo, commit: Commit, *, with_blobs: bool = False) -> dict[str, Any]:
    """Model info. Sizes and hashes come only with `?blobs=true`."""
    siblings: list[dict[str, Any]] = [{"rfilename": path} for path in commit.files]
    if with_blobs:
        for sibling, blob in zip(siblings, commit.files.values(), strict=True):
            sibling |= {"size": len(blob.data), "blobId": blob.git_oid} | blob.lfs("sha256")
    return {
        "id": repo.id, "modelId": repo.id, "author": repo.owner, "sha": commit.oid, "private": repo.private,
        "gated": "auto" if repo.gated else False, "createdAt": DATE, "lastModified": DATE, "downloads": 0, "likes": 0,
        "tags": commit.tags, "cardData": commit.card, "model-index": commit.card.get("model-index"),
        "siblings": siblings,
    }  # fmt: skip
