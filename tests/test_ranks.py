"""Several processes: the same numbers as without a plan, and each within its budget."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from tests.ranks import trained

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


@pytest.mark.parametrize("how", WAYS)
def test_same_numbers_within_the_budget(how: str) -> None:
    check(how, 0.6)


def test_collectives_in_a_graph_are_refused_everywhere() -> None:
    with pytest.raises(ProcessRaisedException, match=r"CaptureError: .*all_reduce"):
        trained("tensor_parallel", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("how", WAYS)
def test_same_numbers_within_other_budgets_of_four(how: str, share: float) -> None:
    check(how, share, processes=4)
