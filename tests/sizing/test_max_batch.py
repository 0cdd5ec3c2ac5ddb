"""How large a batch may be, held against compiling at those sizes."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fxremat
from benchmarks.max_batch import MODELS, measure
from tests.efforts import SPLITS, WHOLE

pytestmark = pytest.mark.usefixtures("quick_search")

BUDGET = 400_000


class Net(nn.Module):
    """Blocks over ``(batch, length, 24)``; at most 64 positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Embedding(64, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)) for _ in range(4)
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return x if y is None else mse_loss(x, y)


def sample(batch: int = 6, length: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (batch, length, 24)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


IN_PARTS_OR_NOT = pytest.mark.parametrize(
    "split", [False, pytest.param("exact", marks=pytest.mark.slow)]
)
"""With parts that keep bits each answer is compiled, which takes a minute."""


@functools.cache
def batches() -> fxremat.Batches:
    found = fxremat.max_batch(Net(), sample(), BUDGET)
    torch._dynamo.reset()
    return found


def peak_bytes(model: nn.Module, call: Any, args: tuple[Any, ...], loss: Any = None) -> int:
    def step() -> None:
        model.zero_grad()
        out = call(*args)
        (out if loss is None else loss(out)).backward()

    model.zero_grad()
    return fxremat.measure_step(model, step).peak_bytes


def test_it_fits_and_one_more_does_not():
    largest = batches().largest.size
    model = Net()
    call = fxremat.compile(model, sample(largest), BUDGET, dynamic=False)
    assert peak_bytes(model, call, sample(largest)) <= BUDGET
    with pytest.raises(fxremat.BudgetError):
        fxremat.compile(model, sample(largest + 1), BUDGET, dynamic=False)


def test_the_sample_itself_need_not_fit():
    small, large = (
        fxremat.max_batch(Net(), sample(count), BUDGET, effort=WHOLE).largest.size
        for count in (6, 60)
    )
    assert large == small


def test_the_curve_grows_to_the_largest(tmp_path: Path):
    found = batches()
    sizes = [point.size for point in found.points]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == found.largest.size
    least = [point.least_bytes for point in found.points]
    assert least == sorted(least) and least[-1] <= BUDGET
    assert all(found.fastest.seconds_a_sample <= p.seconds_a_sample for p in found.points)
    assert found.name == "args[0].shape[0]"
    assert str(found.largest.size) in repr(found)
    assert "largest" in found.show()
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_no_size_beyond_most_is_answered():
    found = fxremat.max_batch(Net(), sample(), BUDGET, most=7)
    assert found.largest.size == found.points[-1].size == 7


def test_no_size_that_the_model_refuses_is_answered():
    found = fxremat.max_batch(Net(), sample(), 10 * BUDGET, dim=("x", 1))
    assert found.largest.size == 64


@IN_PARTS_OR_NOT
def test_what_the_caller_holds_is_counted(split: Any):
    """A loss outside the model and an optimizer's state."""
    model, x = Net(), sample()[0]

    def loss(out: Tensor) -> Tensor:
        return out.softmax(-1).square().sum()

    options: dict[str, Any] = {"loss": loss, **SPLITS[split]}
    without_state = fxremat.max_batch(model, x, BUDGET, **options).largest.size
    options["optimizer"] = torch.optim.Adam
    largest = fxremat.max_batch(model, x, BUDGET, **options).largest.size
    assert largest < without_state
    x = sample(largest)[0]
    call = fxremat.compile(model, x, BUDGET, dynamic=False, **options)
    assert peak_bytes(model, call, (x,), loss) <= BUDGET
    with pytest.raises(fxremat.BudgetError):
        fxremat.compile(model, sample(largest + 1)[0], BUDGET, dynamic=False, **options)


def test_an_error_tells_the_largest_size_and_training_goes_on():
    model = Net()
    call = fxremat.compile(model, sample(), BUDGET, dynamic=True, strict=True)
    with pytest.raises(fxremat.BudgetError) as caught:
        call(*sample(500))
    largest = caught.value.largest
    size = largest["args[0].shape[0]"]
    assert largest["args[1].shape[0]"] == size
    assert str(size) in str(caught.value)
    assert peak_bytes(model, call, sample(size)) <= BUDGET
    model.zero_grad()
    with pytest.raises(fxremat.BudgetError) as again:
        call(*sample(size + 1))
    assert again.value.largest["args[0].shape[0]"] == size


@pytest.mark.slow
def test_a_first_call_that_does_not_fit_tells_it_too():
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.compile(Net(), sample(24), BUDGET, dynamic=True)
    size = caught.value.largest["args[0].shape[0]"]
    fxremat.compile(Net(), sample(size), BUDGET, dynamic=True)


def test_an_error_of_fixed_sizes_tells_none():
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.compile(Net(), sample(500), BUDGET, dynamic=False)
    assert caught.value.largest == {}


@pytest.mark.parametrize("dim", [3, -4, "x", 1.0, True, [0], (5, 0), ("z", 0), (0, 1, 2)])
def test_a_dimension_that_is_none_is_refused(dim: Any):
    with pytest.raises(fxremat.ArgumentError):
        fxremat.max_batch(Net(), sample(), BUDGET, dim=dim)


def test_a_size_that_the_model_fixes_is_refused():
    with pytest.raises(fxremat.ArgumentError):
        fxremat.max_batch(Net(), sample(), BUDGET, dim=2)


def test_sizes_that_are_equal_in_the_sample_are_refused():
    with pytest.raises(fxremat.ArgumentError):
        fxremat.max_batch(Net(), sample(10, 10), BUDGET)


@pytest.mark.parametrize("budget", [0.5, "min", "much"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any):
    with pytest.raises(fxremat.BudgetError):
        fxremat.max_batch(Net(), sample(), budget)


@pytest.mark.parametrize("options", [{"dynamic": False}, {"plan": None}, {"most": 0}])
def test_options_that_mean_nothing_here_are_refused(options: Any):
    with pytest.raises(fxremat.ArgumentError):
        fxremat.max_batch(Net(), sample(), BUDGET, **options)


def test_a_budget_that_fits_nothing_tells_the_least():
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.max_batch(Net(), sample(), 1000)
    least = caught.value.least_budget_bytes
    assert least is not None
    assert fxremat.max_batch(Net(), sample(), least).largest.size >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_zoo(name: str):
    row = measure(name)
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["one_more_least_bytes"] > row["budget_bytes"]


class Reconstructing(nn.Module):
    """Takes its input twice, as a language model takes its text."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.inner(x), target)


def test_one_tensor_may_be_several_arguments() -> None:
    x = torch.randn(5, 8)
    same = fxremat.max_batch(Reconstructing(), (x, x), "100 KiB")
    assert same.largest.size > 5 * 8


@pytest.mark.parametrize("own", [(), (1,)], ids=["unmarked", "marked by its user"])
def test_the_sample_keeps_the_marks_that_its_user_gave_it(own: tuple[int, ...]) -> None:
    """Another mark would have Dynamo capture again whatever it had captured before."""
    for ask in (
        lambda x: fxremat.max_batch(nn.Linear(8, 8), x, "1 MiB"),
        lambda x: fxremat.compile(nn.Linear(8, 8), x, "1 MiB", dynamic=True),
        lambda x: fxremat.estimate(nn.Linear(8, 8), x, budget="1 MiB", dim=0),
    ):
        x = torch.ones(4, 8)
        for dim in own:
            torch._dynamo.maybe_mark_dynamic(x, dim)
        before = copy.deepcopy(vars(x))
        ask(x)
        assert vars(x) == before


class Remainders(Net):
    """Computes with a remainder of its batch, which follows no symbol."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x) * (0.5 * x.shape[0] % 1.7)


def test_a_model_whose_sizes_cannot_follow_is_told_what_can_be_done() -> None:
    model, (x, _) = Remainders(), sample()
    with pytest.raises(fxremat.SizesError) as caught:
        fxremat.max_batch(model, x, BUDGET)
    assert "dynamic=" not in str(caught.value) and "fxremat.plan" in str(caught.value)
    assert fxremat.plan(model, x, BUDGET).predicted_peak_bytes <= BUDGET
    with pytest.raises(fxremat.BudgetError):
        fxremat.plan(model, sample(300)[0], BUDGET)
    with pytest.raises(fxremat.SizesError) as caught:
        fxremat.estimate(model, x, budget=BUDGET, dim=0)
    assert "dynamic=" not in str(caught.value) and "dim=" in str(caught.value)
    assert fxremat.estimate(model, x, budget=BUDGET).plan is not None


class Grouped(nn.Module):
    """Views its batch as groups of some, which has other batches refused."""

    def __init__(self, count: int, more: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)
        self.count, self.more = count, more

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wide(x))
        if self.more:
            x = torch.cat([x, x[: self.more]])
        return self.narrow(x.view(-1, self.count, 128)).sum(1)


class Halves(Grouped):
    """Adds the halves of its batch, with no view."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wide(x))
        half = len(x) // 2
        return self.narrow(x[:half] + x[half:])


@pytest.mark.parametrize(
    ("make", "count", "more", "batch"),
    [(Grouped, 2, 0, 6), (Grouped, 7, 1, 6), (Grouped, 6, 0, 12), (Halves, 2, 0, 6)],
)
def test_only_batches_that_the_model_takes_are_answered(
    make: type[Grouped], count: int, more: int, batch: int
) -> None:
    model, budget = make(count, more), 1 << 20
    found = fxremat.max_batch(model, torch.randn(batch, 64), budget)
    assert all((point.size + more) % count == 0 for point in found.points)
    assert len(found.points) > 4
    largest = found.largest.size
    call = fxremat.compile(model, torch.randn(largest, 64), budget, dynamic=False)
    assert peak_bytes(model, call, (torch.randn(largest, 64),), torch.sum) <= budget
    with pytest.raises(RuntimeError):
        model(torch.randn(largest + 1, 64))
    with pytest.raises(fxremat.BudgetError):
        fxremat.plan(model, torch.randn(largest + count, 64), budget, effort=WHOLE)


def test_where_no_batch_fits_the_least_that_the_model_takes_is_told() -> None:
    model = Grouped(6, 0)
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.max_batch(model, torch.randn(12, 64), 1000)
    assert "is 6" in str(caught.value)
    least = caught.value.least_budget_bytes
    assert fxremat.max_batch(model, torch.randn(12, 64), least).largest.size >= 6


def test_the_largest_batch_that_an_error_names_is_one_that_the_model_takes() -> None:
    model, budget = Grouped(2, 0), 1 << 20
    compiled = fxremat.compile(model, torch.randn(6, 64), budget, dynamic=True, strict=True)
    with pytest.raises(fxremat.BudgetError) as caught:
        compiled(torch.randn(100_000, 64))
    (largest,) = caught.value.largest.values()
    assert largest % 2 == 0
    compiled(torch.randn(largest, 64)).sum().backward()
