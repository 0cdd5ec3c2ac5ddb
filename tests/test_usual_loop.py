"""The contract with a real training loop: a number that we name trains, a running job goes on."""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel

import fxremat
from fxremat.costs.measured import cache
from tests.efforts import ROUNDED_PARTS, WHOLE

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

ORDERS = ("before", "between", "after", "zeros")
"""Where ``zero_grad`` is called; ``zeros``: before the forward, with ``set_to_none=False``."""

Step = Callable[[], Tensor]


def network(width: int = 64, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    each = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(blocks)
    ]
    return nn.Sequential(*each)


X = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    order: str,
    steps: int = 6,
    x: Tensor = X,
    y: Tensor = Y,
    loss_of: Callable[[Tensor, Tensor], Tensor] = mse_loss,
) -> list[float]:
    """A tutorial's loop, in which the last iteration's outputs and loss are still held."""
    losses = []
    for _ in range(steps):
        if order in ("before", "zeros"):
            optimizer.zero_grad(set_to_none=order == "before")
        output = model(x)
        loss = loss_of(output, y)
        if order == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if order == "after":
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        yield


def budget_warnings(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, fxremat.BudgetWarning)]


def least_named(**options: object) -> fxremat.BudgetError:
    model = network()
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.compile(model, X, 1, **options)  # type: ignore[arg-type]
    return refused.value


