"""The command line as a whole: quick, kind, and the same in a pipe."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, Cli, small_settings

import certtool
from certtool.cli.app import COMMANDS
from certtool.cli.lazy import command

NO_TORCH = """
import sys
sys.argv = ["certtool", *{arguments!r}]
from certtool.cli.app import main
try:
    main()
except SystemExit as leave:
    code = leave.code
print("torch" in sys.modules, "numpy" in sys.modules, code, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["verify", "--help"], ["recipe", "list"], ["recipe", "check", "tiny_cnn7"],
     ["recipe", "show", "tiny_cnn7"], ["--version"],
     ["recipe", "check", "tiny_cnn7", "--set", "data.dataset=folder", "--set", "data.path=photos"]],
    ids=" ".join,
)  # fmt: skip
def test_these_answer_without_torch(arguments: list[str]) -> None:
    code = NO_TORCH.format(arguments=arguments)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert result.stderr.splitlines()[-1].split()[:2] == ["False", "False"]
    assert result.stdout


def test_the_help_of_the_whole_imports_no_command() -> None:
    code = NO_TORCH.format(arguments=["--help"]) + "print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    modules = result.stderr.split()
    assert {name for name in modules if name.startswith("certtool.cli.")} == {"certtool.cli.app", "certtool.cli.lazy"}
    assert "pydantic" not in modules  # typer asks it only for the values of options
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_of_the_help_is_the_commands_own(name: str) -> None:
    assert (command(name).name, command(name).help) == (name, COMMANDS[name])


def test_a_mistyped_command_is_suggested(cli: Cli) -> None:
    result = cli("trian")
    assert result.returncode == 2
    assert "No such command 'trian'. Did you mean 'train'?" in result.stderr


