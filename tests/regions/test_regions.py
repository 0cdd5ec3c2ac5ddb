"""A model that is captured in pieces: one budget for all of them."""

from __future__ import annotations

import copy
import functools
import gc
import linecache
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxremat
from examples.long_context import draw, loss_of, make_model
from fxremat.errors import (
    ArgumentError,
    BudgetError,
    BudgetWarning,
    CaptureError,
    GraphBreakWarning,
)
from fxremat.module.backend import _trainings
from tests.models.zoo import seeded

LAYERS, ROWS, WIDTH = 12, 256, 64

LEARNED = 3
"""Steps after which plans are chosen together: captured, watched, planned."""

WHOLE = 100 << 20
"""More than a step takes."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Layers, and what comes between some of them.

    Args:
        code: of the forward, where it is none that loops over the layers.
    """

    def __init__(self, code: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)
        self.code = code
        names: dict[str, Any] = {"torch": torch}
        if code:
            exec(compile(code, BROKEN, "exec"), names)
        self.body: Callable[[Any, Tensor], Tensor] = names.get("body", looping)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.layers, x)).square().mean()


BROKEN = "broken model"
"""Stands for the file of a forward that is made up."""


def looping(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def looping_with_breaks(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        torch._dynamo.graph_break()
        x = layer(x)
    return x


def broken(places: Sequence[int]) -> str:
    """Code that breaks the graph before some layers."""
    lines = ["def body(layers, x):"]
    for place in range(LAYERS):
        lines += ["    torch._dynamo.graph_break()"] if place in places else []
        lines.append(f"    x = layers[{place}](x)")
    return "\n".join([*lines, "    return x"]) + "\n"


BREAKS = {1: (6,), 4: (2, 4, 7, 10), 12: tuple(range(LAYERS))}


@pytest.fixture(autouse=True)
def _captured_anew(quick_search: None) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    linecache.cache.pop(BROKEN, None)
    gc.collect()


def made(code: str = "") -> tuple[Model, Tensor]:
    with seeded(0):
        return Model(code), torch.randn(ROWS, WIDTH)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Of a step whose masks are always the same ones."""
    model.zero_grad(set_to_none=True)
    with seeded(1):
        call(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def peak_of(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> int:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        call(x).backward()

    model.zero_grad(set_to_none=True)
    return fxremat.measure_step(model, step).peak_bytes


def taught(
    model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor
) -> list[warnings.WarningMessage]:
    """Steps until plans are chosen together; the warnings of the one after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)  # of the first ones
        for _ in range(LEARNED):
            gradients(model, call, x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            gradients(model, call, x)
    return told


@functools.cache
def whole() -> tuple[list[Tensor], int, int]:
    """Gradients of the model captured as one, its peak with all kept and its least budget."""
    model, x = made()
    compiled = fxremat.compile(model, x, WHOLE, loss=lambda out: out, assume="strict")
    found = gradients(model, compiled, x)
    torch._dynamo.reset()
    return found, compiled.plan.baseline_peak_bytes, compiled.plan.least_budget_bytes


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(12, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("share", [pytest.param(0.8, marks=pytest.mark.slow), 0.5])
def test_breaks_keep_to_the_budget_with_the_same_bits(count: int, share: float) -> None:
    expected, full_bytes, least_bytes = whole()
    budget = least_bytes + int(share * (full_bytes - least_bytes))
    model, x = made(broken(BREAKS[count]))
    compiled = fxremat.compile(model, x, budget)
    first = gradients(model, compiled, x)
    told = taught(model, compiled, x)
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, gradients(model, compiled, x), expected))
    assert 0.9 * budget < peak_of(model, compiled, x) <= budget
    (warned,) = told
    assert warned.category is GraphBreakWarning
    _, *lines = str(warned.message).splitlines()
    found = {int(n) for line in lines for n in re.findall(f"{BROKEN}:([0-9]+)", line)}
    assert len(found) >= len(set(BREAKS[count]) - {0})


def test_a_loop_that_breaks_is_planned_layer_by_layer() -> None:
    expected, full_bytes, _ = whole()
    model, x = made()

    model.body = looping_with_breaks
    budget = int(0.6 * full_bytes)
    compiled = fxremat.compile(model, x, budget)
    taught(model, compiled, x)
    assert all(map(torch.equal, gradients(model, compiled, x), expected))
    assert peak_of(model, compiled, x) <= budget


@pytest.mark.parametrize(
    "budget",
    [pytest.param(1.0, marks=pytest.mark.slow), 0.5, pytest.param("min", marks=pytest.mark.slow)],
)
def test_named_modules_are_captured_once_for_all_that_are_alike(budget: float | str) -> None:
    expected, full_bytes, _ = whole()
    model, x = made()
    names = [f"layers.{place}" for place in range(LAYERS)]
    compiled = fxremat.compile(model, x, budget, regions=names)
    told = taught(model, compiled, x)
    assert not [one for one in told if one.category is GraphBreakWarning]  # it was asked for
    assert len({plan.origin.operations for plan in compiled.plans if plan.origin}) <= 3
    assert all(map(torch.equal, gradients(model, compiled, x), expected))
    peak = peak_of(model, compiled, x)
    assert peak <= compiled.plan.budget_bytes
    if isinstance(budget, float):
        assert abs(compiled.plan.budget_bytes / (budget * full_bytes) - 1) < 0.02


@pytest.mark.slow
def test_a_budget_below_the_least_tells_what_would_do() -> None:
    """First for a region, before any has run, then for the step."""
    named = [1 << 20]
    for _ in range(2):
        torch._dynamo.reset()
        model, x = made(broken((6,)))
        compiled = fxremat.compile(model, x, named[-1], strict=True)
        with pytest.raises(BudgetError) as caught, warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            for _ in range(LEARNED + 1):  # what one step has shown, another confirms
                gradients(model, compiled, x)
        assert caught.value.least_budget_bytes is not None
        assert caught.value.least_budget_bytes > named[-1]
        named.append(caught.value.least_budget_bytes)
    torch._dynamo.reset()
    model, x = made(broken((6,)))
    compiled = fxremat.compile(model, x, named[-1], strict=True)
    taught(model, compiled, x)
    assert peak_of(model, compiled, x) <= named[-1]


class Repeated(nn.Module):
    """What comes after the break is as large as it is asked to be."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.times = nn.Linear(64, 256), nn.Linear(256, 64), 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        torch._dynamo.graph_break()
        return self.down(x.repeat(self.times, 1)).sin()


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_does_not_fit_leaves_those_that_begin_alike(strict: bool) -> None:
    model, x = Repeated(), torch.randn(128, 64)
    compiled = fxremat.compile(
        model, budget="2 MiB", effort=fxremat.Effort(forms=("norms",)), strict=strict
    )
    found: dict[int, list[bool]] = {1: [], 40: []}
    for times in (40, 40, 40, 40, 40, 1, 1, 1, 1, 40, 1):
        model.times = times
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                gradients(model, lambda x: compiled(x).sum(), x)
                refused = False
            except BudgetError:
                refused = True
        found[times].append(refused or any(w.category is BudgetWarning for w in told))
        assert not refused or (strict and times == 40)
    assert found == {1: [False] * 5, 40: [True] * 6}
    assert refused is False and peak_of(model, lambda x: compiled(x).sum(), x) <= 2 << 20


@torch.compiler.allow_in_graph
def failing(x: Tensor) -> Tensor:
    """Cannot be captured as long as it fails, though Dynamo takes it."""
    if failing.fails and isinstance(x, FunctionalTensor):  # type: ignore[attr-defined]
        raise ValueError("not now")
    return x.sin()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        torch._dynamo.graph_break()
        return self.down(failing(x)).sum()


def test_what_cannot_be_captured_in_a_step_ends_it() -> None:
    """Its first graphs are no calls of the next step, whoever keeps the error."""
    failing.fails = True  # type: ignore[attr-defined]
    model, x = Failing(), torch.randn(128, 64)
    options: dict[str, Any] = {"budget": "64 MiB"}
    compiled = torch.compile(model, backend="fxremat", options=options)
    with pytest.raises(Exception, match="not now") as caught:
        compiled(x)
    failing.fails = False  # type: ignore[attr-defined]
    regions = _trainings[id(options)].regions
    before = regions.steps
    gradients(model, compiled, x)
    assert regions.steps == before + 1
    assert caught.value is not None


class Sections(nn.Module):
    """Splits into as many sections as a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, sections: Tensor) -> Tensor:
        split = torch.tensor_split(self.layer(x), sections)
        return torch.stack([part.tanh().sum() for part in split]).logsumexp(0)