@pytest.mark.parametrize("order", ORDERS)
def test_the_least_that_an_error_names_trains(order: str) -> None:
    """With optimizer, loss and target given, in whatever order gradients are cleared."""
    least = least_named(
        optimizer=torch.optim.AdamW, loss=fxremat.Loss(mse_loss, target=Y)
    ).least_budget_bytes
    assert least is not None
    expected = train(network(), torch.optim.AdamW(network().parameters()), order, steps=1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(
        model, X, least, optimizer=optimizer, loss=fxremat.Loss(mse_loss, target=Y)
    )
    with no_warning():
        losses = train(compiled, optimizer, order)
    assert losses[:1] == expected
    if order != "zeros":
        model.zero_grad()
    peak = fxremat.measure_step(compiled, lambda: mse_loss(compiled(X), Y).backward()).peak_bytes
    assert peak <= least


def test_an_error_names_what_other_orders_need() -> None:
    error = least_named(optimizer=torch.optim.AdamW, loss=fxremat.Loss(mse_loss, target=Y))
    found = re.findall(r"(?:at least|or) (\d+)", str(error))
    numbers = [int(number) for number in found]
    assert numbers[0] == error.least_budget_bytes
    assert len(numbers) > 1
    assert numbers == sorted(numbers, reverse=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(
        model, X, numbers[-1], optimizer=optimizer, loss=fxremat.Loss(mse_loss, target=Y)
    )
    with no_warning():
        train(compiled, optimizer, "before")


@pytest.mark.parametrize("budget", [1.0, 0.9, "min"])
@pytest.mark.parametrize("order", ORDERS)
def test_shares_and_min_train_with_all_given(order: str, budget: float | str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(
        model, X, budget, optimizer=optimizer, loss=fxremat.Loss(mse_loss, target=Y)
    )
    train(compiled, optimizer, order)
    nbytes = compiled.plan.budget_bytes
    if order != "zeros":
        model.zero_grad()
    step = fxremat.measure_step(compiled, lambda: mse_loss(compiled(X), Y).backward())
    assert step.peak_bytes <= nbytes


@pytest.mark.parametrize("budget", [0.9, "min"])
def test_shares_and_min_train_with_nothing_given(budget: float | str) -> None:
    """State is seen after the first step: one warning at most, and one value of the budget."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(model, X, budget)
    found = budget_warnings(lambda: train(compiled, optimizer, "before"))
    assert len([text for text in found if "a step of AdamW allocates" not in text]) <= 1
    assert compiled.plan.budget_bytes == compiled._training.loop.budget.nbytes


def test_a_strict_least_leaves_the_loop_out() -> None:
    held = "outputs of earlier steps"
    assert held in str(least_named(loss=fxremat.Loss(mse_loss, target=Y)))
    assert held not in str(least_named(loss=fxremat.Loss(mse_loss, target=Y), assume="strict"))


def short_of_memory(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose budget leaves no room for the state of its optimizer."""
    model = network()
    least = least_named(loss=fxremat.Loss(mse_loss, target=Y)).least_budget_bytes
    assert least is not None
    compiled = fxremat.compile(
        model,
        X,
        least,
        loss=fxremat.Loss(mse_loss, target=Y),
        **options,  # type: ignore[arg-type]
    )
    return compiled, torch.optim.AdamW(model.parameters())


def test_a_running_job_goes_on_with_a_warning_whose_number_comes_true() -> None:
    compiled, optimizer = short_of_memory()
    expected = train(network(), torch.optim.AdamW(network().parameters()), "before", steps=1)
    losses: list[float] = []
    found = budget_warnings(lambda: losses.extend(train(compiled, optimizer, "before")))
    assert losses[:1] == expected
    told = [text for text in found if "state of optimizers" in text]
    assert told
    assert f"{__file__}:" in told[0]
    enough = int(re.findall(r"budget of (\d+) suffices", told[-1])[0])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    again = fxremat.compile(model, X, enough, loss=fxremat.Loss(mse_loss, target=Y))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the step", fxremat.BudgetWarning)
        train(again, optimizer, "before")


def test_a_strict_job_raises() -> None:
    compiled, optimizer = short_of_memory(strict=True)
    with pytest.raises(fxremat.BudgetError, match="state of optimizers"):
        train(compiled, optimizer, "before")


def test_the_plan_comes_back_when_there_is_room() -> None:
    """What a list of outputs holds is warned of, and gone with the list."""
    model = network()
    plan = fxremat.plan(model, X, "min", loss=fxremat.Loss(mse_loss, target=Y))
    room = 20 * X.nbytes  # for outputs of so many steps
    compiled = fxremat.compile(
        model, X, plan.budget_bytes + room, loss=fxremat.Loss(mse_loss, target=Y)
    )

    def step() -> Tensor:
        model.zero_grad()
        output: Tensor = compiled(X)
        mse_loss(output, Y).backward()
        return output

    with no_warning():
        step()
        step()
    fast_s = compiled.plan.predicted_s
    held = [torch.empty(0)]
    found = budget_warnings(lambda: held.extend(step() for _ in range(60)))
    assert any("outputs of earlier steps" in text for text in found)
    assert compiled.plan.predicted_s > 1.05 * fast_s
    held.clear()
    with no_warning():
        step()
        step()
    assert compiled.plan.predicted_s <= 1.05 * fast_s


def test_a_larger_batch_later_is_no_error() -> None:
    model = network()
    compiled = fxremat.compile(model, X, "min", loss=torch.sum)
    nbytes = compiled.plan.budget_bytes
    compiled = fxremat.compile(model, X, nbytes, loss=torch.sum)
    compiled(X).sum().backward()
    large = torch.randn(5 * 96, 64)
    found = budget_warnings(lambda: compiled(large).sum().backward())
    assert any("sizes, or a graph" in text for text in found)
    model.zero_grad()
    strict = fxremat.compile(model, X, nbytes, loss=torch.sum, strict=True)
    strict(X).sum().backward()
    with pytest.raises(fxremat.BudgetError):
        strict(large)


def test_a_copy_of_min_is_min() -> None:
    model = fxremat.compile(network(), X, "min")
    for compiled in (model, copy.deepcopy(model)):
        for _ in range(3):
            output = compiled(X)  # still held at the next call
            output.square().sum().backward()
            compiled.zero_grad()


def squares(output: Tensor, target: Tensor) -> Tensor:
    """As ``mse_loss``, whose value holds the memory that it was reduced from."""
    return (output - target).square().mean()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("order", ["before", "after"])
def test_predicted_peaks_are_those_of_the_loop_after_some_steps(given: bool, order: str) -> None:
    """Within one percent in both directions, be the loss given or not."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"optimizer": optimizer, "loss": fxremat.Loss(squares, target=Y)} if given else {}
    compiled = fxremat.compile(model, X, 1.0, **options)  # type: ignore[arg-type]
    train(compiled, optimizer, order, steps=5, loss_of=squares)
    plan = compiled.plan
    assert plan.measured_peak_bytes is not None
    assert 0.99 <= plan.predicted_peak_bytes / plan.measured_peak_bytes <= 1.01


def test_a_plan_in_parts_is_replaced_once_gradients_are_seen_to_be_cleared() -> None:
    """It was for gradients that stay; the least that an error names has room for those."""
    x, y = torch.randn(1024, 512), torch.randint(0, 8, (1024,))

    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8))

    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.compile(made(), x, 1, **ROUNDED_PARTS)
    least = refused.value.least_budget_bytes
    assert least is not None
    model = made()
    compiled = fxremat.compile(model, x, least, **ROUNDED_PARTS)
    train(compiled, torch.optim.SGD(model.parameters()), "between", x=x, y=y, loss_of=cross_entropy)
    plan = compiled.plan
    assert plan.measured_peak_bytes is not None
    assert 0.99 <= plan.predicted_peak_bytes / plan.measured_peak_bytes <= 1.01


# Several networks of one process.


def test_networks_of_one_process_count_each_other() -> None:
    generator, critic = network(), network()
    first = fxremat.compile(generator, X, "8 MiB", loss=torch.sum)
    second = fxremat.compile(critic, X, "8 MiB", loss=torch.sum)
    for compiled in (first, second) * 3:  # the first one's gradients exist while the second trains
        compiled.zero_grad()
        compiled(X).sum().backward()
    named = dict(second.plan.also_held)
    bytes_of_first = 2 * sum(p.nbytes for p in generator.parameters())
    assert named["other networks of this process, and copies"] == bytes_of_first


def test_a_network_that_trains_no_more_is_left_out() -> None:
    old = fxremat.compile(network(), X, 1.0, loss=torch.sum)
    old(X).sum().backward()
    plan = fxremat.plan(network(), X, 1.0, loss=torch.sum)
    assert not plan.also_held
    assert old is not None


def test_an_average_of_the_weights_is_counted() -> None:
    model = network()
    compiled = fxremat.compile(model, X, 1.0, loss=torch.sum)
    average = AveragedModel(compiled)
    for _ in range(2):
        compiled.zero_grad()
        compiled(X).sum().backward()
    named = dict(compiled.plan.also_held)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert named["other networks of this process, and copies"] == nbytes
    average.update_parameters(compiled)


# Models that are captured in several graphs.


class Broken(nn.Module):
    """Its second region needs memory that no plan can do without."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        z = torch.cat([y] * 40)
        return self.b(y + torch.sin(z).view(40, *y.shape).sum(0))


def test_a_region_above_the_budget_is_warned_of_at_once() -> None:
    compiled = fxremat.compile(Broken(), budget="8 MiB", effort=WHOLE)
    large, small = torch.randn(128, 64), torch.randn(8, 64)
    found = budget_warnings(lambda: compiled(large).sum().backward())
    assert any("a region of this model needs at least" in text for text in found)
    compiled.zero_grad()
    for _ in range(4):  # and nothing that fits is refused
        compiled(small).sum().backward()
        compiled.zero_grad()


class Wrapped:
    """What no tree of tensors shows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Wrapped:
        torch._dynamo.graph_break()
        return Wrapped(self.scale * x)


def test_a_loss_that_no_region_sees_is_warned_of() -> None:
    """Of a model whose outputs lead to no backward, as a Gaussian process's distribution."""
    model = Lazy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = fxremat.compile(model, budget=100_000)
    x = torch.linspace(0, 1, 200)[:, None]

    def loop() -> None:
        for _ in range(8):
            optimizer.zero_grad()
            wide = compiled(x).value.expand(200, 200)
            torch.linalg.cholesky(wide @ wide.T + 1e6 * torch.eye(200)).sum().backward()
            optimizer.step()

    found = budget_warnings(loop)
    assert len([text for text in found if "more than its budget of 100000" in text]) >= 4


class Uncaptured(nn.Module):
    """A model of which nothing is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """Outputs as large as the input."""
        return torch.log_softmax(self.layer(x), dim=1)


def test_the_budget_that_a_warning_names_trains_where_nothing_is_captured():
    def over(budget: int) -> list[str]:
        torch._dynamo.reset()
        call = fxremat.compile(Uncaptured(), x, budget)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(5):
                output = call(x)
                loss = output.square().mean()
                call.zero_grad()
                loss.backward()
        texts = (str(one.message) for one in seen if one.category is fxremat.BudgetWarning)
        return [text for text in texts if f"its budget of {budget}." in text]

    x, model = torch.randn(512, 256), Uncaptured()
    named = int(re.findall(r"budget of (\d+) suffices", over(4096)[0])[0])
    assert not over(named)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    assert named >= parameter_bytes + 6 * x.nbytes  # counted below torch: 16 bytes more


@pytest.mark.parametrize(
    "written",
    [*(pytest.param(budget, marks=pytest.mark.slow) for budget in ("bytes", 0.9)), 1.0, "min"],
)
def test_what_a_loop_holds_outside_its_model_is_warned_of_and_its_remedy_works(
    written: str | float,
):
    def messages(budget: int | str | float, reserve: int) -> list[str]:
        torch._dynamo.reset()
        model, x = network(), torch.randn(64, 64)
        loss = fxremat.Loss(mse_loss, target=torch.empty(64, 64))
        call = fxremat.compile(model, x, budget, loss=loss, reserve=reserve)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                x, y, following = (torch.randn(n, 64) for n in (64, 64, 4096))
                mse_loss(call(x), y).backward()
                call.zero_grad()
            del following
        return [str(one.message) for one in caught if one.category is fxremat.BudgetWarning]

    least_bytes = fxremat.plan(
        network(),
        torch.randn(64, 64),
        "min",
        loss=fxremat.Loss(mse_loss, target=torch.empty(64, 64)),
    ).budget_bytes
    budget = least_bytes if written == "bytes" else written
    texts = messages(budget, 0)
    assert texts and all("outside the model" in text for text in texts)
    assert written == "bytes" or len(texts) == 1
    reserve = int(re.findall(r"reserve=(\d+)", texts[0])[0])
    assert reserve >= 4096 * 64 * 4  # the batch that was made before its turn
    if written == "bytes":
        budget = int(re.findall(r"budget of (\d+) then", texts[0])[0])
    assert not messages(budget, reserve)


class Convolutions(nn.Module):
    """Kernels whose workspaces no law gives at another size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Wide(nn.Module):
    """One operation after another on a tensor that is wide only inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).softmax(-1).mul(3).tanh())


def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations be measured again that other tests of this process have measured."""
    monkeypatch.setattr(cache, "COSTS", defaultdict(cache.CostCache))


@pytest.mark.parametrize("sampled", [True, False])
def test_measuring_inside_a_step_that_takes_more_than_the_budget_is_warned_of(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages are measured whole; parts of them keep to a smaller budget."""
    x = torch.randn(4096, 8)
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.compile(Wide(), x, 1, **ROUNDED_PARTS)
    least = refused.value.least_budget_bytes
    assert least is not None
    nothing_measured(monkeypatch)
    model = fxremat.compile(Wide(), x if sampled else None, least, **ROUNDED_PARTS)
    texts = budget_warnings(lambda: model(x).sum().backward())
    found = [text for text in texts if "measuring its operations took at least" in text]
    assert len(found) == (not sampled)
    for text in found:
        taken = int(re.findall(r"at least (\d+) bytes", text)[0])
        assert least < taken < 6 * x.nbytes * 8  # below torch 5 398 588 are counted
        assert __file__ in text
    assert not budget_warnings(lambda: model(x).sum().backward())


def test_where_that_warning_is_an_error_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4096, 8)
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.compile(Wide(), x, 1, **ROUNDED_PARTS)
    nothing_measured(monkeypatch)
    least = refused.value.least_budget_bytes
    model = fxremat.compile(Wide(), budget=least, **ROUNDED_PARTS)
    with no_warning():
        with pytest.raises(fxremat.BudgetWarning, match="was planned as it began"):
            model(x)
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad()


def test_measuring_inside_a_step_within_the_budget_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing_measured(monkeypatch)
    x = torch.randn(4096, 8)
    model = fxremat.compile(Wide(), budget=10**9)
    assert not budget_warnings(lambda: model(x).sum().backward())


def test_a_profiler_stops_no_job():
    """A new context is planned with what was measured before, a new size with estimates."""
    torch.manual_seed(0)
    model = Convolutions()

    def batch(size: int) -> Tensor:
        return torch.randn(size, 8, 16, 16)

    call = fxremat.compile(model, batch(8), "min", loss="own")
    trained: list[tuple[Tensor, list[Tensor | None]]] = []
    estimated: list[bool] = []

    def train(size: int) -> None:
        x = batch(size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call.zero_grad()
            held = call(x)
            held.backward()
        estimated.append(any("estimated" in str(one.message) for one in caught))
        trained.append((x, [p.grad for p in model.parameters()]))

    for size in (8, 8, 6):
        train(size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for size in (8, 7, 7):
            train(size)
    train(7)
    assert estimated == [False, False, False, False, True, True, False]
    for x, found in trained:
        call.zero_grad()
        model(x).backward()
        assert all(map(torch.equal, (p.grad for p in model.parameters()), found))


def test_a_least_that_an_error_names_is_not_refused_in_its_place():
    """Forms in parts depend on the budget that is asked for: what one names, another must find."""

    def trained() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 8))

    model, x = trained(), torch.randn(8, 32, 64)
    options = {"accumulate": True, "optimizer": torch.optim.AdamW}
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.compile(model, x, 1024, **options)
    torch._dynamo.reset()
    named = refused.value.least_budget_bytes
    assert fxremat.compile(trained(), x, named, **options).plan.predicted_peak_bytes <= named


def test_what_comes_after_the_first_step_is_warned_of_in_the_step_that_it_comes_before():
    call = fxremat.compile(network(), torch.randn(64, 64), 1.0, loss=torch.sum)
    held: list[Tensor] = []
    warned: list[int] = []
    for number in range(4):
        x = torch.randn(64, 64)
        held += [torch.randn(4096, 64)] * (number == 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(x).sum().backward()
            call.zero_grad()
        texts = [str(one.message) for one in caught if one.category is fxremat.BudgetWarning]
        warned += [number for text in texts if "outside the model" in text]
    assert warned == [2]
