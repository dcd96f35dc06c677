"""How long a command takes to say its first word, against `python -c "import typer, rich"`.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure import machine, say

COMMAND = str(Path(sys.executable).with_name("certtool"))
CANDIDATES = {
    "import typer, rich": [sys.executable, "-c", "import typer, rich"],
    "certtool --help": [COMMAND, "--help"],
    "certtool recipe check": [COMMAND, "recipe", "check", "tiny_cnn7"],
    "certtool zoo list": [COMMAND, "zoo", "list", "--json"],
}
REPEATS = 15
TELL = """
import atexit, sys
status = lambda: [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
atexit.register(lambda: print(status(), file=sys.stderr))
"""


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def child_peak(command: list[str]) -> int:
    """Bytes, by the process's own account at its end: what the kernel tells a parent includes the parent's size."""
    code = (
        command[2] if command[0] == sys.executable else f"sys.argv = {command}; import certtool.cli.app as c; c.main()"
    )
    result = subprocess.run([sys.executable, "-c", TELL + code], check=True, capture_output=True, text=True)
    return int(result.stderr.splitlines()[-1]) * 1024


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for turn in range(1 + REPEATS):
        for name, command in CANDIDATES.items():
            spent = seconds(command)
            if turn:
                taken[name].append(spent)
    base = statistics.median(taken["import typer, rich"])
    rows = {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(times) / base,
            "peak_memory": child_peak(CANDIDATES[name]),
        }
        for name, times in taken.items()
    }
    for name, row in rows.items():
        say(f"  {name:<22} {row['seconds']:.3f} s  {row['ratio']:.2f} x")
    print(json.dumps({"commands": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
