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
