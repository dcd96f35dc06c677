"""Recipes: found, merged, overridden, validated; and every error at its place, all at once."""

from __future__ import annotations

import json
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import Cli

from certtool import recipe
from certtool.catalog import DATASETS, OWN_DATASETS
from certtool.errors import InputError, Problem, RecipeError
from certtool.recipe.positions import positions

BUNDLED = set(recipe.bundled())  # test_matrix.py says which

MINIMAL = """\
schema = 1
name = "mine"

[data]
dataset = "digits"

[model]
arch = "cnn7"

[threat]
eps = 0.1

[train]
epochs = 10

[train.warmup]
epochs = 5
"""


def problems(text: str, tmp_path: Path, *overrides: str) -> list[Problem]:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        recipe.load(str(file), overrides)
    return list(caught.value.problems)


def test_every_bundled_recipe_validates_under_its_own_name() -> None:
    for name, file in recipe.bundled().items():
        loaded = recipe.load(name)
        assert loaded.name == name
        assert loaded.summary
        first = file.read_text().splitlines()[0]
        assert first.startswith(f"# certtool train {name}")


def test_tiny_cnn7_is_as_published() -> None:
    tiny = recipe.load("tiny_cnn7")
    assert (tiny.train.epochs, tiny.train.lr, tiny.train.lr_milestones) == (100, 1e-3, [75, 90])
    assert tiny.train.warmup is not None
    assert (tiny.train.warmup.start, tiny.train.warmup.epochs) == (2, 40)
    assert tiny.threat.eps.value == Fraction(1, 10)
    short = recipe.load("tiny_cnn7_short")
    assert short.train.warmup is not None
    assert (short.train.epochs, short.train.lr, short.train.warmup.epochs) == (60, 5e-4, 20)
    assert short.train.lr_milestones == [45, 53]
    vanilla = recipe.load("tiny_cnn7_short_vanilla")
    assert vanilla.train.init == "xavier-uniform"
    assert vanilla.train.regularizers.terms == []
    assert vanilla.model == short.model


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_the_resolved_whole_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    loaded = recipe.load(name)
    file = tmp_path / "again.toml"
    file.write_text(recipe.render(loaded))
    assert recipe.load(str(file)) == loaded
    assert "base" not in tomllib.loads(recipe.render(loaded))


def test_found_as_path_prefix_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        recipe.find("tiny_cnn7") == recipe.find("recipe:tiny_cnn7") == recipe.find(str(recipe.bundled()["tiny_cnn7"]))
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        recipe.find("tiny_cn7")
    assert caught.value.problems[0].hint == "did you mean `tiny_cnn7`?"
    with pytest.raises(InputError, match=r"no recipe file `recipes/tiny_cnn7.toml`") as caught:
        recipe.find("recipes/tiny_cnn7.toml")
    assert "`tiny_cnn7`" in str(caught.value.problems[0].hint)


def test_numbers_keep_their_digits(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINIMAL)
    assert recipe.load(str(file)).threat.eps.value == Fraction(1, 10)
    assert recipe.load(str(file), ["threat.eps=8/255"]).threat.eps.value == Fraction(8, 255)
    assert recipe.load(str(file), ['threat.eps="1/3"']).threat.eps.value == Fraction(1, 3)


def test_overrides_are_toml_literals_or_bare_words() -> None:
    overrides = [
        "train.lr=3e-4",
        "model.batch_norm=none",
        "train.regularizers.terms=['relu']",
        "train.lr_milestones=[3]",
    ]
    loaded = recipe.load("tiny_cnn7", overrides)
    assert loaded.train.lr == 3e-4
    assert loaded.model.batch_norm == "none"
    assert loaded.train.regularizers.terms == ["relu"]
    assert loaded.train.lr_milestones == [3]
    from_python = recipe.overrides_from(
        {"train.lr": 3e-4, "train.regularizers.terms": ["relu"], "model.batch_norm": "none"}
    )
    assert recipe.load("tiny_cnn7", from_python) == recipe.load("tiny_cnn7", overrides[:3])


def test_misspelt_key_has_its_line_and_a_guess(tmp_path: Path) -> None:
    (problem,) = problems(MINIMAL.replace('arch = "cnn7"', 'arch = "cnn7"\nwidht = 16'), tmp_path)
    assert problem.message == "model.widht: unknown key `widht` in [model]"
    assert problem.hint == "did you mean `width`?"
    assert (problem.line, problem.column, problem.length, problem.source) == (9, 1, 5, "widht = 16")


