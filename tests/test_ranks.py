"""Several processes: the same numbers as without a plan, and each within its budget."""

from __future__ import annotations

import re

import pytest
import torch

import fxremat
from tests.ranks import refused, trained

WAYS = ("ddp_around", "ddp_inside", "fsdp")


def check(how: str, share: float, processes: int = 2) -> None:
    """Within a share of what it takes as it is."""
    plain = trained(how, None, processes=processes)
    budget = int(share * max(peak for own in plain for peak in own.peaks_bytes))
    planned = trained(how, budget, processes=processes)
    for rank, (mine, yours) in enumerate(zip(planned, plain, strict=True)):
        assert all(map(torch.equal, mine.parameters, yours.parameters)), rank
        assert max(mine.peaks_bytes) <= budget, rank
        assert mine.budget_bytes == budget
        assert mine.codes == planned[0].codes and len(mine.codes) > 0, rank


@pytest.mark.parametrize("how", WAYS)
def test_same_numbers_within_the_budget(how: str) -> None:
    check(how, 0.6)


def test_collectives_in_a_graph_are_refused_everywhere() -> None:
    for error in refused("tensor_parallel", ""):
        assert error is not None and "all_reduce" in error


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("batch", r"rank 1 has captured another step than rank 0: .*256, "),
        ("graph", r"rank 1 has captured another step than rank 0: .*other operations"),
        ("budget", r"different budgets: 0.6 on rank 0, 0.7 on rank 1"),
        ("late", r"rank 1 did not come within 15 s"),
        ("killed", r"rank 1 did not come within 15 s"),
    ],
)
@pytest.mark.parametrize("how", ["ddp_inside", "fsdp"])
def test_processes_that_differ_are_named_on_all(how: str, other: str, told: str) -> None:
    errors = refused(how, other)
    if other in ("late", "killed"):
        assert errors.pop() is None
    for error in errors:
        assert error is not None and error.startswith("RankError: ")
        assert re.search(told, error), error


def test_the_least_budget_where_that_is_asked_for() -> None:
    found = trained("ddp_around", 0.8, other="budget", ranks=fxremat.Ranks(budgets="least"))
    assert found[0].budget_bytes == found[1].budget_bytes
    assert found[0].codes == found[1].codes


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("how", WAYS)
def test_same_numbers_within_other_budgets_of_four(how: str, share: float) -> None:
    check(how, share, processes=4)
