"""torchao's optimizer on the host: its hooks take gradients away while the backward runs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded
from tests.on_cuda.stood_in import needs_stand_in, stood_in

if stood_in:
    import cuda_stand_in as stand_in

torchao_optim = pytest.importorskip("torchao.optim")

pytestmark = [*needs_stand_in, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WIDTH, ROWS, LAYERS, STEPS = 256, 128, 6, 10

MODES = pytest.mark.parametrize("mode", ["eager", "random"])


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    stand_in.mode("eager")
    torch._dynamo.reset()
    gc.collect()


def built() -> nn.Module:
    with seeded(0):
        layers = (m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        return nn.Sequential(*layers).cuda()


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


class Training:
    """Steps of the optimizer on the host, with a plan or as ``aot_eager`` takes them.

    Attributes:
        call: the compiled model.
        peaks_bytes: of each step, from its forward to the end of its backward.
        left: losses, and parameters at the end.
    """

    def __init__(self, budget: Any, **offloaded: Any) -> None:
        torch._dynamo.reset()
        self.model, self.call, self.peaks_bytes = built(), None, list[int]()
        self.optimizer: Any = torchao_optim.CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=1e-3, **offloaded
        )
        self.left: list[Tensor] = []
        self.call: Any
        if budget is None:
            self.call = torch.compile(self.model, backend="aot_eager")
        else:
            given = {"loss": squares, "optimizer": self.optimizer}
            self.call = fxremat.compile(self.model, self.batch(0), budget, **given)

    def batch(self, number: int) -> Tensor:
        with seeded(number):
            return torch.randn(ROWS, WIDTH).cuda()

    def run(self) -> list[Tensor]:
        for number in range(STEPS):
            x = self.batch(number)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            loss = squares(self.call(x))
            loss.backward()
            self.peaks_bytes.append(torch.cuda.max_memory_allocated())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.left.append(loss.detach().cpu())
            del loss
        torch.cuda.synchronize()
        return [*self.left, *(p.detach().cpu() for p in self.model.parameters())]

    def drop(self) -> None:
        """Let go of the parameters: Python does not collect those whose hooks refer to them."""
        for parameter in self.model.parameters():
            (parameter._post_accumulate_grad_hooks or {}).clear()
        del self.model, self.optimizer, self.call
        torch._dynamo.reset()
        gc.collect()


def least_bytes(**offloaded: Any) -> int:
    """The least budget that an error names."""
    training, found = Training(None, **offloaded), None
    given = {"loss": squares, "optimizer": training.optimizer}
    try:
        fxremat.compile(training.model, training.batch(0), "1 KiB", **given)
    except fxremat.BudgetError as error:
        found = error.least_budget_bytes
    training.drop()
    assert found is not None
    return found


@MODES
@pytest.mark.parametrize("budget", ["least", "min", 1.0])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients leave", "gradients stay"])
def test_steps_keep_to_the_budget_from_the_first_on(mode: str, budget: Any, gradients: bool):
    offloaded = {"offload_gradients": gradients}
    reference = Training(None, **offloaded)
    expected = reference.run()
    reference.drop()
    stand_in.mode(mode, seed=1)
    training = Training(least_bytes(**offloaded) if budget == "least" else budget, **offloaded)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        left = training.run()
    assert_bitwise_equal(left, expected)
    budget_bytes = training.call.plan.budget_bytes
    training.drop()
    assert max(training.peaks_bytes) <= budget_bytes


def test_gradients_that_leave_are_in_no_least_budget():
    nbytes = sum(p.nbytes for p in built().parameters())
    saved = least_bytes(offload_gradients=False) - least_bytes(offload_gradients=True)
    assert saved >= 0.75 * nbytes


@pytest.mark.parametrize("smallest", [1, WIDTH + 1, WIDTH * WIDTH + 1])
def test_state_is_counted_for_small_parameters_only(smallest: int):
    """They are stepped on the device."""
    training = Training(None, minimal_size=smallest)
    own = {"loss": squares, "optimizer": training.optimizer}
    plans = [fxremat.plan(training.model, training.batch(0), 1.0, loss=squares)]
    plans += [fxremat.plan(training.model, training.batch(0), 1.0, **own)]
    small = [p.nbytes for p in training.model.parameters() if p.numel() < smallest]
    training.drop()
    # Two moments, and a number of steps in a block of 512 bytes.
    assert plans[1].budget_bytes - plans[0].budget_bytes == sum(2 * n + 512 for n in small)


@MODES
def test_reserved_bytes_have_room_for_gradients_that_copies_still_read(mode: str):
    """The allocator cannot hand their memory out again before the copies have ended."""
    offloaded = {"offload_gradients": True}
    reference = Training(None, **offloaded)
    expected = reference.run()
    reference.drop()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stand_in.mode(mode, seed=1)
    training = Training("100% reserved", **offloaded)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert_bitwise_equal(training.run(), expected)
    reserved_bytes = torch.cuda.max_memory_reserved()
    budget_bytes = training.call.plan.budget_bytes
    training.drop()
    assert reserved_bytes <= budget_bytes