def test_loss_fusion_belongs_to_crown_ibp(tmp_path: Path) -> None:
    (problem,) = problems(MINIMAL.replace("epochs = 10", "epochs = 10\nloss_fusion = true", 1), tmp_path)
    assert problem.message == 'train.loss_fusion: `loss_fusion` means nothing with method = "ibp"'
    assert problem.hint == 'remove it, or set `method = "crown-ibp"`'
    assert problem.source == "loss_fusion = true"
    assert recipe.load("tiny_cnn7").train.loss_fusion is None
    assert "loss_fusion" not in recipe.render(recipe.load("tiny_cnn7"))
    assert recipe.load("tiny_cnn7", ["train.method=crown-ibp"]).train.loss_fusion is True
    assert recipe.load("tiny_cnn7_crown_unfused").train.loss_fusion is False


def test_all_errors_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("eps = 0.1", "eps = 8").replace("epochs = 10", 'epochs = "ten"\nlr = -1.0')
    found = problems(text.replace('"digits"', '"digit"'), tmp_path)
    assert [problem.line for problem in found] == [5, 11, 14, 15]
    assert found[0].hint == "did you mean `digits`?"
    assert found[1].hint == "did you mean `8/255`?"
    assert "whole number" in found[2].message


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("eps = 0.1", "eps = -0.1", "negative", "8/255"),
        ("eps = 0.1", "eps = nan", "not a number", "8/255"),
        ("eps = 0.1", "eps = 0", "eps is 0", "natural"),
        ("eps = 0.1", "eps = true", "must be a number", "8/255"),
        ("epochs = 5", "epochs = 50", "warmup ends with epoch 50", "at most 10"),
        ('arch = "cnn7"', 'arch = "cnn8"', "not one of cnn7", "did you mean `cnn7`?"),
        ('arch = "cnn7"', 'arch = "resnet"', "not one of cnn7, wide_resnet, resnext", "did you mean `resnext`?"),
        ('arch = "cnn7"', 'arch = "resnext"\ncardinalty = 2', "unknown key `cardinalty`", "`cardinality`"),
        ('arch = "cnn7"', 'arch = "resnext"\ncardinality = 65', "less than or equal to 64", None),
        ('arch = "cnn7"', "", "missing key `arch`", "cnn7"),
        ('dataset = "digits"', 'dataset = "imagenet"', "not one of", "tinyimagenet"),
        ('dataset = "digits"', "", "missing key `dataset`", "digits"),
        ("schema = 1", "schema = 2", "`2` is not one of 1", None),
        ("epochs = 10", "epochs = 10.0", "not a whole number", "did you mean `10`?"),
        ("epochs = 10", "epochs = 10\nlr_milestones = 5", "not a list", "[5]"),
        ("epochs = 10", "epochs = 10\nlr_milestones = [8, 5]", "must increase", None),
        ("epochs = 10", 'epochs = 10\nselection = "validation"', "held-out part", "validation_fraction"),
        ('arch = "cnn7"', "arch = cnn7", "not TOML", "quotes"),
        ("[train.warmup]\nepochs = 5\n", "", "needs a [train.warmup] section", "[train.warmup]"),
        ("schema = 1", 'schema = 1\nbase = "nobody"', "no recipe called `nobody`", None),
        ("schema = 1", "schema = 1\nbase = 3", "must name one recipe", "tiny_cnn7"),
        ("schema = 1", 'schema = 1\nbase = "mine"', "leads back to itself", None),
        ('name = "mine"', 'name = "../mine"', "pattern", None),
    ],
)
def test_bad_values(old: str, new: str, message: str, hint: str | None, tmp_path: Path) -> None:
    assert old in MINIMAL
    found = problems(MINIMAL.replace(old, new, 1), tmp_path)
    assert any(message in problem.message and (hint is None or hint in str(problem.hint)) for problem in found), found


def test_a_wrong_override_is_reported_as_such() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.load("tiny_cnn7", ["model.widht=8", "train.epochs=x", "nonsense", "data=3"])
    by_file = {problem.file: problem for problem in caught.value.problems}
    assert by_file["--set model.widht=8"].hint == "did you mean `width`?"
    assert "not a whole number" in by_file["--set train.epochs=x"].message
    assert "not of the form" in by_file["--set nonsense"].message
    assert "--set data=3" in by_file


def test_an_error_in_a_base_points_to_the_base(tmp_path: Path) -> None:
    (tmp_path / "parent.toml").write_text(MINIMAL.replace("epochs = 10", "epochs = 0"))
    (problem,) = problems('base = "parent"\nname = "child"\n', tmp_path)
    assert str(problem.file).endswith("parent.toml")
    assert problem.line == 14


