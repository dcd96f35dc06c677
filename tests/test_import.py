"""`zoo import`: state dicts from elsewhere become one file, and the network they make is the same function."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import Cli
from nets import lively
from safetensors.torch import load_file
from torch import Tensor

from certtool import checkpoint
from certtool.catalog import DATASETS, Architecture
from certtool.errors import InputError
from certtool.models import build, skeleton
from certtool.models.published import published_name
from certtool.recipe import from_values

PARITY = Path(__file__).parents[2] / "shared" / "parity"
SIZES = {
    "cnn7": ["model.width=4", "model.hidden=16"],
    "wide_resnet": ["model.width=4", "model.widen=1", "model.hidden=16"],
    "resnext": ["model.width=4", "model.hidden=16"],
}


def arguments(arch: str) -> Architecture:
    base = {"schema": 1, "name": "x", "data": {"dataset": "mnist"}, "model": {"arch": arch}, "threat": {"eps": "0.1"},
            "train": {"method": "natural", "epochs": 1}}  # fmt: skip
    return from_values(base, SIZES[arch]).model


def network(arch: str) -> torch.nn.Module:
    return lively(build(arguments(arch), DATASETS["mnist"]))


def state_of(model: torch.nn.Module, arch: str, prefix: str = "") -> dict[str, Tensor]:
    """In the layout of the published code."""
    return {
        prefix + published_name(name, model, arguments(arch)): value
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def sets(arch: str) -> list[str]:
    return [word for text in SIZES[arch] for word in ("--set", text)]


@pytest.mark.parametrize(
    "arch", ["cnn7", *(pytest.param(a, marks=pytest.mark.slow) for a in ("wide_resnet", "resnext"))]
)
@pytest.mark.parametrize("wrap", [pytest.param("plain", marks=pytest.mark.slow), "module. and state_dict"])
def test_the_same_function(arch: str, wrap: str, cli: Cli, process: Cli, tmp_path: Path) -> None:
    model = network(arch)
    state: object = state_of(model, arch, "" if wrap == "plain" else "module.")
    torch.save(state if wrap == "plain" else {"state_dict": state, "epoch": 70}, tmp_path / "theirs.pth")
    done = process("zoo", "import", "theirs.pth", "--arch", arch, "--dataset", "mnist", *sets(arch), "--eps", "0.3")
    assert done.returncode == 0, done.stderr
    ours = checkpoint.load(tmp_path / "theirs.safetensors")
    assert (ours.header.method, ours.header.eps) == ("imported", "0.3")
    x = torch.rand(4, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(ours.model(x), model.eval()(x))
    again = cli("zoo", "import", "theirs.pth", "--arch", arch, "--dataset", "mnist", *sets(arch))
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_shapes_that_do_not_fit_are_named(cli: Cli, tmp_path: Path) -> None:
    torch.save(state_of(network("cnn7"), "cnn7"), tmp_path / "theirs.pth")
    done = cli("zoo", "import", "theirs.pth", "--arch", "cnn7", "--dataset", "mnist", "--set", "model.width=8",
               "--set", "model.hidden=16")  # fmt: skip
    assert done.returncode == 2
    assert "`0.weight`" in done.stderr
    assert "(4, 1, 3, 3)" in done.stderr
    assert not list(tmp_path.glob("*.safetensors"))
    done = cli("zoo", "import", "theirs.pth", "--arch", "resnext", "--dataset", "mnist", "--json")
    assert json.loads(done.stdout)["exit"] == 2


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("executed",))


def test_a_pickle_that_would_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    torch.save({"0.weight": Evil()}, tmp_path / "evil2.pth")
    (tmp_path / "page.pth").write_text("<html>")
    torch.save([1, 2], tmp_path / "list.pth")
    for name in ("evil.pth", "evil2.pth", "page.pth", "list.pth", "nothing.pth"):
        done = cli("zoo", "import", name, "--arch", "cnn7", "--dataset", "mnist")
        assert done.returncode == 2, done.stderr
        assert "executed" not in done.stdout
        assert name in done.stderr


@pytest.mark.slow
def test_unknown_words_are_refused(cli: Cli, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pth")
    wrong = cli("zoo", "import", "a.pth", "--arch", "cnn8", "--dataset", "mnist")
    assert wrong.returncode == 2
    assert "did you mean `cnn7`" in wrong.stderr
    wrong = cli("zoo", "import", "a.pth", "--arch", "cnn7", "--dataset", "minst")
    assert "did you mean `mnist`" in wrong.stderr
    wrong = cli("zoo", "import", "a.pth", "--arch", "cnn7", "--dataset", "mnist", "--set", "model.widht=8")
    assert "did you mean `width`" in wrong.stderr


@pytest.mark.parametrize(
    ("name", "arch", "dataset", "overrides"),
    [
        ("cnn7_mnist", "cnn7", "mnist", ["model.width=8", "model.hidden=64"]),
        ("cnn7_mnist_unbalanced", "cnn7", "mnist", ["model.width=8", "model.hidden=64"]),
        ("wrn_cifar10", "wide_resnet", "cifar10", ["model.width=8", "model.widen=1"]),
    ],
)
def test_weights_of_the_published_code(
    name: str, arch: str, dataset: str, overrides: list[str], cli: Cli, tmp_path: Path
) -> None:
    if not PARITY.is_dir():
        pytest.skip("the parity figures are not at hand")
    content = load_file(PARITY / f"{name}.safetensors")
    prefix = "weights."
    state = {key.removeprefix(prefix): value for key, value in content.items() if key.startswith(prefix)}
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "theirs.pth")
    options = [word for text in overrides for word in ("--set", text)]
    done = cli("zoo", "import", "theirs.pth", "--arch", arch, "--dataset", dataset, *options)
    assert done.returncode == 0, done.stderr
    model = checkpoint.load(tmp_path / "theirs.safetensors").model
    x = content["x_uint8"].float() / 255
    with torch.no_grad():
        torch.testing.assert_close(model(x), content["eval.logits"], rtol=1e-4, atol=1e-5)


def test_shapes_without_values_pipes_and_a_million_names(tmp_path: Path) -> None:
    from certtool.zoo.importing import describe, import_weights

    description = describe("x", "cnn7", "digits", None, ["model.width=4", "model.hidden=16"])
    shapes = skeleton(description.arch, DATASETS["digits"]).state_dict()
    torch.save(shapes, tmp_path / "meta.pth")
    torch.save({f"x{number}": torch.zeros(1) for number in range(2000)}, tmp_path / "many.pth")
    os.mkfifo(tmp_path / "pipe.pth")
    for name, words in (("meta", "no values"), ("many", "and 1900 more"), ("pipe", "is not a file")):
        with pytest.raises(InputError, match=words) as caught:
            import_weights(tmp_path / f"{name}.pth", description, tmp_path / "out.safetensors")
        assert len(str(caught.value)) < 10_000
