"""Records, publishing, checking: what is shared is proven, and what is not proven is not shared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ENVIRONMENT, Cli
from hub import READ, WRITE, DropAfter, Hub, Json, Status

from certtool import checkpoint
from certtool.errors import CertToolError, InputError, OutsideError
from certtool.zoo import HubRef, Record, find_record, records, zoo_folder
from certtool.zoo.check import check
from certtool.zoo.describe import Cost, record_of
from certtool.zoo.fetch import fetch
from certtool.zoo.publish import Plan, plan, publish
from certtool.zoo.readme import readme
from certtool.zoo.records import read_record, render
from certtool.zoo.staging import certificate_of, stage

# The client's own way to send a file is deprecated in the library it sends it with.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
REPO = "ada/net"
PICTURE = b"\x89PNG\r\n\x1a\n not really"


@pytest.fixture
def prepared(robust_run: Path, proof: Path) -> Callable[..., Plan]:
    def prepare(run: Path = robust_run, **options: Any) -> Plan:
        settings = {"repo": REPO, "private": False, "tag": None, "licence": "apache-2.0", "cost": Cost()} | options
        return plan(checkpoint.load(run), [proof], (), picture=lambda record: PICTURE, **settings)

    return prepare


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setenv("HF_TOKEN", WRITE)
    return hub


# --- the records that come along


def test_every_record_is_there_whole_and_holds() -> None:
    known = records()
    assert "tiny_cnn7" in known
    for record in known.values():
        outcome = check(record, sample=5)
        assert outcome.state == "holds", outcome
        assert outcome.proofs >= 5


def test_the_readme_is_the_records() -> None:
    assert (zoo_folder() / "README.md").read_text() == readme(records().values())


def test_tiny_cnn7_is_small_and_has_metrics() -> None:
    folder = zoo_folder() / "tiny_cnn7"
    assert (folder / "model.safetensors").stat().st_size < 1_000_000
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 1_500_000
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = find_record("tiny_cnn7")
    assert len(lines) == record.training.epochs
    assert lines[-1]["test_clean_accuracy"] == pytest.approx(record.headline.clean, abs=1e-6)
    assert record.headline.certified_rigorous >= 0.85


def test_a_record_survives_its_own_file(tmp_path: Path) -> None:
    for name, record in records().items():
        file = tmp_path / f"{name}.toml"
        file.write_text(render(record))
        assert read_record(file) == record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"surplus": 1}, "surplus"),
        ({"sources": ["hf://ada/net@main"]}, "40 hex digits"),
        ({"sources": ["https://example.com/model.pth"]}, "40 hex digits"),
        ({"sources": []}, "sources"),
        ({"eps": "0.3"}, "none at the model's own eps"),
        ({"name": "../x"}, "name"),
        ({"results.0.certified_rigorous": 0.99}, "certified <= attacked <= clean"),
        ({"results.0.clean": 1.5}, "clean"),
        ({"results.0.eps": "0.2"}, "twice"),
        (
            {"results.0.attacked": 0.5, "results.0.certified_rigorous": 0.1, "results.0.certified_float32": 0.0},
            "more at",
        ),
        ({"model.sha256": "xyz"}, "sha256"),
        ({"certificate.file": "../proof.json"}, "certificate.file"),
    ],
    ids=str,
)
def test_records_are_strict(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    values = tomllib.loads((zoo_folder() / "tiny_cnn7.toml").read_text())
    for path, value in change.items():
        *parents, last = path.split(".")
        node: Any = values
        for part in parents:
            node = node[int(part)] if part.isdigit() else node[part]
        node[last] = value
    with pytest.raises(Exception, match=words):
        Record.model_validate(values)


def test_the_list_is_offline_quick_and_without_torch() -> None:
    program = (
        "import sys\nsys.argv = ['certtool', 'zoo', 'list', '--json']\n"
        "from certtool.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'huggingface_hub', 'rich.table') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    document = json.loads(done.stdout)
    assert document["schema"] == "certtool.zoo/1"
    assert [model["name"] for model in document["models"]] == list(records())


def test_the_list_can_be_narrowed(cli: Cli) -> None:
    def names(*arguments: str) -> list[str]:
        done = cli("zoo", "list", "--json", *arguments)
        assert done.returncode == 0, done.stdout
        return [model["name"] for model in json.loads(done.stdout)["models"]]

    assert "tiny_cnn7" in names("--dataset", "digits", "--eps", "1/10", "--min-certified", "0.8", "--sort", "certified")
    assert names("--min-certified", "1") == []
    assert names("--eps", "0.7") == []
    assert cli("zoo", "list", "--dataset", "digit").returncode == 2
    assert "did you mean `digits`" in cli("zoo", "list", "--dataset", "digit").stderr
    assert cli("zoo", "list", "--sort", "size").returncode == 2
    assert "88" in cli("zoo", "list").stdout


def test_show_has_layers_and_the_command(cli: Cli) -> None:
    done = cli("zoo", "show", "tiny_cnn7")
    assert "certtool train tiny_cnn7 --set seed=0" in done.stdout
    assert "Conv2d" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    document = json.loads(cli("zoo", "show", "tiny_cnn7", "--json").stdout)["models"][0]
    assert sum(layer["parameters"] for layer in document["layers"]) == document["model"]["parameters"]
    assert "did you mean `tiny_cnn7`" in cli("zoo", "show", "tiny_cnn").stderr


def test_a_zoo_name_works_where_a_model_does_without_any_network(cli: Cli, process: Cli) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    for name, run in (("tiny_cnn7", process), ("zoo:tiny_cnn7", cli)):
        done = run("verify", name, "--method", "ibp", "--no-attack", "--json", **nowhere)
        result = json.loads(done.stdout)["results"][0]
        assert result["certified_rigorous"] == pytest.approx(
            find_record("tiny_cnn7").headline.certified_rigorous, abs=0.01
        )
    assert cli("inspect", "zoo:tiny_cnn7", "--images", "20", **nowhere).returncode == 0
    refused = cli("inspect", "tiny_cnn7")
    assert refused.returncode == 2
    assert "`recipe:tiny_cnn7` or `zoo:tiny_cnn7`" in refused.stderr
    assert cli("verify", "tiny_cnn8").returncode == 2


# --- check


def altered(name: str, **change: Any) -> Record:
    values = find_record(name).model_dump(by_alias=True)
    for path, value in change.items():
        node = values
        *parents, last = path.split("__")
        for part in parents:
            node = node[part]
        node[last] = value
    return Record.model_validate(values)


def test_check_finds_what_does_not_fit() -> None:
    outcome = check(altered("tiny_cnn7", model__parameters=7), sample=0)
    assert outcome.state == "fails"
    assert outcome.reasons[0].startswith("model: ")
    outcome = check(altered("tiny_cnn7", model__sha256="0" * 64), sample=0)
    assert outcome.state == "fails"
    assert "does not have the sha256 of the record" in outcome.reasons[0]
    better = [result.model_dump() for result in find_record("tiny_cnn7").results]
    better[0]["certified_rigorous"] += 1 / 359
    better[0]["certified_float32"] = 0.0
    assert check(altered("tiny_cnn7", results=better), sample=0).state == "fails"


def test_a_record_nobody_can_reach_says_so(hub: Hub) -> None:
    record = altered("tiny_cnn7", sources=["hf://ada/gone@" + "1" * 40])
    outcome = check(record, sample=0)
    assert outcome.state == "unreachable"
    assert "none of the sources of `tiny_cnn7` can be reached" in outcome.reasons[0]


def test_sources_are_tried_in_order(hub: Hub) -> None:
    folder = zoo_folder() / "tiny_cnn7"
    content = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    commit = hub.add_repo("ada/tiny", content)
    record = altered("tiny_cnn7", sources=["hf://ada/gone@" + "1" * 40, f"hf://ada/tiny@{commit}"])
    outcome = check(record, sample=3)
    assert (outcome.state, outcome.source) == ("holds", f"hf://ada/tiny@{commit}")


# --- publish


def test_publish_fetch_verify_the_same_count(
    writer: Hub, robust_run: Path, proof: Path, cli: Cli, process: Cli, tmp_path: Path
) -> None:
    """The whole journey on the command line."""
    environment = writer.environment(tmp_path / "home", WRITE) | {"CERTTOOL_CACHE": str(tmp_path / "cache")}
    command = ["zoo", "publish", robust_run, "--repo", REPO, "--certificate", proof, "--tag", "v1"]
    dry = cli(*command, "--dry-run", **environment)
    assert dry.returncode == 0, dry.stderr
    assert not writer.requests
    asked = cli(*command, **environment)
    assert asked.returncode == 2
    assert "--yes" in asked.stderr
    assert REPO not in writer.repos
    done = process(*command, "--yes", "--json", **environment)
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    record = Record.model_validate(tomllib.loads(document["record"]))
    assert record.sources == [document["ref"]]
    assert writer.repos[REPO].tags["v1"] == document["ref"].split("@")[1]

    fetched = process("zoo", "fetch", f"hf://{REPO}@v1", "--sample", "5", "--out", "here", **environment)
    assert fetched.returncode == 0, fetched.stderr
    assert "the certificate holds" in fetched.stdout
    assert (tmp_path / "here" / "model.safetensors").read_bytes() == (robust_run / "model.safetensors").read_bytes()
    options = ("--method", "ibp", "--images", "60", "--no-attack", "--json")
    counts = []
    for model in (robust_run, f"hf://{REPO}@v1"):
        report = json.loads(cli("verify", model, *options, **environment).stdout)
        counts.append(report["results"][0]["counts"]["certified"])
    assert counts[0] == counts[1] == round(record.headline.certified_rigorous * 60)

    listed = json.loads(cli("zoo", "list", "--remote", "--eps", "0.05", "--json", **environment).stdout)["models"]
    assert [(model["repo"], model["dataset"], model["eps"]) for model in listed] == [(REPO, "digits", ["0.02", "0.05"])]
    assert json.loads(cli("zoo", "list", "--remote", "--eps", "0.3", "--json", **environment).stdout)["models"] == []


def test_the_card_is_what_the_hub_understands(writer: Hub, prepared: Callable[..., Plan]) -> None:
    publish(prepared())
    text = writer.files(REPO)["README.md"].decode()
    front = yaml.safe_load(text.split("---")[1])
    assert {"certtool", "certified-robustness", "eps:0.05", "eps:0.02"} <= set(front["tags"])
    (model,) = front["model-index"]
    metrics = [metric for result in model["results"] for metric in result["metrics"]]
    kinds = {(metric["type"], metric.get("args", {}).get("eps")) for metric in metrics}
    wanted = ("attacked_accuracy", "certified_accuracy")
    assert {(kind, eps) for kind in wanted for eps in ("0.05", "0.02")} <= kinds
    assert [metric["type"] for metric in metrics].count("accuracy") == 1
    shares = [m["value"] for m in metrics if m["type"] == "certified_accuracy" and m["args"]["eps"] == "0.05"]
    assert shares[0] <= shares[1]  # the rigorous ones, and all
    proven = next(m for m in metrics if m["type"] == "certified_accuracy" and m["args"]["eps"] == "0.05")
    assert proven["args"] | {"norm": "linf", "n": 60, "certificate": "certificates/proof.json"} == proven["args"]
    assert "verified" not in str(front)
    assert "certtool zoo fetch hf://ada/net@" in text
    assert writer.files(REPO)["certified.png"] == PICTURE


def test_only_what_is_staged_is_published(
    writer: Hub, prepared: Callable[..., Plan], robust_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(robust_run, tmp_path / "run")
    (run / ".env").write_text("SECRET=1")
    publish(prepared(run=run))
    names = set(writer.files(REPO)) - {".gitattributes"}
    assert names == {
        "README.md", "certified.png", "certificates/proof.json", "certificates/proof.witnesses.safetensors",
        "config.json", "manifest.json", "metrics.jsonl", "model.safetensors", "recipe.toml",
    }  # fmt: skip
    manifest = json.loads(writer.files(REPO)["manifest.json"])["files"]
    assert set(manifest) == names - {"manifest.json"}


def test_published_twice_is_the_same_commit(writer: Hub, prepared: Callable[..., Plan]) -> None:
    assert publish(prepared()).ref == publish(prepared()).ref


def test_what_an_older_version_left_is_removed(writer: Hub, prepared: Callable[..., Plan]) -> None:
    publish(prepared())
    writer.commit(REPO, {"certificates/old.json": b"{}"})
    publish(prepared())
    assert "certificates/old.json" not in writer.files(REPO)
    fetch(HubRef(REPO))


def test_private_and_taken(writer: Hub, prepared: Callable[..., Plan]) -> None:
    publish(prepared(private=True))
    assert writer.repos[REPO].private
    writer.add_repo("ada/public", {"model.safetensors": b"x"})
    with pytest.raises(OutsideError, match="exists and is public"):
        publish(prepared(repo="ada/public", private=True))
    writer.add_repo("ada/code", {"train.py": b"x"})
    with pytest.raises(OutsideError, match=r"train\.py"):
        publish(prepared(repo="ada/code"))


def test_somebody_else_was_quicker(writer: Hub, prepared: Callable[..., Plan]) -> None:
    publish(prepared())
    writer.commit(REPO, {"recipe.toml": b"# something else"})
    stale = writer.repos[REPO]

    def older(document: Any) -> Any:
        return document | {"sha": next(sha for sha in stale.commits if sha != writer.head(REPO))}

    writer.faults[f"GET /api/models/{REPO}"] = Json(older, times=1)
    with pytest.raises(OutsideError, match="changed by somebody else"):
        publish(prepared())


def test_a_tag_that_is_taken(writer: Hub, prepared: Callable[..., Plan]) -> None:
    publish(prepared(tag="v1"))
    with pytest.raises(OutsideError, match="already has that"):
        publish(prepared(tag="v1"))
    with pytest.raises(InputError, match="looks like a commit"):
        prepared(tag="0" * 40)


def test_a_lost_answer_is_not_a_lost_commit(writer: Hub, prepared: Callable[..., Plan]) -> None:
    writer.faults["POST */commit/*"] = DropAfter(0, times=1)
    published = publish(prepared())
    assert published.ref.commit == writer.head(REPO)


@pytest.mark.parametrize(
    ("token", "words"),
    [("", "needs a token"), ("hf_wrong", "does not accept the token"), (READ, "may not do this")],
)
def test_tokens_that_do_not_do(
    hub: Hub, prepared: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, token: str, words: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(OutsideError, match=words) as caught:
        publish(prepared())
    assert token == "" or token not in str(caught.value)
    assert REPO not in hub.repos


@pytest.mark.parametrize(
    ("pattern", "code", "words"),
    [
        ("POST */commit/*", 500, "trouble of its own"),
        ("POST */commit/*", 412, "changed by somebody else"),
        ("POST */commit/*", 409, "already has that"),
        ("GET /api/whoami-v2", 429, "asked too often"),
        ("POST /api/repos/create", 403, "may not do this"),
    ],
)
def test_refusals_are_sentences(
    writer: Hub, prepared: Callable[..., Plan], pattern: str, code: int, words: str
) -> None:
    writer.faults[pattern] = Status(code)
    with pytest.raises(OutsideError, match=words):
        publish(prepared())


def test_the_token_does_not_leave_its_hub(writer: Hub, prepared: Callable[..., Plan]) -> None:
    """The server chooses where an upload is confirmed, and the client would send its token there."""
    with Hub() as other:

        def elsewhere(document: Any) -> Any:
            text = json.dumps(document).replace(writer.endpoint, other.endpoint)
            return json.loads(text)

        writer.faults["POST */info/lfs/objects/batch"] = Json(elsewhere)
        with pytest.raises(CertToolError):
            publish(prepared())
        assert other.requests
        assert {seen.token for seen in other.requests} == {None}


@pytest.mark.parametrize(
    "how", ["verdict", *(pytest.param(how, marks=pytest.mark.slow) for how in ("damage", "other model"))]
)
def test_without_a_certificate_that_holds_nothing_is_published(
    how: str, robust_run: Path, small_run: Path, proof: Path, cli: Cli, tmp_path: Path
) -> None:
    from certtool.verification.certificate import digest

    document = json.loads(proof.read_text())
    columns = document["results"][0]["columns"]
    place = next(i for i, verdict in enumerate(columns["verdict"]) if verdict != "certified")
    columns["verdict"][place], columns["rung"][place] = "certified", "ibp"
    columns["grade"][place], columns["margin"][place], columns["reason"][place] = "rigorous", 0.5, None
    if how == "verdict":
        for verdict in document["results"][0]["counts"]:
            document["results"][0]["counts"][verdict] = columns["verdict"].count(verdict)
        document["sha256"] = digest(document)
    tampered = tmp_path / "tampered.json"
    tampered.write_text(proof.read_text() if how == "other model" else json.dumps(document))
    witnesses = proof.with_name("proof.witnesses.safetensors")
    (tmp_path / witnesses.name).write_bytes(witnesses.read_bytes())
    model = small_run if how == "other model" else robust_run
    done = cli("zoo", "publish", model, "--repo", REPO, "--certificate", tampered, "--dry-run")
    assert done.returncode == 1, done.stderr
    assert "does not hold" in done.stderr


def test_a_certificate_of_another_radius_makes_no_record(robust_run: Path, proof: Path) -> None:
    document = certificate_of(proof)
    other = document.model_copy(update={"results": [r for r in document.results if r.eps != "0.05"]})
    with pytest.raises(InputError, match=r"nothing of eps 0\.05"):
        record_of(checkpoint.load(robust_run), other, proof, name="x", licence="mit", sources=["zoo"], cost=Cost())


def test_remote_text_cannot_steer_the_terminal(hub: Hub, files: dict[str, bytes], process: Cli, tmp_path: Path) -> None:
    hub.add_repo("ada/net", {**files}, tags=["certtool", "dataset:\x1b[2Jdigits", "eps:[bold]0.1[/bold]"])
    done = process("zoo", "list", "--remote", **hub.environment(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "[bold]0.1[/bold]" in done.stdout


def test_an_unreachable_hub_is_exit_3(process: Cli) -> None:
    done = process("zoo", "fetch", "hf://ada/net", HF_ENDPOINT="http://127.0.0.1:9", NO_PROXY="127.0.0.1")
    assert done.returncode == 3
    assert "cannot reach http://127.0.0.1:9" in done.stderr
    assert "hint: check the network" in done.stderr


def test_the_staged_model_is_the_file_that_was_proven(robust_run: Path, proof: Path) -> None:
    staged = stage(checkpoint.load(robust_run), [proof])
    assert staged.files["model.safetensors"] == (robust_run / "model.safetensors").read_bytes()
    assert staged.sha256("model.safetensors") == certificate_of(proof).model.sha256
    assert staged.files["recipe.toml"] == (robust_run / "recipe.toml").read_bytes()
