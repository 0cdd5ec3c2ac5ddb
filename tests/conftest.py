"""Fixtures of several test files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["FXREMAT_CACHE"] = "0"  # the user's folder is not for tests

from tests.examples import register_profiles

register_profiles()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that one test compiled is there in another one."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are a little slower, and held to the same promise."""
    from tests.harness import search_quickly

    search_quickly(monkeypatch)
