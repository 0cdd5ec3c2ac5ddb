"""How Dynamo is set while it captures: for the calls that are captured, and nobody else's."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor
from torch._dynamo import config

from fxremat import torch_compat

LOG = logging.getLogger("of a loss")

USERS = 17
"""A limit that a user has set."""


class Talking(torch.nn.Module):
    """Would break the graph, were loggers not let be."""

    def forward(self, x: Tensor) -> Tensor:
        LOG.warning("said once")
        return x.sin().sum()


def settings_are_of_all_threads() -> bool:
    """As they are in torch 2.11, where nothing can keep calls that overlap apart."""
    seen: list[int] = []
    with config.patch(recompile_limit=USERS):
        thread = threading.Thread(target=lambda: seen.append(config.recompile_limit))
        thread.start()
        thread.join()
    return seen == [USERS]


@pytest.mark.skipif(settings_are_of_all_threads(), reason="this torch has one set of settings")
@pytest.mark.usefixtures("fresh_dynamo")
def test_threads_that_overlap_have_the_settings_until_each_has_left():
    """And then the user's own again, whoever came and went first."""
    came, may_go, left = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []

    def first() -> None:
        config.recompile_limit = USERS
        with torch_compat.capture_settings():
            came.set()
            assert may_go.wait(20)
        seen.append(config.recompile_limit)
        left.set()

    before = config.recompile_limit
    config.recompile_limit = USERS
    try:
        thread = threading.Thread(target=first)
        thread.start()
        assert came.wait(20)
        assert config.recompile_limit == USERS
        with torch_compat.capture_settings():
            may_go.set()
            assert left.wait(20)
            assert config.recompile_limit > USERS
            torch.compile(Talking(), backend="eager", fullgraph=True)(torch.ones(3))
        seen.append(config.recompile_limit)
        thread.join()
        assert seen == [USERS, USERS]
    finally:
        config.recompile_limit = before


def test_a_call_within_a_call_leaves_the_settings_to_the_outer_one():
    before = config.recompile_limit
    with torch_compat.capture_settings():
        ours = config.recompile_limit
        with torch_compat.capture_settings():
            pass
        assert config.recompile_limit == ours
    assert config.recompile_limit == before
