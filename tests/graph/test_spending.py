"""How much work planning puts into forms that are not needed to fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.effort import USUAL
from fxremat.errors import ArgumentError
from fxremat.graph.spending import Spending
from tests.harness import captured


class Wide(nn.Module):
    """An MLP whose hidden layer is most of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def least(effort: float, budget: object = "min") -> fxremat.Plan:
    """Plan the MLP for the least budget, where parts may round otherwise."""
    torch._dynamo.reset()
    x = torch.randn(512, 8)
    return fxremat.plan(
        Wide(),
        x,
        budget,
        loss=torch.sum,
        bits="rounding",
        effort=fxremat.Effort(effort, forms=("parts",)),
    )


def test_effort_finds_forms_in_parts_and_the_plan_says_where_it_was_spent(
    capsys: pytest.CaptureFixture[str],
):
    without, usual, all_of_them = (least(effort) for effort in (0, 1.0, math.inf))
    assert without.forms_left > 0
    assert usual.forms_left == all_of_them.forms_left == 0
    assert without.form.parts_bytes == 0 < usual.form.parts_bytes
    assert all_of_them.least_budget_bytes == usual.least_budget_bytes
    assert usual.least_budget_bytes < without.least_budget_bytes
    assert "effort=" in without.explain()
    assert "effort=" not in usual.explain()


def test_a_form_that_is_needed_to_fit_takes_no_effort():
    nbytes = least(1.0).least_budget_bytes
    assert least(0, nbytes).predicted_peak_bytes <= nbytes


@pytest.mark.parametrize("effort", [-1, "much", None, math.nan, True])
def test_an_effort_that_is_none_is_refused(effort: object):
    with pytest.raises(ArgumentError, match="effort"):
        fxremat.compile(nn.Linear(2, 2), torch.ones(1, 2), 1.0, effort=effort)  # type: ignore[arg-type]


def test_it_grows_with_a_large_step_and_a_step_that_waits_gets_less():
    joint = captured("gpt").line.joint
    operations = len(joint.forward) + len(joint.backward)
    assert USUAL.looks_each * operations <= USUAL.looks  # a small model's forms are all looked at
    first = Spending(USUAL).looks(joint, needed=False, in_step=False)
    waiting = Spending(USUAL).looks(joint, needed=False, in_step=True)
    needed = Spending(fxremat.Effort(0)).looks(joint, needed=True, in_step=True)
    assert first is not None and first.most is not None
    assert waiting is None or (waiting.most or 0) < first.most
    assert needed is not None and needed.most is None


def test_what_was_spent_is_gone():
    joint = captured("gpt").line.joint
    effort = Spending(USUAL)
    forms = 0
    while (looks := effort.looks(joint, needed=False, in_step=False)) is not None:
        assert effort.spend(looks, joint, taken=True)
        forms += 1
    assert forms > 1
    assert effort.is_spent
    assert effort.spent <= USUAL.looks
