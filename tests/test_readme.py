"""Numbers in the README come from files in the repository."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_figures_on_the_digits() -> None:
    results = json.loads((ROOT / "benchmarks" / "digits.json").read_text())["results"]
    assert len(results) == 3
    for name, figures in results.items():
        clean, certified = (100 * figures[f"mean_{kind}_accuracy"] for kind in ("clean", "certified"))
        assert f"| `{name}` | {clean:.1f} % | {certified:.1f} % |" in README


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
