"""The loopback Hub, seen through the real client, and its faults, seen through plain HTTP."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from hub import READ, STRANGER, WRITE, Corrupt, DropAfter, Fault, Header, Hub, Json, Pause, Replace, Slow, Status
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import close_session

# The client's own way to send a file is deprecated in the library it sends it with.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

WEIGHTS = random.Random(0).randbytes(200_000)
CARD = b"---\ntags: [certtool, 'eps:8/255']\nlicense: mit\n---\n# A network\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    """The client in this process has read its environment long ago; it reads proxies when its session is made."""
    with pytest.MonkeyPatch.context() as patch, Hub() as hub:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("no_proxy", "127.0.0.1,localhost")
        close_session()
        yield hub
        close_session()


@pytest.fixture
def hub(server: Hub) -> Hub:
    server.clear()
    return server


def client(hub: Hub, token: str | bool = WRITE) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def commit(hub: Hub, files: dict[str, bytes], parent: str | None = None, token: str | bool = WRITE) -> str:
    additions = [CommitOperationAdd(path, data) for path, data in files.items()]
    return client(hub, token).create_commit("ada/net", additions, commit_message="add", parent_commit=parent).oid


def test_the_client_publishes_a_large_and_a_small_file(hub: Hub) -> None:
    api = client(hub)
    assert api.whoami()["name"] == "ada"
    api.create_repo("ada/net")
    first = api.model_info("ada/net").sha
    oid = commit(hub, {"model.safetensors": WEIGHTS, "README.md": CARD}, parent=first)
    assert oid == hub.head("ada/net")
    assert hub.repos["ada/net"].commits[oid].parent == first
    files = hub.files("ada/net")
    assert files.pop(".gitattributes")  # as on the real Hub, a new repository is not empty
    assert files == {"model.safetensors": WEIGHTS, "README.md": CARD}
    assert {seen.token for seen in hub.requests if seen.method == "PUT"} == {None}
    assert {seen.token for seen in hub.requests if seen.method == "POST"} == {WRITE}


def test_info_refs_and_tree_tell_what_was_published(hub: Hub) -> None:
    oid = hub.add_repo("ada/net", {"model.safetensors": WEIGHTS, "README.md": CARD})
    api = client(hub)
    api.create_tag("ada/net", tag="eps/8", revision=oid)
    hub.commit("ada/net", {"later.txt": b"x"})
    assert [(tag.name, tag.target_commit) for tag in api.list_repo_refs("ada/net").tags] == [("eps/8", oid)]
    info = api.model_info("ada/net", revision="eps/8", files_metadata=True)
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    assert info.sha == oid
    assert info.tags == ["certtool", "eps:8/255", "license:mit"]
    assert {file.rfilename: (file.size, file.lfs and file.lfs.sha256) for file in info.siblings} == {
        "model.safetensors": (200_000, sha256),
        "README.md": (len(CARD), None),
    }
    tree = {file.path: file for file in api.list_repo_tree("ada/net", revision=oid, recursive=True)}
    assert {path: (file.size, file.lfs and file.lfs.sha256) for path, file in tree.items()} == {
        "model.safetensors": (200_000, sha256),
        "README.md": (len(CARD), None),
    }
    git_blob = subprocess.run(["git", "hash-object", "--stdin"], input=CARD, capture_output=True, check=True)
    assert tree["README.md"].blob_id == git_blob.stdout.decode().strip()


def test_a_stale_parent_is_refused_and_nothing_changes(hub: Hub) -> None:
    first = hub.add_repo("ada/net", {"a.txt": b"a"})
    second = hub.commit("ada/net", {"b.txt": b"b"})
    with pytest.raises(HfHubHTTPError) as error:
        commit(hub, {"c.txt": b"c"}, parent=first)
    assert error.value.response.status_code == 412
    assert hub.head("ada/net") == second


def test_files_can_be_deleted_and_unchanged_files_make_no_commit(hub: Hub) -> None:
    hub.add_repo("ada/net", {"a.txt": b"a", "model.safetensors": WEIGHTS})
    client(hub).create_commit("ada/net", [CommitOperationDelete("a.txt")], commit_message="delete")
    assert hub.files("ada/net") == {"model.safetensors": WEIGHTS}
    assert commit(hub, {"model.safetensors": WEIGHTS}) == hub.head("ada/net")
    assert [seen.path.split("/")[-2] for seen in hub.requests].count("commit") == 1


def test_what_exists_is_a_conflict(hub: Hub) -> None:
    api, oid = client(hub), hub.add_repo("ada/net", {"a.txt": b"a"})
    api.create_tag("ada/net", tag="v1", revision=oid)
    for again in (lambda: api.create_repo("ada/net"), lambda: api.create_tag("ada/net", tag="v1")):
        with pytest.raises(HfHubHTTPError) as error:
            again()
        assert error.value.response.status_code == 409
    assert api.create_repo("ada/net", exist_ok=True).repo_id == "ada/net"


@pytest.mark.parametrize(("card", "error"), [(b"---\n[a\n---\n", ValueError), (b"no metadata", UserWarning)])
def test_a_card_is_checked_before_anything_is_uploaded(hub: Hub, card: bytes, error: type[Exception]) -> None:
    hub.add_repo("ada/net", {"a.txt": b"a"})
    with pytest.raises(error, match=r"metadata in README\.md"):
        commit(hub, {"README.md": card, "model.safetensors": WEIGHTS})
    assert [seen.path for seen in hub.requests] == ["/api/validate-yaml"]


def test_models_are_found_by_all_their_tags(hub: Hub) -> None:
    hub.add_repo("ada/small", {}, tags=["certtool", "eps:2/255"])
    hub.add_repo("bob/large", {}, tags=["certtool", "eps:8/255"])
    hub.add_repo("ada/secret", {}, tags=["certtool"], private=True)
    stranger = client(hub, STRANGER)

    def found(api: HfApi, **query: object) -> list[str]:
        return [model.id for model in api.list_models(**query)]

    assert found(stranger, filter="certtool") == ["ada/small", "bob/large"]
    assert found(stranger, filter=["certtool", "eps:8/255"]) == ["bob/large"]
    assert found(stranger, search="SMALL") == ["ada/small"]
    assert found(client(hub), author="ada") == ["ada/small", "ada/secret"]
    assert next(stranger.list_models(search="small")).sha is None
    assert next(stranger.list_models(search="small", full=True)).sha == hub.head("ada/small")


def test_downloads_are_bit_identical(hub: Hub, tmp_path: Path) -> None:
    oid = hub.add_repo("ada/net", {"deep/model.safetensors": WEIGHTS, "a b%.txt": b"text"})
    api = client(hub, token=False)
    weights = Path(api.hf_hub_download("ada/net", "deep/model.safetensors", cache_dir=tmp_path))
    assert weights.read_bytes() == WEIGHTS
    assert weights.resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert oid in weights.parts
    assert Path(api.hf_hub_download("ada/net", "a b%.txt", revision=oid, cache_dir=tmp_path)).read_bytes() == b"text"
    assert {seen.token for seen in hub.requests} == {None}


@pytest.mark.parametrize(
    ("token", "error", "status"),
    [(False, RepositoryNotFoundError, 401), (STRANGER, RepositoryNotFoundError, 404), ("hf_x", HfHubHTTPError, 401)],
)
def test_a_private_repository_does_not_exist_for_others(
    hub: Hub, tmp_path: Path, token: str | bool, error: type[HfHubHTTPError], status: int
) -> None:
    hub.add_repo("ada/net", {"a.txt": b"a"}, private=True)
    api = client(hub, token)
    for ask in (
        lambda: api.model_info("ada/net"),
        lambda: api.hf_hub_download("ada/net", "a.txt", cache_dir=tmp_path),
    ):
        with pytest.raises(HfHubHTTPError) as caught:
            ask()
        assert (type(caught.value), caught.value.response.status_code) == (error, status)
    assert client(hub, READ).model_info("ada/net").private


@pytest.mark.parametrize("token", [READ, STRANGER])
def test_without_the_right_to_write_nothing_is_written(hub: Hub, token: str) -> None:
    head, api = hub.add_repo("ada/net", {"a.txt": b"a"}), client(hub, token)
    for write in (
        lambda: commit(hub, {"b.txt": b"b"}, token=token),
        lambda: api.create_tag("ada/net", tag="v1"),
        lambda: api.create_repo("ada/other"),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            write()
        assert error.value.response.status_code == 403
    assert (hub.head("ada/net"), hub.repos["ada/net"].tags, [*hub.repos]) == (head, {}, ["ada/net"])


def test_what_is_missing_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.add_repo("ada/net", {"a.txt": b"a"})
    hub.add_repo("ada/gated", {"a.txt": b"a"}, gated=True)
    api = client(hub, STRANGER)
    with pytest.raises(RevisionNotFoundError):
        api.model_info("ada/net", revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download("ada/net", "b.txt", cache_dir=tmp_path)
    with pytest.raises(GatedRepoError):
        api.hf_hub_download("ada/gated", "a.txt", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("asked", "part"),
    [("bytes=10-19", slice(10, 20)), ("bytes=199990-", slice(199_990, None)), ("bytes=-5", slice(-5, None))],
)
def test_a_range_gives_that_part(hub: Hub, asked: str, part: slice) -> None:
    hub.add_repo("ada/net", {"model.safetensors": WEIGHTS})
    answer = get(hub, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, WEIGHTS[part])
    assert answer.headers["Content-Range"].endswith("/200000")
    assert hub.requests[-1].range == asked
    assert get(hub, headers={"Range": "bytes=200000-"}).status_code == 416


# Faults.

MODEL = "/ada/net/resolve/main/model.safetensors"
DIRECT = {"trust_env": False, "verify": False}  # no proxy, and no time spent on certificates


def get(hub: Hub, headers: dict[str, str] | None = None) -> httpx2.Response:
    return httpx2.get(hub.endpoint + MODEL, headers=headers, **DIRECT)


def with_fault(hub: Hub, fault: Fault, pattern: str = "GET */resolve/*") -> None:
    hub.add_repo("ada/net", {"model.safetensors": WEIGHTS})
    hub.faults[pattern] = fault


def test_a_status_is_answered_so_many_times(hub: Hub) -> None:
    with_fault(hub, Status(503, {"Retry-After": "7"}, times=2))
    answers = [get(hub) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 200]
    assert answers[0].headers["Retry-After"] == "7"
    assert not hub.faults


def test_a_refused_request_has_no_effect_and_a_lost_answer_has(hub: Hub) -> None:
    with_fault(hub, Status(500, times=1), "POST */commit/*")
    head = hub.head("ada/net")
    with pytest.raises(HfHubHTTPError):
        commit(hub, {"b.txt": b"b"})
    assert hub.head("ada/net") == head
    hub.faults["POST */commit/*"] = DropAfter(0, times=1)
    with pytest.raises(httpx2.RemoteProtocolError):
        commit(hub, {"b.txt": b"b"})
    assert hub.files("ada/net")["b.txt"] == b"b"


def test_a_connection_breaks_in_mid_body_and_the_client_resumes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # it resumes after whole chunks, of 10 MB
    with_fault(hub, DropAfter(70_000, times=2))
    with httpx2.stream("GET", hub.endpoint + MODEL, **DIRECT) as answer:
        chunks = []
        with pytest.raises(httpx2.RemoteProtocolError):
            chunks.extend(answer.iter_raw())
    assert answer.headers["Content-Length"] == "200000"
    assert b"".join(chunks) == WEIGHTS[:70_000]
    path = client(hub).hf_hub_download("ada/net", "model.safetensors", cache_dir=tmp_path)
    assert Path(path).read_bytes() == WEIGHTS
    assert hub.requests[-1].range == "bytes=70000-"


def test_a_corrupt_file_has_the_right_size(hub: Hub) -> None:
    with_fault(hub, Corrupt())
    body = get(hub).content
    assert len(body) == len(WEIGHTS)
    assert [index for index in range(len(body)) if body[index] != WEIGHTS[index]] == [100_000]


def test_a_page_can_stand_in_for_the_weights(hub: Hub) -> None:
    with_fault(hub, Replace(b"<html>", "text/html"), "* */resolve/*")
    assert (get(hub).content, get(hub).headers["Content-Type"]) == (b"<html>", "text/html")
    head = httpx2.head(hub.endpoint + MODEL, **DIRECT).headers
    assert (head["Content-Length"], "X-Linked-Size" in head) == ("6", False)


def test_headers_and_documents_can_lie(hub: Hub) -> None:
    with_fault(hub, Header("X-Linked-Etag", '"../../x"'), "HEAD */resolve/*")
    hub.faults["* */resolve/*"] = Header("X-Repo-Commit", None)
    hub.faults["GET /api/models/ada/net"] = Json(lambda info: info | {"sha": "../../x"})
    head = httpx2.head(hub.endpoint + MODEL, **DIRECT).headers
    assert (head["X-Linked-Etag"], "X-Repo-Commit" in head) == ('"../../x"', False)
    assert client(hub).model_info("ada/net").sha == "../../x"


def test_a_slow_answer_takes_its_time(hub: Hub) -> None:
    with_fault(hub, Slow(400_000))
    start = time.monotonic()
    assert get(hub).content == WEIGHTS
    assert time.monotonic() - start >= 0.4


def test_a_paused_answer_goes_on(hub: Hub) -> None:
    pause = Pause(50_000)
    with_fault(hub, pause)
    pause.go_on.set()
    assert get(hub).content == WEIGHTS
    assert pause.reached.is_set()


def test_a_process_can_be_killed_in_mid_file(hub: Hub, tmp_path: Path) -> None:
    pause = Pause(150_000)
    with_fault(hub, pause)
    code = "from huggingface_hub import hf_hub_download as get; get('ada/net', 'model.safetensors')"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | hub.environment(tmp_path, READ))
    assert pause.reached.wait(30)
    process.kill()
    process.wait()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == len(WEIGHTS)]
    assert [(seen.method, seen.token) for seen in hub.requests] == [("HEAD", READ), ("GET", READ)]


def test_the_hub_comes_back_on_its_port_with_its_state(hub: Hub) -> None:
    with_fault(hub, Pause(50_000, times=1))
    endpoint = hub.endpoint
    with httpx2.stream("GET", endpoint + MODEL, **DIRECT) as answer:
        hub.stop()
        with pytest.raises(httpx2.RemoteProtocolError):
            answer.read()
    with pytest.raises(httpx2.ConnectError):
        get(hub)
    hub.start()
    assert hub.endpoint == endpoint
    assert get(hub).content == WEIGHTS
