"""Models with one rare thing each: same bits within the budget, or a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import CaptureError
from tests.models.corners import CORNERS, Applied
from tests.models.reference import reference_step
from tests.trials import attempt

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")


@pytest.mark.parametrize("name", CORNERS)
def test_same_bits_within_the_least_budget(name: str):
    expected = reference_step(CORNERS[name], input_gradients=True)
    torch._dynamo.reset()
    attempt(CORNERS[name], "min", expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORNERS)
def test_same_bits_within_the_budget(name: str):
    entry = CORNERS[name]
    expected = reference_step(entry, input_gradients=True)
    torch._dynamo.reset()
    least = attempt(entry, "min", expected)
    full = attempt(entry, 1.0, expected)
    assert least.measured_bytes <= full.measured_bytes


def refused(model: nn.Module, *sample: Tensor) -> str:
    with pytest.raises(CaptureError) as caught:
        fxremat.compile(model, sample, "min", loss=torch.sum, regions="one")
    return caught.value.message


def test_sizes_that_depend_on_data_are_reported_even_with_a_loss():
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return layers[0](x).flatten()[x.flatten() > 0]

    message = refused(Applied(forward, nn.Linear(4, 4)), torch.randn(3, 4))
    assert "x.flatten() > 0" in message


class Convolved(nn.Module):
    """A convolution over a graph whose edges are a sparse buffer, or an argument."""

    def __init__(self, edges: Tensor | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        edges = self.edges if edges is None else edges
        return torch.sparse.mm(edges, self.second(torch.sparse.mm(edges, self.first(x)).relu()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("as_buffer", [True, False])
def test_sparse_inputs_and_buffers_train_with_the_same_bits(layout: torch.layout, as_buffer: bool):
    edges = torch.eye(64).roll(1, 0).to_sparse(layout=layout)
    x, given = torch.randn(64, 8), () if as_buffer else (edges,)
    target = torch.randn(64, 4).relu().to_sparse()

    def losses(budget: float | None) -> list[float]:
        torch.manual_seed(0)
        model = Convolved(edges if as_buffer else None)
        call = model
        if budget is not None:
            call = fxremat.compile(model, None, budget, loss=fxremat.Loss(squares, target=target))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = squares(call(x, *given), target)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    def squares(output: Tensor, expected: Tensor) -> Tensor:
        return (output - expected.to_dense()).square().mean()

    assert losses(0.8) == losses(None)


def least_bytes(model: nn.Module, *sample: Tensor, **options: Any) -> int:
    torch._dynamo.reset()
    return fxremat.plan(model, sample, "min", assume="strict", **options).budget_bytes


def test_a_sparse_buffer_that_no_graph_reads_counts():
    edges = torch.eye(64).to_sparse()
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    without = least_bytes(model, x)
    model.register_buffer("edges", edges)
    assert least_bytes(model, x) - without == 64 * (2 * 8 + 4)


def test_a_sparse_target_counts():
    model, x = nn.Linear(8, 4), torch.randn(64, 8)

    def squares(output: Tensor, expected: Tensor) -> Tensor:
        return (output - expected.shape[0]).square().mean()

    nbytes = [
        least_bytes(model, x, loss=fxremat.Loss(squares, torch.eye(64)[:rows].to_sparse()))
        for rows in (8, 64)
    ]
    assert nbytes[1] - nbytes[0] == 56 * (2 * 8 + 4)


def test_gradients_of_a_sparse_parameter_accumulate():
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(8).to_sparse())
    model.linear = nn.Linear(8, 8)
    model.forward = lambda x: torch.sparse.mm(model.weight, model.linear(x))
    call = fxremat.compile(model, None, "min", accumulate=True)
    for _ in range(3):
        call(torch.randn(8, 8)).sum().backward()
    assert model.weight.grad is not None


class Jagged(nn.Sequential):
    """Takes rows of different lengths, and returns their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).values()


def grouped(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Sizes of the groups depend on data, and an operation takes all groups at once."""
    values, chosen = layers[0](x).softmax(-1).max(-1)
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=4).cumsum(0).to(torch.int32)
    weights = layers[1].weight.view(4, 16, 16).bfloat16()
    y = torch._grouped_mm(x[order].bfloat16(), weights, offs=ends)
    return y.float() * values[order, None]


def chosen(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (layers[0](x),))


class Seen(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.t().unsqueeze(0)


def scattered(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[0](x).relu().to_sparse()


def rows(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, 16) for n in lengths], layout=torch.jagged)


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyLinear(16), nn.Dropout(0.2), nn.LazyBatchNorm1d(), nn.GELU(), nn.LazyLinear(4)
    )


UNUSUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "jagged": (
        lambda: Jagged(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), lambda: rows(5, 9),
    ),
    "grouped": (
        lambda: Applied(grouped, nn.Linear(16, 4), nn.Linear(16, 64)), lambda: torch.randn(64, 16),
    ),
    "cond": (lambda: Applied(chosen, nn.Linear(16, 16)), lambda: torch.randn(64, 16)),
    "a view": (Seen, lambda: torch.randn(64, 16)),
    "a sparse output": (
        lambda: Applied(scattered, nn.Linear(16, 16)), lambda: torch.randn(64, 16),
    ),
    "lazy": (lazy, lambda: torch.randn(8, 16)),
    "lazy root": (lambda: nn.LazyLinear(4), lambda: torch.randn(8, 16)),
}  # fmt: skip


def steps_of(model: nn.Module, call: Callable[..., Any], batches: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    found = []
    for x in batches:
        call(x).square().sum().backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning", "ignore::fxremat.GraphBreakWarning")
@pytest.mark.parametrize("door", ["sample", "first call", "torch"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_aot_eager_trains_is_trained(name: str, door: str):
    build, make = UNUSUAL[name]
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = build(), [make() for _ in range(3)]
        if not ours:
            call = torch.compile(model, backend="aot_eager")
        elif door == "torch":
            call = torch.compile(model, backend="fxremat", options={"budget": 1.0})
        else:
            call = fxremat.compile(model, batches[0] if door == "sample" else None, 1.0)
        found.append(steps_of(model, call, batches))
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("door", ["sample", "torch"])
def test_what_cannot_be_planned_says_so(door: str):
    rows = [torch.randn(5, 16), torch.randn(9, 16)]
    model, x = nn.Linear(16, 16), torch.nested.nested_tensor(rows, layout=torch.jagged)
    if door == "torch":
        call = torch.compile(model, backend="fxremat", options={"budget": 1.0})
    else:
        call = fxremat.compile(model, x, 1.0)
    with pytest.warns(fxremat.GraphBreakWarning, match="is a nested tensor"):
        call(x).values().sum().backward()


@pytest.fixture
def mesh() -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no processes")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def spread(mesh: Any, whole: bool) -> tuple[nn.Module, Tensor]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    place = Replicate() if whole else Shard(0)
    for layer in model:
        for name, own in list(layer.named_parameters()):
            spread_out = distribute_tensor(own.detach(), mesh, [place])
            layer.register_parameter(name, nn.Parameter(spread_out))
    return model, distribute_tensor(torch.randn(32, 16), mesh, [Replicate()])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("door", ["sample", "torch"])
def test_spread_tensors_in_one_process_are_planned(mesh: Any, door: str, whole: bool):
    """Inputs and outputs are spread as well as parameters."""
    found: list[list[Tensor]] = []
    for ours in (False, True):
        torch._dynamo.reset()
        model, x = spread(mesh, whole)
        if not ours:
            call = torch.compile(model, backend="aot_eager")
        elif door == "torch":
            call = torch.compile(model, backend="fxremat", options={"budget": 1.0})
        else:
            call = fxremat.compile(model, x, "min")
        for _ in range(2):
            call(x).to_local().square().sum().backward()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
        if ours:
            assert fxremat.plan_of(call).budget_bytes > 0
    assert all(map(torch.equal, *found))


def test_a_model_of_views_says_that_nothing_is_planned():
    call, x = fxremat.compile(Seen(), torch.randn(64, 16), "min"), torch.randn(64, 16)
    with pytest.warns(fxremat.GraphBreakWarning, match="returns only views"):
        call(x).sum().backward()
    assert refused(Seen(), x).endswith("Omit regions='one'")


def test_a_model_without_a_gradient_is_refused():
    def forward(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return layers[0](x).detach()

    with pytest.raises(CaptureError, match="nothing with a gradient"):
        fxremat.compile(Applied(forward, nn.Linear(16, 16)), torch.randn(64, 16), "min")


def test_a_loss_of_spread_outputs_is_measured_in_the_first_steps(mesh: Any):
    """It cannot be tried on dense zeros."""
    model, x = spread(mesh, False)
    call = fxremat.compile(model, x, 1.0, loss=lambda output: output.to_local().square().sum())
    for _ in range(2):
        call(x).to_local().square().sum().backward()
    assert fxremat.plan_of(call).budget_bytes > 0