@pytest.mark.parametrize("sections", [torch.tensor(3), torch.tensor([2, 4])])
def test_an_operator_that_reads_numbers_of_a_tensor_runs_as_it_is(sections: Tensor) -> None:
    torch._dynamo.reset()
    model, x = Sections(), torch.randn(7, 8)
    called = fxremat.compile(model, (x, sections), "min", loss="own")
    for _ in range(3):
        expected = torch.autograd.grad(model(x, sections), [*model.parameters()])
        found = torch.autograd.grad(called(x, sections), [*model.parameters()])
        assert all(map(torch.equal, expected, found))
    if sections.dim():  # only the number of parts cannot depend on data
        fxremat.compile(model, (x, sections), "min", loss="own", regions="one")
        return
    with pytest.raises(CaptureError, match=r"(?s)data.*test_regions.py.*tensor_split"):
        fxremat.compile(model, (x, sections), "min", loss="own", regions="one")


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
def test_a_refused_step_that_is_tried_again_needs_no_more() -> None:
    """The outputs that somebody holds are counted once."""
    model, x = Repeated(), torch.randn(1024, 64)
    options = {"budget": "2200 KiB", "strict": True}
    compiled = torch.compile(model, backend="fxremat", options=options)
    held: list[Tensor] = []
    least: list[int | None] = []
    for _ in range(8):
        model.zero_grad()
        try:
            held[:] = [compiled(x)]
            held[0].sum().backward()
        except BudgetError as error:
            least.append(error.least_budget_bytes)
    assert len(least) > 3 and len(set(least[1:])) == 1


