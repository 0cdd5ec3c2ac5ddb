"""The range of torch versions that fxremat supports, and what happens outside of it.

This module does not import torch. ``SUPPORT.md`` states the policy.
"""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

from fxremat.errors import FxrematWarning, TorchVersionError

OLDEST = (2, 11)
"""The oldest supported torch, as major and minor version. ``pyproject.toml`` requires it."""

NEWEST = (2, 15)
"""The newest torch that fxremat supports, as major and minor version."""


def installed() -> str | None:
    """Return the version of the installed torch, or ``None`` if torch is not installed.

    The version comes from the metadata of the package, so that torch is not imported.
    """
    metadata: Any = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None


def supported() -> str:
    """Return the range of supported versions as text, such as ``"2.11 to 2.15"``."""
    return f"{_text(OLDEST)} to {_text(NEWEST)}"


def problem(version: str) -> str | None:
    """Return what may go wrong with a version of torch, and the remedy; ``None`` if it was tried.

    Only the major and minor version count: a nightly build or a pre-release of 2.16, such as
    ``"2.16.0.dev20260901+cpu"``, is taken for 2.16.

    Args:
        version: a version of torch, such as ``"2.13.0+cu130"``.
    """
    release = _release(version)
    if release is None or release > NEWEST:
        return (
            f"fxremat has not been tried with torch {version}; it supports torch {supported()}. "
            "Plans may fail, or exceed their budget. Install a newer fxremat if there is one, or "
            "a torch of that range. Include the output of `fxremat env` in a report of a problem"
        )
    if release < OLDEST:
        return (
            f"fxremat needs torch {_text(OLDEST)} or later, but torch {version} is installed. It "
            "lacks the interfaces by which fxremat captures a training step. Upgrade it: "
            f"pip install 'torch>={_text(OLDEST)}'"
        )
    return None


def check(version: str) -> None:
    """Check that fxremat was tried with a version of torch, and warn if that version is newer.

    Args:
        version: the version of torch that is about to be used.

    Raises:
        TorchVersionError: the version is too old.
    """
    message = problem(version)
    if message is None:
        return
    release = _release(version)
    if release is not None and release < OLDEST:
        raise TorchVersionError(message)
    warnings.warn(FxrematWarning(message, code="FXR803"), stacklevel=2)


def _release(version: str) -> tuple[int, int] | None:
    """Return the major and minor version, or ``None`` if ``version`` does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
