"""Warnings point at the user's code, from whatever depth of the package and of torch."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import torch_compat
from fxremat.errors import BudgetWarning
from fxremat.graph.shortfall import TOLERATED_BYTES, excess_bytes


def test_a_warning_names_the_line_that_calls():
    with pytest.warns(UserWarning, match="here") as told:
        torch_compat.warn(UserWarning("here"))
        line = sys._getframe().f_lineno - 1
    assert (told[0].filename, told[0].lineno) == (__file__, line)
    assert torch_compat.user_line() == f"{__file__}:{sys._getframe().f_lineno}"


def test_frames_of_torch_and_of_python_are_passed_by():
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _: torch_compat.warn(UserWarning("in a hook")))

    class Calls(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.sum()

    with pytest.warns(UserWarning, match="in a hook") as told:
        Calls()(x).backward()
    assert told[0].filename == __file__


def test_lines_of_a_traceback_are_the_users():
    library = Path(torch.__file__).parent / "nn" / "modules" / "linear.py"
    recursive = ("net.py", 5, "self(x)")
    frames = [recursive, (library, 134, "F.linear(x)"), ("net.py", 7, "self.layer(x)"), recursive]
    text = [f'  File "{file}", line {line}, in forward\n    {code}' for file, line, code in frames]
    without_code = [f'  File "{file}", line 17, in forward' for file in (library, "model.py")]
    trace = "\n".join([*text, *text, *without_code])
    lines = torch_compat.user_lines(trace)
    assert [*map(str, lines)] == [
        '  File "net.py", line 7: self.layer(x)',
        '  File "net.py", line 5: self(x)',
        '  File "model.py", line 17',
    ]


def test_a_thread_without_code_of_the_users_may_warn():
    with pytest.warns(UserWarning, match="alone"):
        thread = threading.Thread(target=torch_compat.warn, args=(UserWarning("alone"),))
        thread.start()
        thread.join()


@pytest.mark.usefixtures("fresh_dynamo", "quick_search")
def test_a_model_that_is_trained_in_eval_mode_is_told_where():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    call = fxremat.compile(model, torch.ones(2, 4), "min").eval()
    with pytest.warns(BudgetWarning) as told:
        call(torch.ones(2, 4)).sum().backward()
    assert {Path(own.filename) for own in told} == {Path(__file__)}


def test_next_to_nothing_above_a_budget_is_no_excess():
    assert excess_bytes(1000, 2000) == excess_bytes(2000 + TOLERATED_BYTES, 2000) == 0
    assert excess_bytes(2001 + TOLERATED_BYTES, 2000) == 1 + TOLERATED_BYTES