def test_positions_see_through_multi_line_values() -> None:
    text = 'a = """\n[no]\nb = 1\n"""\nlist = [\n  1, # ]\n  2,\n]\n[x.y]\n"q" = 3\nz.w = { k = 1 }\n'
    found = positions(text)
    assert {path: place.line for path, place in found.items()} == {
        ("a",): 1, ("list",): 5, ("x", "y"): 9, ("x", "y", "q"): 10, ("x", "y", "z", "w"): 11,
    }  # fmt: skip


def test_not_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        recipe.load(str(tmp_path / "x.toml"))


@pytest.mark.parametrize(
    ("dataset", "key", "value", "hint"),
    [
        ("digits", "path", '"photos"', '`dataset = "folder"` or `dataset = "npz"`'),
        ("mnist", "size", "32", '`dataset = "folder"`'),
        ("npz", "size", "32", '`dataset = "folder"`'),
        ("npz", "test_fraction", "0.3", '`dataset = "folder"`'),
    ],
)
def test_keys_of_own_images_belong_to_them(dataset: str, key: str, value: str, hint: str, tmp_path: Path) -> None:
    text = MINIMAL.replace('dataset = "digits"', f'dataset = "{dataset}"\nbatch_size = 8\n{key} = {value}')
    (problem,) = problems(text, tmp_path)
    assert problem.message == f'data.{key}: `dataset = "{dataset}"` has no `{key}`'
    assert problem.hint == f"it goes with {hint}"
    assert (problem.line, problem.column, problem.length) == (7, 1, len(key))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("path = 3", "`3` is not a string"),
        ('path = ""', "at least 1 character"),
        ("size = 0", "greater than or equal to 1"),
        ("size = [32, 32]", "is not a whole number"),
        ("test_fraction = 1.0", "less than 1"),
        ("test_fraction = 0.0", "greater than 0"),
        ("sise = 3", "unknown key `sise`"),
    ],
)
def test_values_of_own_images(line: str, message: str, tmp_path: Path) -> None:
    (problem,) = problems(MINIMAL.replace('"digits"', f'"folder"\n{line}'), tmp_path)
    assert message in problem.message
    assert problem.line == 6


def test_own_images_are_augmented_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINIMAL.replace('"digits"', '"folder"\npath = "photos"'))
    assert recipe.load(str(file)).data.augment == "none"
    assert 'augment = "none"' in recipe.render(recipe.load(str(file)))
    assert recipe.load(str(file), ["data.augment=standard"]).data.augment == "standard"
    assert recipe.load("cifar10_cnn7").data.augment == "standard"
    assert "photos" not in recipe.render(recipe.load(str(file)).at(None))
    (problem,) = problems(MINIMAL.replace("digits", "foldr"), tmp_path)
    assert problem.hint == "did you mean `folder`?"


def test_dataset_names_equal_the_catalog() -> None:
    for name in (*DATASETS, *OWN_DATASETS):
        assert recipe.load("tiny_cnn7", [f"data.dataset={name}"]).data.dataset == name


def test_command_line(cli: Cli, tmp_path: Path) -> None:
    listed = json.loads(cli("recipe", "list", "--json").stdout)
    assert {row["name"] for row in listed["recipes"]} == BUNDLED
    assert "tiny_cnn7_short" in cli("recipe", "list").stdout
    assert tomllib.loads(cli("recipe", "show", "cifar10_cnn7_w16").stdout)["model"]["width"] == 16

    copied = cli("recipe", "copy", "tiny_cnn7", "mine.toml")
    assert copied.returncode == 0
    assert (tmp_path / "mine.toml").read_bytes() == recipe.bundled()["tiny_cnn7"].read_bytes()
    assert cli("recipe", "copy", "tiny_cnn7", "mine.toml").returncode == 2
    assert cli("recipe", "check", "mine.toml").stdout == "tiny_cnn7: ok\n"

    (tmp_path / "mine.toml").write_text(MINIMAL.replace("arch", "acrh"))
    bad = cli("recipe", "check", "mine.toml")
    assert bad.returncode == 1
    assert bad.stdout == ""
    assert "  --> mine.toml:7:2" in bad.stderr or "  --> mine.toml:8:1" in bad.stderr
    assert "   |  ^^^^^\n" in bad.stderr
    as_json = json.loads(cli("recipe", "check", "mine.toml", "--json").stdout)
    assert as_json["schema"] == "certtool.error/1"
    assert as_json["errors"][0].keys() == {"message", "hint", "file", "line", "column"}
