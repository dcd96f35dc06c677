"""A small certified model to share, and a loopback Hub that this process talks to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ENVIRONMENT
from hub import Hub
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from certtool import checkpoint
from certtool.zoo import hub as hub_module
from certtool.zoo.staging import stage

REPO = "ada/net"


@pytest.fixture(scope="session")
def proof(robust_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of the robust run at two radii, with witnesses."""
    file = tmp_path_factory.mktemp("proof") / "proof.json"
    command = [sys.executable, "-m", "certtool", "verify", str(robust_run), "--eps", "0.05", "--eps", "0.02",
               "--method", "ibp", "--images", "60", "--attack-steps", "10", "--restarts", "1",
               "--certificate", str(file)]  # fmt: skip
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    return file


@pytest.fixture(scope="session")
def files(robust_run: Path, proof: Path) -> dict[str, bytes]:
    """What a published model consists of, card and picture aside."""
    return stage(checkpoint.load(robust_run), [proof]).files


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The client in this process has read its environment long ago; it reads proxies when its session is made."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hub_module, "PAUSES", (0.05, 0.05, 0.1, 0.2, 0.4))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    monkeypatch.setenv("CERTTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")
    close_session()
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub
        close_session()
