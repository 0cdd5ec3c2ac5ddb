"""Models that Dynamo cannot capture as one graph: the budget holds, or somebody hears of it."""

from __future__ import annotations

import gc
import io
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import torch_compat
from fxremat.errors import BudgetError, BudgetWarning, GraphBreakWarning
from fxremat.planner.context.context_bytes import SCALARS
from fxremat.runtime.steps import SCALAR_BYTES
from tests.models.zoo import seeded

ROWS, WIDTH, LAYERS = 512, 32, 6

Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _captured_anew(quick_search: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


class Blocks(nn.Module):
    def __init__(self, count: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(count)
        )

    def through(self, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        for block in self.blocks[first:last]:
            x = x + block(x)
        return x


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Unbroken(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)


class OwnFunction(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return Squares.apply(self.through(x))


class FusedLoss(torch.autograd.Function):
    """Makes its gradients in the forward, tile by tile, as fused heads of language models do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wanted: Tensor) -> tuple[Tensor, None]:
        torch._dynamo.graph_break()
        to_x, to_weight, loss = torch.empty_like(x), torch.zeros_like(weight), x.new_zeros(())
        for at in range(0, len(x), 64):
            part = slice(at, at + 64)
            chances = (x[part] @ weight.t()).softmax(-1)
            loss -= chances.gather(1, wanted[part, None]).log().sum()
            chances.scatter_add_(1, wanted[part, None], -torch.ones(len(chances), 1))
            to_x[part] = chances @ weight
            to_weight += chances.t() @ x[part]
        ctx.save_for_backward(to_x, to_weight)
        return loss, None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _none: None) -> tuple[Tensor, Tensor, None]:
        to_x, to_weight = ctx.saved_tensors
        return to_x * gradient, to_weight * gradient, None


class FusedHead(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 200, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wanted = torch.arange(len(x)) % 200
        return FusedLoss.apply(self.through(x), self.head.weight, wanted)[0]


class LoopBreaks(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = x + block(x)
        return x.square().mean()


class Logs(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for block in self.blocks:
            x = x + block(x)
            self.seen.append(float(x.detach().abs().mean()))
        return x.square().mean()


class ListGrows(Blocks):
    """What is guarded changes at each step: Dynamo captures the same graph again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x, 0, 3)
        self.seen.append(float(x.detach().mean()))
        torch._dynamo.graph_break()
        return self.through(x, 3).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(128, WIDTH))
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)
        self.after = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.before(x.reshape(-1, 8, WIDTH)))
        return self.after(h).square().mean()


class SignThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable()
        return x.sign()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(Blocks):
    """Dynamo fails at its function with an assertion of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x)
        return (x + SignThrough.apply(x)).square().mean()


class Chosen(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.through(x, 0, 3)
        x = x[(x[:, 0] > 0).nonzero()[:, 0]]
        return self.through(x, 3).square().mean()


class LayerDropout(Blocks):
    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            if random.random() < 0.7:
                x = x + block(x)
        return x.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own function": OwnFunction,
    "fused head": FusedHead,
    "breaks in a loop": LoopBreaks,
    "logs": Logs,
    "list grows": ListGrows,
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "straight through": StraightThrough,
    "nonzero": Chosen,
    "layer dropout": LayerDropout,
}

FEW = ("nonzero", "gru")
"""Models that are always tried; the others in the slow suite."""


def made(name: str) -> tuple[nn.Module, Tensor]:
    with seeded(0):
        return MODELS[name](), torch.randn(ROWS, WIDTH)


def step(model: nn.Module, call: Call, x: Tensor, seed: int = 1) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    random.seed(seed)
    with seeded(seed):
        call(x).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def peak_of(model: nn.Module, call: Call, x: Tensor, seed: int = 1) -> int:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        random.seed(seed)
        call(x).backward()

    model.zero_grad(set_to_none=True)
    return fxremat.measure_step(model, run).peak_bytes


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


def held(name: str, budget: int | str) -> tuple[int, int]:
    """Train within ``budget``, or within the least that an error tells; peak and budget."""
    model, x = made(name)
    expected = step(model, model, x)
    compiled = fxremat.compile(model, x, budget, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(5):
                assert same(step(model, compiled, x), expected)
        except BudgetError as error:
            assert error.least_budget_bytes is not None
            assert isinstance(budget, int)
            assert error.least_budget_bytes > budget
            torch._dynamo.reset()
            return held(name, error.least_budget_bytes)
    peak = peak_of(model, compiled, x)
    return peak, compiled.plan.budget_bytes


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
@pytest.mark.parametrize(
    "share",
    [pytest.param(0.8, marks=pytest.mark.slow), pytest.param(0.6, marks=pytest.mark.slow), "min"],
)
def test_the_budget_holds(name: str, share: float | str) -> None:
    model, x = made(name)
    full = peak_of(model, model, x)
    peak, budget = held(name, share if isinstance(share, str) else int(share * full))
    assert peak <= budget


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("own function", marks=pytest.mark.slow),
        pytest.param("breaks in a loop", marks=pytest.mark.slow),
        "lstm",
    ],
)
def test_a_refusal_names_the_least_that_trains(name: str) -> None:
    """First that of one region, as it is before a step was watched, then that of the step."""
    model, x = made(name)
    compiled = fxremat.compile(model, x, "min")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            step(model, compiled, x)
    least = compiled.plan.budget_bytes
    _, budget = held(name, least // 2)
    assert least <= budget <= least + x.nbytes + SCALARS * SCALAR_BYTES


def test_what_was_planned_goes_with_the_compiled_module() -> None:
    """Dynamo keeps what it compiled among the globals of the user's own functions."""
    model, x = made("own function")
    compiled = fxremat.compile(model, x, "min")
    for _ in range(3):
        step(model, compiled, x)
    planner = weakref.ref(compiled._training)
    del compiled
    gc.collect()
    assert planner() is None


def test_a_hook_that_is_removed_leaves_one_graph_again() -> None:
    x = torch.randn(ROWS, WIDTH)
    whole = fxremat.compile(Unbroken(), x, "min")
    for _ in range(3):
        whole(x).sum().backward()
        whole.zero_grad()
    call = fxremat.compile(Unbroken(), x, "min")
    hook = call.blocks[1].register_full_backward_hook(lambda *_given: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphBreakWarning)
        for _ in range(4):
            call(x).sum().backward()
            call.zero_grad()
    assert isinstance(call.plan, fxremat.StepPlan)
    hook.remove()
    for _ in range(3):
        call(x).sum().backward()
        call.zero_grad()
    assert isinstance(call.plan, fxremat.Plan)
    assert isinstance(whole.plan, fxremat.Plan)
    assert call.plan.least_budget_bytes == whole.plan.least_budget_bytes


def test_what_is_captured_at_each_step_runs_as_it_is_after_some() -> None:
    """What it calls is captured once, and planned."""
    model, x = made("list grows")
    budget, expected = int(0.7 * peak_of(model, model, x)), step(model, model, x)
    compiled = fxremat.compile(model, x, budget)
    captured = []
    with pytest.warns(GraphBreakWarning, match="the length of a list"):
        for _ in range(20):
            assert same(step(model, compiled, x), expected)
            captured.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert captured[3] < captured[6] < captured[-4] == captured[-1]
    assert peak_of(model, compiled, x) <= budget
    assert len(compiled.plan.regions) == 2


@pytest.mark.parametrize(
    "name", [pytest.param("own function", marks=pytest.mark.slow), "nonzero", "layer dropout"]
)
def test_with_room_for_all_nothing_is_recomputed(name: str) -> None:
    model, x = made(name)
    compiled = fxremat.compile(model, x, 2 * peak_of(model, model, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            step(model, compiled, x)
    plan = compiled.plan
    assert isinstance(plan, fxremat.StepPlan)
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("name", [pytest.param("layer dropout", marks=pytest.mark.slow), "nonzero"])
def test_steps_that_differ_fit_once_their_like_was_seen(name: str) -> None:
    model, x = made(name)
    full = max(peak_of(model, model, x, seed) for seed in range(20))
    compiled = fxremat.compile(model, x, int(0.7 * full))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (*range(20), *range(20)):
            expected = step(model, model, x, seed)
            assert same(step(model, compiled, x, seed), expected)
    for seed in range(0, 20, 4):
        assert peak_of(model, compiled, x, seed) <= int(0.7 * full)


def test_a_model_of_which_nothing_is_captured_runs_as_it_is_and_is_told_of() -> None:
    class Plain(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                up, act, down = block[0], block[1], block[2]
                h = act(up(x))
                print(end="", file=io.StringIO())
                x = x + down(h)
            return x.square().mean()

    with seeded(0):
        model, x = Plain(), torch.randn(ROWS, WIDTH)
    full, expected = peak_of(model, model, x), step(model, model, x)
    compiled = fxremat.compile(model, x, 2 * full)
    with pytest.warns(GraphBreakWarning, match="nothing"):
        for _ in range(3):
            assert same(step(model, compiled, x), expected)
    torch._dynamo.reset()
    compiled = fxremat.compile(model, x, full // 2, strict=True)
    with pytest.raises(BudgetError) as caught, pytest.warns(BudgetWarning):
        for _ in range(5):
            step(model, compiled, x)
    assert caught.value.least_budget_bytes is not None
    assert abs(caught.value.least_budget_bytes / full - 1) < 0.02


class Effects(Blocks):
    """Writes, draws and prints between its graphs."""

    def __init__(self) -> None:
        super().__init__(2)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros(()))
        self.sink = io.StringIO()

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        self.count += 1
        torch._dynamo.graph_break()
        print("here", file=self.sink)
        x = x + torch.randn(x.shape, generator=self.generator)
        return self.through(x).square().mean()


def test_planning_runs_nothing_between_graphs_and_steps_run_each_line_once() -> None:
    with seeded(0):
        model, x = Effects(), torch.randn(ROWS, WIDTH)
    before, state = x.clone(), model.generator.get_state()
    compiled = fxremat.compile(model, x, 1.0)
    assert torch.equal(x, before)
    assert torch.equal(model.generator.get_state(), state)
    assert not model.count
    assert not model.sink.getvalue()
    plain = Effects()
    plain.load_state_dict(model.state_dict())
    mine, theirs = x.clone(), x.clone()
    for steps in range(1, 5):
        found, expected = step(model, compiled, mine), step(plain, plain, theirs)
        assert same(found, expected)
        assert torch.equal(mine, theirs)
        assert model.count == steps
        assert model.sink.getvalue() == steps * "here\n"


def test_planned_at_the_first_call_it_runs_each_line_once_too() -> None:
    with seeded(0):
        model, x = Effects(), torch.randn(ROWS, WIDTH)
    compiled, before = fxremat.compile(model, budget=1.0), x.clone()
    step(model, compiled, x)
    assert torch.equal(x, before + 1)
    assert model.sink.getvalue() == "here\n"


def test_a_backward_in_another_thread_is_told_of() -> None:
    model, x = made("breaks in a loop")
    compiled = fxremat.compile(model, x, 1 << 30)
    with pytest.warns(GraphBreakWarning, match="thread"):
        for _ in range(4):
            loss = compiled(x)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            model.zero_grad(set_to_none=True)


def test_a_step_that_raises_in_its_backward_leaves_the_next_ones_as_they_were() -> None:
    model, x = made("own function")
    expected = step(model, model, x)
    compiled = fxremat.compile(model, x, int(0.7 * peak_of(model, model, x)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at in range(7):
            if at in (1, 4):
                with pytest.raises(ZeroDivisionError):
                    loss = compiled(x)
                    loss.register_hook(lambda _gradient: 1 / 0)
                    loss.backward()
            else:
                assert same(step(model, compiled, x), expected)
    assert peak_of(model, compiled, x) <= compiled.plan.budget_bytes


def test_warnings_end_in_a_usual_loop_with_an_optimizer() -> None:
    model, x = made("own function")
    compiled = fxremat.compile(model, x, "min")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for at in range(12):
            if at == 6:
                told.clear()
            with seeded(1):
                compiled(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [w for w in told if issubclass(w.category, BudgetWarning)]


def test_layers_that_the_user_checkpoints_between_breaks_are_told_of() -> None:
    """Dynamo passes by what a checkpoint calls where its caller is left to Python."""

    class Checkpointed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                torch._dynamo.graph_break()
                x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x.square().mean()

    with seeded(0):
        model, x = Checkpointed(), torch.randn(ROWS, WIDTH)
    expected = step(model, model, x)
    compiled = fxremat.compile(model, x, 1 << 30)
    with pytest.warns(GraphBreakWarning, match="nothing"):
        for _ in range(3):
            assert same(step(model, compiled, x), expected)


class Uncaptured(nn.Module):
    """Dynamo captures nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, 16, batch_first=True), nn.Linear(16, 4)
        self.watched: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.watched.append(torch_compat.is_profiled())
        y, _ = self.rnn(x)
        return self.head(y[:, -1]).square().mean()


@pytest.mark.filterwarnings("ignore::fxremat.GraphBreakWarning")
def test_where_nothing_is_captured_no_batch_is_held_and_few_steps_are_watched() -> None:
    with seeded(0):
        model = Uncaptured()
    call = fxremat.compile(model, None, "64 MiB")
    batches: list[weakref.ref[Tensor]] = []
    counted: list[int] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            x = torch.randn(4, 8, WIDTH)
            batches.append(weakref.ref(x))
            call(x).backward()
            del x
            kinds = [type(own) for own in gc.get_objects()]
            counted.append(kinds.count(torch_compat.StorageAlive))
        held = [batch for batch in batches if batch() is not None]
    finally:
        gc.enable()
    assert not held
    assert counted[-1] - counted[0] < len(batches) / 2  # of what each call returned
    assert any(model.watched) and not any(model.watched[-12:])


@pytest.mark.filterwarnings("ignore::fxremat.GraphBreakWarning", "ignore::fxremat.BudgetWarning")
def test_where_nothing_is_captured_steps_over_the_budget_stay_watched() -> None:
    model = Uncaptured()
    call = fxremat.compile(model, None, 1000)
    for _ in range(12):
        call(torch.randn(4, 8, WIDTH)).backward()
    assert all(model.watched[-4:])


class Matched(nn.Module):
    """As many numbers are chosen by data as another input has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = torch.masked_select(torch.tanh(x) * self.weight, x > 0)
        return torch.tanh(y * other).sum()


def test_a_number_of_chosen_ones_that_must_be_a_known_one_is_planned_for():
    generator = torch.Generator().manual_seed(0)
    calls = []
    for rows in (4, 8, 12):  # of the first the number is a constant, of the others a symbol
        x = -torch.rand(rows, 6, generator=generator) - 0.1
        x.view(-1)[torch.randperm(6 * rows, generator=generator)[: 2 * rows]] += 2
        calls.append((x, torch.randn(2 * rows, generator=generator)))
    left = []
    for budget in (None, "min"):
        torch._dynamo.reset()
        model: Any = Matched()
        if budget is None:
            compiled: Call = torch.compile(model, backend="aot_eager")
        else:
            compiled = fxremat.compile(model, calls[0], budget, loss="own")
        left.append([])
        for call in calls:
            (loss := compiled(*call)).backward()
            left[-1] += [loss.detach(), model.weight.grad]
            model.weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
