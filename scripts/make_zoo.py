"""Write a model of the zoo from a finished run, and zoo/README.md from all records.

certtool train tiny_cnn7 --out runs/zoo
python scripts/make_zoo.py tiny_cnn7 runs/zoo --eps 0.05 --eps 0.1 --eps 0.15 --eps 0.2
python scripts/make_zoo.py                      # the README alone
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from certtool import checkpoint
from certtool.cli.zoo import cost_of
from certtool.zoo.describe import record_of
from certtool.zoo.readme import readme
from certtool.zoo.records import records, render, zoo_folder
from certtool.zoo.staging import certificate_of, stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?")
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--eps", action="append", default=[])
    parser.add_argument("--licence", default="Apache-2.0")
    arguments = parser.parse_args()
    if arguments.name is not None:
        add(arguments.name, arguments.run, arguments.eps, arguments.licence)
    (zoo_folder() / "README.md").write_text(readme(records().values()))


def add(name: str, run: Path, eps: list[str], licence: str) -> None:
    model = checkpoint.load(run)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test.json"
        radii = [word for value in eps for word in ("--eps", value)]
        command = [sys.executable, "-m", "certtool", "verify", str(run), *radii, "--certificate", str(file)]
        subprocess.run(command, check=True)
        target = zoo_folder() / name
        shutil.rmtree(target, ignore_errors=True)
        stage(model, [file]).write(target)
        record = record_of(
            model, certificate_of(file), file, name=name, licence=licence, sources=["zoo"], cost=cost_of(model)
        )
    (zoo_folder() / f"{name}.toml").write_text(render(record))


if __name__ == "__main__":
    main()
