"""Fetching from a Hub that works, breaks, lies and attacks. The client is the real one, the Hub runs on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, Cli
from hub import READ, STRANGER, WRITE, Corrupt, DropAfter, Fault, Header, Hub, Json, Pause, Replace, Slow, Status

import certtool
from certtool.errors import InputError, OutsideError
from certtool.zoo import HubRef, parse_reference
from certtool.zoo import download as download_module
from certtool.zoo import hub as hub_module
from certtool.zoo.cache import Cache, cache_folder
from certtool.zoo.endpoint import Endpoint
from certtool.zoo.fetch import fetch
from certtool.zoo.layout import read_manifest
from certtool.zoo.refusals import Unreachable
from certtool.zoo.resolve import resolve

REPO = "ada/net"
WEIGHTS = "GET */resolve/*/model.safetensors"
INFO = "GET /api/models/*"
ZERO = "0" * 40


def nothing_kept() -> bool:
    """No model, whole or partial, where models are looked for."""
    return not list((cache_folder() / "models").rglob("*.safetensors"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# --- when all is well


def test_fetched_is_bit_identical_and_kept(hub: Hub, files: dict[str, bytes]) -> None:
    commit = hub.add_repo(REPO, files)
    fetched = fetch(HubRef(REPO))
    assert fetched.ref == HubRef(REPO, commit)
    assert contents(fetched.folder.path) == files
    assert {seen.token for seen in hub.requests} == {None}
    assert not list((cache_folder() / "incoming").rglob("*.safetensors"))
    before = len(hub.requests)
    assert fetch(HubRef(REPO, commit)).folder == fetched.folder
    assert len(hub.requests) == before  # a commit that is here needs no Hub


def test_a_moved_branch_is_fetched_again_and_a_commit_is_not(hub: Hub, files: dict[str, bytes]) -> None:
    first = hub.add_repo(REPO, files)
    one = fetch(HubRef(REPO))
    second = hub.commit(REPO, {".gitattributes": b"*.safetensors filter=lfs\n"})
    other = fetch(HubRef(REPO))
    assert (one.ref.commit, other.ref.commit) == (first, second)
    assert one.folder.path != other.folder.path


def test_offline_with_a_filled_cache(hub: Hub, files: dict[str, bytes]) -> None:
    commit = hub.add_repo(REPO, files)
    fetch(HubRef(REPO))
    hub.stop()
    try:
        again = fetch(HubRef(REPO))
        assert again.ref.commit == commit
        assert again.note is not None
        assert "cannot reach" in again.note
        assert fetch(HubRef(REPO, commit)).note is None
        with pytest.raises(Unreachable, match="cannot reach"):
            fetch(HubRef("ada/other"))
    finally:
        hub.start()


def test_python_and_references_take_the_hub(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add_repo(REPO, files)
    model = certtool.load(f"hf://{REPO}")
    assert model.sha256 == json.loads(files["manifest.json"])["files"]["model.safetensors"]["sha256"]
    assert resolve(f"hf://{REPO}@main") == model.path


def test_progress_counts_every_byte(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add_repo(REPO, files)
    seen: list[tuple[int, int]] = []
    fetch(HubRef(REPO), lambda done, total: seen.append((done, total)))
    total = sum(len(content) for content in files.values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)


# --- tokens


def test_private_is_asked_for_anonymously_first(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repo(REPO, files, private=True)
    with pytest.raises(OutsideError, match="or it is private"):
        fetch(HubRef(REPO))
    monkeypatch.setenv("HF_TOKEN", READ)
    assert contents(fetch(HubRef(REPO)).folder.path) == files
    tokens = [seen.token for seen in hub.requests]
    assert tokens[:3] == [None, None, READ]
    assert set(tokens[3:]) == {READ}
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    monkeypatch.setenv("CERTTOOL_CACHE", str(cache_folder()) + "-other")
    with pytest.raises(OutsideError, match="or it is private"):
        fetch(HubRef(REPO))


def test_gated_takes_the_token_once_it_is_refused_without(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real Hub lists a gated repository for everybody."""
    hub.add_repo(REPO, files, gated=True)
    with pytest.raises(OutsideError, match="is gated"):
        fetch(HubRef(REPO))
    hub.requests.clear()
    monkeypatch.setenv("HF_TOKEN", READ)
    assert contents(fetch(HubRef(REPO)).folder.path) == files
    assert [seen.token for seen in hub.requests[:3]] == [None, None, READ]


