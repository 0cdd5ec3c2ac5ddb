"""Fixtures of several test files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that one test compiled is there in another one."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer starts of local search: plans a little slower, which are held to the same promise."""
    from fxremat import bases, search

    monkeypatch.setattr(search, "STARTS", 3)
    monkeypatch.setattr(search, "CLOSER", 1)
    monkeypatch.setattr(bases, "AWAY", bases.AWAY[::4])