@pytest.mark.parametrize("loops", [False, True])
def test_graphs_of_one_backend_share_its_budget(loops: bool) -> None:
    expected, full_bytes, _ = whole()
    model, x = made(broken((3, 8)))
    if loops:
        model.body = looping_with_breaks
    options = {"budget": int(0.6 * full_bytes)}
    compiled = torch.compile(model, backend="fxremat", options=options)
    taught(model, compiled, x)
    assert all(map(torch.equal, gradients(model, compiled, x), expected))
    assert peak_of(model, compiled, x) <= options["budget"]


def test_what_needs_one_graph_says_so() -> None:
    model, x = made(broken((6,)))
    with pytest.raises(CaptureError, match="one graph"):
        fxremat.compile(model, x, 1.0, regions="one")
    with pytest.raises(CaptureError, match="one graph"):
        fxremat.plan(model, x, 1.0)
    plain, _ = made()
    plan = fxremat.plan(plain, x, 1.0)
    with pytest.raises(CaptureError, match="plan="):
        fxremat.compile(model, x, plan=plan)


@pytest.mark.parametrize(
    "regions", ["layers.0", [0], ["layers.99"], 7], ids=["text", "numbers", "unknown", "number"]
)
def test_names_that_are_none_are_refused(regions: Any) -> None:
    model, x = made()
    with pytest.raises(ArgumentError, match="regions"):
        fxremat.compile(model, x, 1.0, regions=regions)


def test_regions_of_one_graph_are_refused() -> None:
    model, x = made()
    with pytest.raises(ArgumentError, match="regions"):
        fxremat.plan(model, x, 1.0, regions=["layers.0"])


