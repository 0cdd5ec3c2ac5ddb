"""Versions of torch that fxremat was not tried with: a warning, or an error with its remedy."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings

import pytest

import fxremat
from fxremat import torch_versions
from fxremat.errors import FxrematWarning, TorchVersionError
from fxremat.torch_versions import NEWEST, OLDEST, check, problem

NEXT = f"{NEWEST[0]}.{NEWEST[1] + 1}"
LAST = f"{OLDEST[0]}.{OLDEST[1] - 1}"
WITHIN = [f"2.{minor}.0" for minor in range(OLDEST[1], NEWEST[1] + 1)]


@pytest.mark.parametrize(
    "version", [*WITHIN, "2.13.1", "2.13.0+cpu", "2.13.0+cu130", "2.15.0.dev20260801+cpu"]
)
def test_a_version_that_was_tried_gives_no_warning(version: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(version)


@pytest.mark.parametrize(
    "version", [f"{NEXT}.0", f"{NEXT}.0.dev20260901+cpu", f"{NEXT}.0a0+git12ab", "3.0.0", "main"]
)
def test_a_newer_version_gives_a_warning_with_the_range(version: str):
    with pytest.warns(UserWarning, match="has not been tried") as caught:
        check(version)
    message = str(caught[0].message)
    assert isinstance(caught[0].message, FxrematWarning)
    assert caught[0].message.code == "FXR803"
    assert version in message
    assert torch_versions.supported() in message
    assert "fxremat env" in message


@pytest.mark.parametrize("version", [f"{LAST}.1", "2.9.0+cu126", "1.13.1"])
def test_an_older_version_is_refused_with_the_remedy(version: str):
    with pytest.raises(ImportError, match=r"pip install 'torch>=") as caught:
        check(version)
    assert isinstance(caught.value, fxremat.FxrematError)
    assert isinstance(caught.value, TorchVersionError)
    assert caught.value.code == "FXR802"
    assert version in str(caught.value)


def run_with(version: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where torch says that it is ``version``."""
    code = f"import torch\ntorch.__version__ = {version!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_first_use_of_torch_checks_its_version():
    newer = run_with(f"{NEXT}.0", "import fxremat\nfxremat.compile\nprint('imported')")
    assert newer.stdout == "imported\n"
    assert newer.stderr.count("has not been tried with torch") == 1
    older = run_with(f"{LAST}.0", "import fxremat\nfxremat.solve\nprint('solves')\nfxremat.compile")
    assert older.stdout == "solves\n"
    assert "TorchVersionError" in older.stderr and "FXR802" in older.stderr.splitlines()[-1]


def test_the_installed_version_is_read_from_metadata(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", {"torch": f"{NEXT}.0+cpu"}.get)
    version = torch_versions.installed()
    assert version == f"{NEXT}.0+cpu"
    assert "has not been tried" in str(problem(version))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert torch_versions.installed() is None