def test_a_wrong_recipe_is_told_without_torch() -> None:
    code = NO_TORCH.format(arguments=["train", "tiny_cnn7", "--set", "model.widht=3"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert "did you mean `width`?" in result.stderr
    assert result.stderr.splitlines()[-1] == "False False 2"


def test_import_is_light_and_lazy() -> None:
    code = """
import certtool, sys
print('torch' in sys.modules, sorted(dir(certtool)))
certtool.Epsilon
print('torch' in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert first.startswith("False")
    assert second == "False"
    assert "verify" in first
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        certtool.nonsense  # noqa: B018


def test_every_public_name_is_there() -> None:
    for name in certtool.__all__:
        assert getattr(certtool, name) is not None


@pytest.mark.parametrize("command", ["train", "verify", "inspect"])
def test_help_has_examples(command: str, cli: Cli) -> None:
    text = cli(command, "--help").stdout
    assert "Examples" in text
    assert f"certtool {command} " in text


def test_verify_agrees_with_the_last_epoch(small_run: Path, cli: Cli) -> None:
    command = ("verify", small_run, "--method", "ibp", "--arithmetic", "float32", "--no-attack", "--json")
    (result,) = json.loads(cli(*command).stdout)["results"]
    lines = [json.loads(line) for line in (small_run / "metrics.jsonl").read_text().splitlines()]
    assert result["certified_accuracy"] == lines[-1]["test_certified_accuracy"]
    assert result["clean_accuracy"] == lines[-1]["test_clean_accuracy"]


def test_verify_equals_an_independent_recount(robust_run: Path) -> None:
    from certtool.data import load_split

    loaded, split = certtool.load(robust_run), load_split("digits", "test")
    x, count = split.pixels(split.images), 0
    lower, upper = (x - 0.05).clamp(0, 1), (x + 0.05).clamp(0, 1)
    for layer in list(loaded.model.double())[:-1]:
        if hasattr(layer, "weight") and hasattr(layer, "stride"):
            plus, minus = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
            conv = torch.nn.functional.conv2d
            args = (layer.stride, layer.padding)
            bias = layer.bias[None, :, None, None]
            lower, upper = (
                conv(lower.double(), plus, None, *args) + conv(upper.double(), minus, None, *args) + bias,
                conv(upper.double(), plus, None, *args) + conv(lower.double(), minus, None, *args) + bias,
            )
        elif isinstance(layer, torch.nn.Linear):
            plus, minus = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
            lower, upper = lower @ plus.T + upper @ minus.T + layer.bias, upper @ plus.T + lower @ minus.T + layer.bias
        elif isinstance(layer, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            one, other = layer(lower), layer(upper)
            lower, upper = torch.minimum(one, other), torch.maximum(one, other)
        else:
            lower, upper = layer(lower.double()), layer(upper.double())
    weight, bias = loaded.model[-1].weight, loaded.model[-1].bias
    for low, high, y in zip(lower, upper, split.labels, strict=True):
        rows = weight[y] - weight
        least = rows.clamp(min=0) @ low + rows.clamp(max=0) @ high + bias[y] - bias
        least[y] = torch.inf
        count += bool((least > 0).all())
    report = certtool.verify(robust_run, eps="0.05", method="ibp", arithmetic="float32", attack=None, device="cpu")
    assert report.results[0].count("certified") == count > 200


def test_inspect(small_run: Path, cli: Cli) -> None:
    report = json.loads(cli("inspect", small_run, "--json").stdout)
    assert report["schema"] == "certtool.inspect/1"
    (result,) = report["results"]
    assert [layer["name"] for layer in result["layers"]] == [
        *(f"conv{n}" for n in range(1, 6)),
        "linear6",
        "classifier",
    ]
    for layer in result["layers"][:-1]:
        assert layer["active"] + layer["inactive"] + layer["unstable"] == pytest.approx(1)
    text = cli("inspect", small_run, "--statistics", "batch", "--images", "64").stdout
    assert "BatchNorm with batch statistics" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.isascii()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "nothing.safetensors"], 3, "no such file"),
        (["verify", "RUN", "--eps", "8"], 2, "did you mean `8/255`?"),
        (["verify", "RUN", "--eps", "-1"], 2, "negative"),
        (["verify", "RUN", "--device", "tpu"], 2, "not a device"),
        (["inspect", "RUN", "--statistics", "mean"], 2, "`running` or `batch`"),
        (["train"], 2, "which recipe?"),
        (["train", "nobody"], 2, "no recipe called `nobody`"),
        (["train", "tiny_cnn7", "--resume", "runs"], 2, "exactly as it was started"),
        (["train", "--resume", "nowhere"], 2, "not a run folder"),
        (["train", "tiny_cnn7", "--set", "threat.eps=8"], 2, "did you mean `8/255`?"),
        (["train", "tiny_cnn7", "--set", "train.epochs=5"], 2, "the warmup ends with epoch 41"),
        (["recipe", "show", "nobody"], 2, "no recipe called"),
    ],
)
def test_bad_input_is_a_sentence_a_hint_and_a_code(
    arguments: list[str], code: int, words: str, small_run: Path, cli: Cli, tmp_path: Path
) -> None:
    result = cli(*[str(small_run) if word == "RUN" else word for word in arguments])
    assert result.returncode == code
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_errors_as_json(cli: Cli) -> None:
    result = cli("train", "tiny_cnn7", "--json", "--set", "model.widht=3", "--set", "train.epochs=x")
    assert result.returncode == 2
    document = json.loads(result.stdout)
    assert document["schema"] == "certtool.error/1"
    assert document["exit"] == 2
    assert len(document["errors"]) == 2


def test_train_as_json_lines_and_quietly(cli: Cli, tmp_path: Path) -> None:
    one = small_settings(train__epochs=1, train__warmup__start=1, train__warmup__epochs=1)
    lines = [json.loads(line) for line in cli("train", "tiny_cnn7", "--json", "--out", "a", *one).stdout.splitlines()]
    assert [line["event"] for line in lines] == ["started", "epoch", "finished"]
    assert {line["schema"] for line in lines} == {"certtool.train/1"}
    assert lines[-1]["model"] == "a/model.safetensors"
    quiet = cli("train", "tiny_cnn7", "--quiet", "--out", "b", *one)
    assert quiet.stdout == "b/model.safetensors\n"
    assert quiet.stderr == ""


def test_in_a_pipe_a_line_an_epoch_and_the_commands_to_paste(process: Cli, tmp_path: Path) -> None:
    result = process("train", "tiny_cnn7", "--out", "a", *small_settings(train__epochs=2, train__warmup__epochs=1))
    assert result.returncode == 0
    assert "1/2" in result.stderr
    assert "2/2" in result.stderr
    assert "\x1b" not in result.stderr + result.stdout
    assert (result.stderr + result.stdout).isascii()
    assert all(len(line) <= 80 for line in result.stderr.splitlines())
    verify = next(line.strip() for line in result.stderr.splitlines() if "certtool verify" in line)
    assert verify == "certtool verify a/model.safetensors --eps 0.1"
    assert process(*verify.split()[1:]).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [[], ["train", "--nonsense"], ["recipe", "check", "tiny_cnn7", "--set", "model.widht=3"], ["runs", "compare"],
     ["verify", "RUN", "--eps", "8", "--json"], ["inspect", "RUN", "--images", "20"], ["zoo", "show", "tiny_cnn7"]],
    ids=" ".join,
)  # fmt: skip
def test_a_command_inside_this_process_is_the_command(
    arguments: list[str], small_run: Path, cli: Cli, process: Cli
) -> None:
    """Most tests run commands where they are themselves; what they see has to be what a user sees."""
    words = [str(small_run) if word == "RUN" else word for word in arguments]
    inside, alone = cli(*words), process(*words)
    assert (inside.returncode, inside.stdout, inside.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_a_command_inside_this_process_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        return (
            (dict(os.environ), os.getcwd(), list(sys.argv)),
            (sys.stdout, sys.stderr, sys.modules["__main__"], list(logging.getLogger().handlers)),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            (torch.get_num_threads(), torch.random.get_rng_state().tolist()),
        )

    before = state()
    one = small_settings(train__epochs=1, train__warmup__start=1, train__warmup__epochs=1, data__batch_size=512)
    done = cli("train", "tiny_cnn7", "--quiet", *one, CERTTOOL_CACHE="elsewhere")
    assert done.returncode == 0, done.stderr
    assert cli("train", "nobody").returncode == 2
    assert state() == before
    assert (tmp_path / "runs" / "tiny_cnn7").is_dir()


def test_a_reader_that_leaves_is_no_error(small_run: Path) -> None:
    command = f"{sys.executable} -m certtool inspect {small_run} | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr
