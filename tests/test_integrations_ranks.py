"""Trainers of others in several processes: all follow one plan, with ``ranks=``."""

from __future__ import annotations

import pytest

from tests.client_ranks import CLIENTS, Planned, planned


@pytest.mark.parametrize(
    "client",
    [c if c == "accelerate" else pytest.param(c, marks=pytest.mark.slow) for c in CLIENTS],
)
def test_all_processes_of_a_trainer_follow_one_plan(client: str) -> None:
    (plan, error), *others = planned(client, [False, True])
    assert isinstance(plan, Planned)
    assert isinstance(error, str)
    assert error.startswith("RankError: rank 1 has captured another step than rank 0: ")
    assert others == [[plan, error]]