@pytest.mark.parametrize("token", ["hf_a\nb", "hf_a b", "hf_\u00e4"])
def test_a_token_that_is_none_is_not_repeated(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    hub.add_repo(REPO, files, private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(OutsideError, match="the token is none") as caught:
        fetch(HubRef(REPO))
    assert "hf_" not in str(caught.value)


def test_wrong_token(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo(REPO, files, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OutsideError, match=r"does not accept the token|or it is private") as caught:
        fetch(HubRef(REPO))
    assert "hf auth login" in str(caught.value.problems[0].hint)


def test_a_stored_login_stays_with_the_hub_it_was_made_for(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    (tmp_path / "token").write_text("hf_stored_for_the_public_hub")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    hub.add_repo(REPO, files, private=True)
    with pytest.raises(OutsideError, match="or it is private"):
        fetch(HubRef(REPO))
    assert {seen.token for seen in hub.requests} == {None}
    assert Endpoint("https://huggingface.co").token() == "hf_stored_for_the_public_hub"


def test_a_redirection_elsewhere_does_not_get_the_token(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repo(REPO, files, private=True)
    monkeypatch.setenv("HF_TOKEN", WRITE)
    with Hub() as other:
        commit = other.add_repo(REPO, files)
        location = f"{other.endpoint}/{REPO}/resolve/{commit}/model.safetensors"
        hub.faults[WEIGHTS] = Status(302, {"Location": location})
        other.faults[WEIGHTS] = Header("X-Repo-Commit", hub.head(REPO))
        assert contents(fetch(HubRef(REPO)).folder.path) == files
        assert {seen.token for seen in other.requests} == {None}


# --- what breaks, and is worth another try


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (WEIGHTS, DropAfter(3000, times=1)),
        (WEIGHTS, DropAfter(10, times=3)),
        (WEIGHTS, Status(503, times=2)),
        (WEIGHTS, Status(429, {"Retry-After": "0"}, times=1)),
        (INFO, Status(503, times=2)),
        (INFO, Status(500, times=1)),
        (WEIGHTS, Corrupt(times=1)),
    ],
    ids=str,
)
def test_what_passes_is_tried_again(hub: Hub, files: dict[str, bytes], pattern: str, fault: Fault) -> None:
    hub.add_repo(REPO, files)
    hub.faults[pattern] = fault
    assert contents(fetch(HubRef(REPO)).folder.path) == files


def test_a_dropped_connection_is_resumed_where_it_broke(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add_repo(REPO, files)
    hub.faults[WEIGHTS] = DropAfter(3000, times=1)
    fetch(HubRef(REPO))
    ranges = [seen.range for seen in hub.requests if seen.path.endswith("model.safetensors") and seen.range]
    assert ranges == ["bytes=3000-"]


@pytest.mark.parametrize("pattern", [WEIGHTS, INFO])
def test_a_trickle_is_not_waited_for(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(download_module, "WINDOW", 0.2)
    monkeypatch.setattr(hub_module, "PATIENCE", 0.5)
    hub.add_repo(REPO, files)
    hub.faults[pattern] = Slow(30)
    with pytest.raises(Unreachable, match=r"bytes a second|too long"):
        fetch(HubRef(REPO))
    assert nothing_kept()


def test_a_server_that_gives_and_takes(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ranges every break is a new beginning: a little more, a little less, for ever."""
    hub.add_repo(REPO, files)
    cuts = iter([500, 1000] * 100)
    monkeypatch.setattr(DropAfter, "change", lambda self, answer: replace(answer, status=200, cut=next(cuts)))
    hub.faults[WEIGHTS] = DropAfter(0)
    with pytest.raises(Unreachable):
        fetch(HubRef(REPO))
    assert len([seen for seen in hub.requests if seen.path.endswith("model.safetensors")]) < 10


def test_a_warning_of_the_hub_steers_no_terminal(
    hub: Hub, files: dict[str, bytes], process: Cli, tmp_path: Path
) -> None:
    hub.add_repo(REPO, files)
    hub.faults["GET *"] = Header("X-HF-Warning", "topic; \x1b[2Jfake")
    done = process(
        "zoo", "fetch", f"hf://{REPO}", **hub.environment(tmp_path / "home"), CERTTOOL_CACHE=str(tmp_path / "c")
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr


def test_pages_without_an_end(hub: Hub, files: dict[str, bytes]) -> None:
    from certtool.zoo.remote import remote_models

    hub.add_repo(REPO, files)
    hub.faults["GET /api/models"] = Header("Link", f'<{hub.endpoint}/api/models?filter=none>; rel="next"')
    assert remote_models() == []
    assert len(hub.requests) == 1
    hub.faults["GET /api/models"] = Json(lambda document: [{"id": None, "tags": [5]}])
    with pytest.raises(OutsideError, match="as a Hub does"):
        remote_models()


def test_a_server_that_restarts(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add_repo(REPO, files)
    pause = Pause(2000)
    hub.faults[WEIGHTS] = pause

    def restart() -> None:
        pause.reached.wait(20)
        hub.stop()
        hub.faults.clear()
        hub.start()

    thread = threading.Thread(target=restart)
    thread.start()
    fetched = fetch(HubRef(REPO))
    thread.join()
    assert contents(fetched.folder.path) == files


def test_sigkill_in_mid_fetch_and_again(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """The second process goes on where the first was killed."""
    commit = hub.add_repo(REPO, files)
    environment = ENVIRONMENT | hub.environment(tmp_path / "home") | {"CERTTOOL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "certtool", "zoo", "fetch", f"hf://{REPO}", "--json"]
    pause = Pause(5000)
    hub.faults[WEIGHTS] = pause
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert pause.reached.wait(60)
    part = tmp_path / "cache" / "incoming" / f"127.0.0.1-{hub.endpoint.rsplit(':')[-1]}" / "ada--net" / commit
    while not (part / "model.safetensors").exists() or not (part / "model.safetensors").stat().st_size:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    pause.go_on.set()
    hub.faults.clear()
    assert nothing_kept()
    arrived = (part / "model.safetensors").stat().st_size
    assert 0 < arrived < len(files["model.safetensors"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents(Path(json.loads(done.stdout)["path"])) == files
    assert [seen.range for seen in hub.requests if seen.range] == [f"bytes={arrived}-"]


# --- what is wrong and stays wrong: a sentence, exit 3, nothing kept


def renamed(name: object) -> Callable[[Any], Any]:
    def edit(document: Any) -> Any:
        document["siblings"][0]["rfilename"] = name
        return document

    return edit


def resized(size: object) -> Callable[[Any], Any]:
    def edit(document: Any) -> Any:
        for sibling in document["siblings"]:
            if sibling["rfilename"] == "model.safetensors":
                sibling["size"] = size
                sibling["lfs"]["size"] = size
        return document

    return edit


def with_sha(sha: str) -> Callable[[Any], Any]:
    return lambda document: document | {"sha": sha}


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "same size, other bytes": (WEIGHTS, Corrupt(), "does not have the sha256"),
    "a web page": (WEIGHTS, Replace(b"<!doctype html><p>log in"), "web page"),
    "a page that calls itself data": (WEIGHTS, Replace(b"<html>" * 9000, "application/octet-stream"), "more of"),
    "busy for ever": (WEIGHTS, Status(503), "trouble of its own"),
    "rate limit for ever": (INFO, Status(429), "asked too often"),
    "the file is gone": (WEIGHTS, Status(404, {"X-Error-Code": "EntryNotFound"}), "lacks a file"),
    "not a Hub": (INFO, Replace(b"<html>hello", "text/html"), "Hub"),
    "hostile ETag": (WEIGHTS, Header("ETag", '"../../x"'), "strange ETag"),
    "hostile X-Repo-Commit": (WEIGHTS, Header("X-Repo-Commit", "../../etc"), "a commit that is none"),
    "another X-Repo-Commit": (WEIGHTS, Header("X-Repo-Commit", ZERO), "answered with"),
    "a sha that is a path": (INFO, Json(with_sha("../../../../tmp/x")), "a commit that is none"),
    "a sha with control characters": (INFO, Json(with_sha("\x1b[2J" + ZERO)), "a commit that is none"),
    "a name that climbs": (INFO, Json(renamed("../../../evil.safetensors")), "not part of a certtool model"),
    "an absolute name": (INFO, Json(renamed("/etc/passwd")), "not part of a certtool model"),
    "a pickle": (INFO, Json(renamed("pytorch_model.bin")), "not part of a certtool model"),
    "a size that lies, more": (INFO, Json(resized(10_000_000)), "do not agree"),
    "a size that lies, less": (INFO, Json(resized(10)), "do not agree"),
    "a size beyond reason": (INFO, Json(resized(1 << 50)), "cannot have the size"),
    "a size that is text": (INFO, Json(resized("../x")), "cannot have the size"),
    "a redirection in the clear": (WEIGHTS, Status(302, {"Location": "http://example.com/x"}), "not a Hub to trust"),
    "a redirection to a file": (WEIGHTS, Status(302, {"Location": "file:///etc/passwd"}), "not a Hub to trust"),
    "in circles": (WEIGHTS, Status(302, {"Location": "?again"}), "in circles"),
    "a redirection to nowhere": (WEIGHTS, Status(302), "status 302"),
    "not modified": (WEIGHTS, Status(304), "status 304"),
    "a redirection to no address": (WEIGHTS, Status(302, {"Location": "http://[x"}), "which is no address"),
    "a listing in the clear": (INFO, Status(302, {"Location": "http://example.com/x"}), "not a Hub to trust"),
    "no range for ever": (WEIGHTS, Status(416), "status 416"),
    "a listing of another shape": (INFO, Json(lambda document: document | {"siblings": 5}), "as a Hub does"),
    "a name that is a number": (INFO, Json(renamed(5)), "as a Hub does"),
    "a listing without a bottom": (INFO, Replace(b"[" * 200_000, "application/json"), "as a Hub does"),
    "a number without an end": (INFO, Replace(b"9" * 5000, "application/json"), "as a Hub does"),
    "a listing without an end": (INFO, Replace(b" " * (hub_module.LONGEST + 1), "application/json"), "no end"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_stays_wrong(hub: Hub, files: dict[str, bytes], case: str) -> None:
    pattern, fault, words = FAULTS[case]
    hub.add_repo(REPO, files)
    hub.faults[pattern] = fault
    with pytest.raises(OutsideError, match=words) as caught:
        fetch(HubRef(REPO))
    assert "\x1b" not in str(caught.value)
    assert nothing_kept()
    assert not list(cache_folder().parent.rglob("*evil*"))
    hub.faults.clear()
    assert contents(fetch(HubRef(REPO)).folder.path) == files  # and nothing it left is in the way


def lying(files: dict[str, bytes], **change: object) -> dict[str, bytes]:
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["model.safetensors"] |= change
    return files | {"manifest.json": json.dumps(manifest).encode()}


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b'{"schema": "certtool.manifest/1", "files": {}, "files": {}}', "`manifest.json` is not JSON: a name stands"),
     (b'{"schema": "certtool.manifest/2", "files": {}}', "`manifest.json` is not a manifest: schema: "),
     (b"[" * 100_000, "`manifest.json` is not JSON: "), (None, "cannot read `.*manifest.json`: no such file")],
    ids=["a name twice", "another schema", "nested without end", "not there"],
)  # fmt: skip
def test_a_manifest_that_cannot_be_one(content: bytes | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=reason):
        read_manifest(file)


def test_a_manifest_that_lies(hub: Hub, files: dict[str, bytes]) -> None:
    small = {"sha256": json.loads(files["manifest.json"])["files"]["recipe.toml"]["sha256"]}
    hub.add_repo(REPO, lying(files, **small))
    with pytest.raises(OutsideError, match="do not agree"):
        fetch(HubRef(REPO))
    hub.add_repo("ada/more", files | {"manifest.json": b'{"schema": "certtool.manifest/1", "files": {"../x": {}}}'})
    with pytest.raises(OutsideError, match="no certtool model"):
        fetch(HubRef("ada/more"))
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["recipe.toml"]["sha256"] = "0" * 64
    hub.add_repo("ada/small", files | {"manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(OutsideError, match=r"recipe.toml.*sha256"):
        fetch(HubRef("ada/small"))
    assert nothing_kept()


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "config.json", "certificates/proof.json"])
def test_a_repository_that_is_not_whole(hub: Hub, files: dict[str, bytes], name: str) -> None:
    hub.add_repo(REPO, {other: content for other, content in files.items() if other != name})
    with pytest.raises(OutsideError, match=name.replace(".", r"\.")):
        fetch(HubRef(REPO))
    assert nothing_kept()


def test_a_certificate_of_another_model(hub: Hub, files: dict[str, bytes], small_run: Path, proof: Path) -> None:
    from certtool import checkpoint
    from certtool.zoo.staging import stage

    hub.add_repo(REPO, stage(checkpoint.load(small_run), [proof]).files)
    with pytest.raises(OutsideError, match="of another model"):
        fetch(HubRef(REPO))
    assert nothing_kept()


def test_unknown_repository_and_revision(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add_repo(REPO, files)
    with pytest.raises(OutsideError, match="there is no repository `ada/nothing`"):
        fetch(HubRef("ada/nothing"))
    with pytest.raises(OutsideError, match="no such revision"):
        fetch(HubRef(REPO, "v9"))
    with pytest.raises(OutsideError, match="no such revision"):
        fetch(HubRef(REPO, ZERO))


@pytest.mark.parametrize("name", ["model.safetensors", "certificates"])
def test_a_link_among_what_arrives_leads_nowhere(hub: Hub, files: dict[str, bytes], tmp_path: Path, name: str) -> None:
    """In a cache that others can write to."""
    commit = hub.add_repo(REPO, files)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    incoming = Cache(cache_folder(), Endpoint.from_environment().host).incoming(REPO, commit)
    incoming.mkdir(parents=True)
    (incoming / name).symlink_to(elsewhere if name == "certificates" else elsewhere / "precious")
    assert contents(fetch(HubRef(REPO)).folder.path) == files
    assert contents(elsewhere) == {"precious": b"precious"}


def test_a_damaged_cache_is_noticed(hub: Hub, files: dict[str, bytes]) -> None:
    commit = hub.add_repo(REPO, files)
    fetched = fetch(HubRef(REPO))
    content = bytearray(fetched.folder.model.read_bytes())
    content[-1] ^= 1
    fetched.folder.model.write_bytes(content)
    with pytest.raises(OutsideError, match=r"cached copy .* is damaged"):
        fetch(HubRef(REPO, commit))


@pytest.mark.parametrize(
    "url", ["http://example.com", "ftp://127.0.0.1", "https://user:word@host", "file:///x", "x", "http://[x"]
)
def test_endpoints_that_are_not_trusted(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(OutsideError, match="not a Hub to trust"):
        fetch(HubRef(REPO))


def test_no_space_left(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails in the middle of the weights."""
    hub.add_repo(REPO, files)
    limit = len(files["model.safetensors"]) // 2
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"sys.argv = ['certtool', 'zoo', 'fetch', 'hf://{REPO}']\n"
        "from certtool.cli.app import main\nmain()\n"
    )
    environment = ENVIRONMENT | hub.environment(tmp_path / "home") | {"CERTTOOL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "cannot write" in done.stderr
    assert nothing_kept()


# --- references


def test_references_that_cannot_be() -> None:
    for text in (
        "hf://",
        "hf://ada",
        "hf://ada/net@",
        "hf://ada/net@../x",
        "hf://../net",
        "hf://a/b/c",
        "hf://a/b@x y",
    ):
        with pytest.raises(InputError):
            parse_reference(text, [])
    assert parse_reference("hf://ada/net@v1", []) == HubRef("ada/net", "v1")


def test_a_name_that_is_also_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_cnn7").mkdir()
    with pytest.raises(InputError, match="a model of the zoo and a path here") as caught:
        parse_reference("tiny_cnn7", ["tiny_cnn7"])
    assert caught.value.problems[0].hint == "write `zoo:tiny_cnn7` or `./tiny_cnn7`"
    assert os.listdir(tmp_path) == ["tiny_cnn7"]