def test_optimizers_that_come_later_leave_less_for_regions() -> None:
    """Their state is there from some step on: plans are chosen again."""
    model, x = made()
    names = [f"layers.{place}" for place in range(LAYERS)]
    compiled = fxremat.compile(model, x, 8 << 20, regions=names)
    taught(model, compiled, x)
    before = peak_of(model, compiled, x)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    state_bytes = sum(value.nbytes for own in optimizer.state.values() for value in own.values())
    for _ in range(2):
        gradients(model, compiled, x)
    after = peak_of(model, compiled, x)
    assert before <= 8 << 20
    assert after + state_bytes <= 8 << 20
    assert after < before


def test_a_call_that_raises_ends_its_step() -> None:
    expected, full_bytes, _ = whole()
    model, x = made()
    names = [f"layers.{place}" for place in range(LAYERS)]
    budget = int(0.6 * full_bytes)
    compiled = fxremat.compile(model, x, budget, regions=names)
    taught(model, compiled, x)
    handle = model.layers[7].register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            compiled(x)
    handle.remove()
    taught(model, compiled, x)
    assert all(map(torch.equal, gradients(model, compiled, x), expected))
    assert peak_of(model, compiled, x) <= budget


def test_copies_are_captured_in_pieces_too() -> None:
    expected, full_bytes, _ = whole()
    model, x = made(broken((6,)))
    budget = int(0.7 * full_bytes)
    compiled = fxremat.compile(model, x, budget)
    taught(model, compiled, x)
    copied = copy.deepcopy(compiled)
    taught(copied, copied, x)
    assert all(map(torch.equal, gradients(copied, copied, x), expected))
    assert peak_of(copied, copied, x) <= budget


@pytest.mark.slow
def test_inductors_kernels_in_pieces() -> None:
    model, x = made()
    names = [f"layers.{place}" for place in range(LAYERS)]
    found = []
    for budget in (1.0, 0.75):
        torch._dynamo.reset()
        compiled = fxremat.compile(model, x, budget, regions=names, executor="inductor")
        taught(model, compiled, x)
        found.append(gradients(model, compiled, x))
        assert peak_of(model, compiled, x) <= compiled.plan.budget_bytes
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_layers_of_a_llama_of_transformers() -> None:
    """What leads to them and from them, graphs without gradients among it, is captured as well."""
    batch = draw(64, 0)

    def stepping(**options: Any) -> tuple[nn.Module, Callable[[], None], fxremat.CompiledModule]:
        torch._dynamo.reset()
        model = make_model()
        compiled = fxremat.compile(model, batch, 1.0, loss=loss_of, **options)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            loss_of(compiled(**batch)).backward()

        for _ in range(LEARNED + 2):
            step()
        return model, step, compiled

    alone, _, _ = stepping()
    regions = [f"model.layers.{place}" for place in range(4)]
    model, step, compiled = stepping(regions=regions)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    model.zero_grad(set_to_none=True)
    assert fxremat.measure_step(model, step).peak_bytes <= compiled.plan.budget_bytes


def test_batches_of_other_sizes_where_parameters_are_sharded() -> None:
    """What a hook hands a block may be a view, whose base has a size of its own."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, x = made()
        plain = copy.deepcopy(model)
        for module in (*model.layers, model):  # type: ignore[misc]
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        compiled = fxremat.compile(model, x, 1 << 30)
        for rows in (len(x), len(x), len(x) // 2, len(x), len(x) // 4):
            found = [own.full_tensor() for own in gradients(model, compiled, x[:rows])]  # type: ignore[attr-defined]
            assert all(map(torch.equal, found, gradients(plain, plain, x[:rows])))
        assert len({plan.sizes for plan in compiled.plans}) > 1
    finally:
        distributed.destroy_process_group()


def test_what_needs_one_graph_is_refused_at_once_where_parameters_are_sharded() -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, x = made()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(CaptureError, match="in_flight= requires one"):
            fxremat.compile(model, x, 1 << 30, in_flight=2)
    finally:
        distributed.destroy_process_group()
