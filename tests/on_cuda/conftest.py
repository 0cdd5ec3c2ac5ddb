"""What files of tests on CUDA begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxremat.costs.workspaces import forget_workspaces
from tests.on_cuda.stood_in import stood_in


@pytest.fixture(autouse=True, scope="module")
def _no_workspaces_of_other_files() -> Iterator[None]:
    """Free the workspaces that threads of earlier files had libraries take.

    torch holds them as long as the process lives, so every later budget counts them.
    """
    if stood_in:
        forget_workspaces()
    yield
