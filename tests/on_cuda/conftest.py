"""Fixtures of the tests on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxremat.costs.measured.workspaces import forget_workspaces
from tests.on_cuda.stood_in import stood_in


@pytest.fixture(autouse=True, scope="module")
def _no_workspaces_of_other_files() -> Iterator[None]:
    """Free the library workspaces that earlier files allocated in threads of their own.

    torch holds these for the rest of the process, so they would be part of every later budget.
    """
    if stood_in:
        forget_workspaces()
    yield


@pytest.fixture(autouse=True)
def _quick_search(request: pytest.FixtureRequest) -> None:
    """Search less long for schedules: what is tested here holds for any schedule."""
    if not request.node.get_closest_marker("slow"):
        request.getfixturevalue("quick_search")
