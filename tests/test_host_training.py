"""Training with gradients and optimizer state in host memory: bits, peaks, and what is left."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import fxremat
from fxremat import torch_compat
from fxremat.errors import BudgetWarning, HostMemoryError
from fxremat.runtime import arena
from fxremat.runtime.host_tensor import HostTensor
from tests.models.zoo import seeded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

ROWS = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))


def blocks(count: int = 3) -> nn.Module:
    with seeded(0):
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
                for _ in range(count)
            )
        )


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Sparse(nn.Module):
    """Has a parameter whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.table = nn.Embedding(500, 128, sparse=True)
            self.out = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x.abs().mul(100).long().clamp(max=499)).mean(1) + x)


class Pictures(nn.Module):
    """Weights of convolutions in channels_last, batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.inner = nn.Sequential(
                nn.Conv2d(2, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1),
            ).to(memory_format=torch.channels_last)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, 2, 8, 8).to(memory_format=torch.channels_last))


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


Loop = Callable[[Any, nn.Module, Any, int], Tensor]


def trained(
    loop: Loop,
    *,
    host: bool,
    make: Callable[[], nn.Module] = blocks,
    optimizer: Callable[[nn.Module], Any] = adamw,
    budget: Any = "min",
    steps: int = 3,
    **options: Any,
) -> list[Tensor]:
    """What ``steps`` of a loop return, parameters, buffers, gradients and state."""
    torch._dynamo.reset()
    model = make()
    own = optimizer(model)
    memory = fxremat.HostMemory("auto", state="all") if host else False
    compiled = fxremat.compile(
        model, ROWS, budget if host else "1.0", optimizer=own, offload=memory, **options
    )
    results = [loop(compiled, model, own, number).detach() for number in range(steps)]
    tensors = [*results, *model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for one in own if isinstance(own, list) else [own]:
        tensors += [v for state in one.state.values() for v in state.values()]
    return [torch.as_tensor(v).detach().clone().to_dense() for v in tensors]


def plain(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss: Tensor = call(ROWS).square().mean()
    loss.backward()
    for own in optimizer if isinstance(optimizer, list) else [optimizer]:
        own.step()
        own.zero_grad()
    return loss


def clipped(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    call(ROWS).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def accumulated(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    for factor in (1, 2, 3):
        loss = call(factor * ROWS).square().mean() / 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


class Scaled:
    """With a scaled loss."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def __call__(self, call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
        loss = call(ROWS).square().mean() * (float("inf") if number == 1 else 1)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return norm.nan_to_num() + self.scaler.get_scale()


def penalized(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss = call(ROWS).square().mean() + sum(p.square().sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def two_forwards(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss = call(ROWS).square().mean() + call(2 * ROWS).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def retained(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss = call(ROWS).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def by_grad(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss = call(ROWS).square().mean()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    assert not any(isinstance(own, HostTensor) for own in gradients)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return loss


def hooked(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    if not number:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
    return unstepped(call, model, optimizer, number)


def unstepped(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    """Steps first, so that gradients are left at the end."""
    optimizer.step()
    optimizer.zero_grad()
    call(ROWS).square().mean().backward()
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])


def after_accumulation(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    """The optimizers step in the backward."""
    if not number:
        for parameter, own in zip(model.parameters(), optimizer, strict=True):

            def step(leaf: Tensor, own: Any = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    loss = call(ROWS).square().mean()
    loss.backward()
    return loss


def kept(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    """The loop keeps all gradients of the steps before."""
    before = getattr(model, "kept", [])
    call(ROWS).square().mean().backward()
    model.kept = [*before, *(p.grad for p in model.parameters())]
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([own.sum() for own in model.kept])


def of_other_sizes(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
    loss = call(ROWS[: 8 * (number + 1)]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


LOOPS: dict[str, tuple[Callable[[], Loop], dict[str, Any]]] = {
    "plain": (lambda: plain, {}),
    "clipped": (lambda: clipped, {}),
    "accumulated": (lambda: accumulated, {"accumulate": True}),
    "accumulated, not said so": (lambda: accumulated, {"budget": "3 MiB"}),
    "scaled": (Scaled, {}),
    "penalized": (lambda: penalized, {}),
    "two forwards": (lambda: two_forwards, {"in_flight": 2}),
    "retained": (lambda: retained, {}),
    "by autograd.grad": (lambda: by_grad, {}),
    "hooked": (lambda: hooked, {}),
    "unstepped": (lambda: unstepped, {}),
    "kept": (lambda: kept, {}),
    "of other sizes": (lambda: of_other_sizes, {"dynamic": True}),
    "tied": (lambda: plain, {"make": Tied}),
    "pictures": (lambda: unstepped, {"make": Pictures}),
    "sparse": (
        lambda: unstepped,
        {"make": Sparse, "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)},
    ),
    "two optimizers": (
        lambda: plain,
        {
            "optimizer": lambda m: [
                torch.optim.AdamW([p for p in m.parameters() if p.dim() > 1], fused=True),
                torch.optim.SGD([p for p in m.parameters() if p.dim() < 2], 0.1, momentum=0.9),
            ]
        },
    ),
    "in the backward": (
        lambda: after_accumulation,
        {"optimizer": lambda m: [torch.optim.AdamW([p], lr=1e-3) for p in m.parameters()]},
    ),
}


@pytest.mark.filterwarnings("ignore::fxremat.errors.BudgetWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_the_bits_are_those_of_everything_on_the_device(name: str):
    make_loop, options = LOOPS[name]
    on_device = trained(make_loop(), host=False, **options)
    in_host_memory = trained(make_loop(), host=True, **options)
    assert len(on_device) == len(in_host_memory)
    for one, other in zip(on_device, in_host_memory, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("budget", ["min", 0.5, 0.8])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_the_peak_of_steps_and_of_the_optimizer_is_within_the_budget(
    budget: Any, options: dict[str, bool]
):
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    memory = fxremat.HostMemory("auto", state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        call = fxremat.compile(model, ROWS, budget, optimizer=optimizer, offload=memory)
        training = call._training
        budget_bytes = training.loop.budget.nbytes
        for _ in range(4):
            held = sum(
                torch_compat.storages_on(
                    torch.device("cpu"), [*training.loop.held_tensors(), ROWS]
                ).values()
            )
            with torch_compat.AllocationLog() as log:
                loss = call(ROWS).square().mean()
                loss.backward()
                del loss
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            assert held + log.peak_bytes <= budget_bytes


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("views", [True, False])
def test_gradients_that_processes_exchange_stay_on_the_device(views: bool):
    def wrapped() -> nn.Module:
        wrapper = nn.parallel.DistributedDataParallel
        return wrapper(blocks(), gradient_as_bucket_view=views)

    def checked(call: Any, model: nn.Module, optimizer: Any, number: int) -> Tensor:
        norms = unstepped(call, model, optimizer, number)
        assert not any(isinstance(p.grad, HostTensor) for p in model.parameters())
        return norms

    hosted = trained(checked, host=True, make=wrapped)
    for one, other in zip(trained(checked, host=False, make=wrapped), hosted, strict=True):
        assert torch.equal(one, other)


def test_what_fits_costs_nothing_and_is_left_as_it_is():
    model = blocks()
    optimizer = adamw(model)
    memory = fxremat.HostMemory("auto", state=True)
    call = fxremat.compile(model, ROWS, "1 GiB", optimizer=optimizer, offload=memory)
    for number in range(2):
        plain(call, model, optimizer, number)
        unstepped(call, model, optimizer, number)
    assert "step" not in vars(optimizer)
    assert not any(isinstance(p.grad, HostTensor) for p in model.parameters())
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_nothing_is_left_when_the_compiled_module_is_gone():
    model = blocks()
    optimizer = adamw(model)
    memory = fxremat.HostMemory("auto", state="all")
    call = fxremat.compile(model, ROWS, "min", optimizer=optimizer, offload=memory)
    plain(call, model, optimizer, 0)
    hosting = weakref.ref(call._training.loop.hosting)
    assert "step" in vars(optimizer)
    del call
    gc.collect()
    assert "step" not in vars(optimizer)
    assert hosting() is None
    values = [v for state in optimizer.state.values() for v in state.values()]
    assert not any(isinstance(v, HostTensor) for v in values)


def test_host_memory_that_cannot_be_allocated_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model = blocks()
    optimizer = adamw(model)
    plain(model, model, optimizer, 0)

    def refuse(nbytes: int, *, folder: str) -> None:
        raise HostMemoryError(f"no {nbytes} bytes in {folder}", asked_bytes=nbytes, code="FXR711")

    monkeypatch.setattr(arena, "file_memory", refuse)
    memory = fxremat.HostMemory("auto", state="all")
    with pytest.raises(HostMemoryError):
        fxremat.compile(model, ROWS, "min", optimizer=optimizer, offload=memory)
    assert "step" not in vars(optimizer)
    values = [v for state in optimizer.state.values() for v in state.values()]
    assert not any(isinstance(v, HostTensor) for v in values)
    plain(model, model, optimizer, 0)


def partly_frozen() -> nn.Module:
    model = blocks(4)
    for own in (model[0][2], model[1]):
        own.requires_grad_(False)
    return model


@pytest.mark.parametrize("parameters", [False, True, "all"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("limit_kib", [400, 1300, 2500])
@pytest.mark.parametrize("budget", ["min", 0.5])
def test_all_that_is_in_host_memory_keeps_to_the_limit_together(
    budget: Any, limit_kib: int, state: Any, parameters: Any
):
    """Parameters, gradients, optimizer state and activations."""
    model = partly_frozen()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    memory = fxremat.HostMemory("auto", limit=limit_kib << 10, state=state, parameters=parameters)
    rows = ROWS.repeat(16, 1)
    options: dict[str, Any] = {"optimizer": optimizer, "loss": lambda y: y.square().mean()}
    try:
        call = fxremat.compile(model, rows, budget, offload=memory, **options)
    except fxremat.BudgetError:
        assert budget != "min"
        return
    for _ in range(2):
        call(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    host = call._training.loop.host
    assert host.allocated_bytes <= limit_kib << 10
    if limit_kib == 2500 and budget == "min":
        assert host.allocated_bytes


class Broken(nn.Module):
    """Is captured as two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = blocks(2), blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_host_memory_is_nothing_that_a_loop_holds_outside_a_model_of_several_graphs():
    model = Broken()
    optimizer = adamw(model)
    memory = fxremat.HostMemory("auto", state="all")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", BudgetWarning)
        options: dict[str, Any] = {"optimizer": optimizer, "loss": torch.sum, "offload": memory}
        call = fxremat.compile(model, ROWS, "min", **options)
        for _ in range(6):
            call(ROWS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert call._training.loop.hosting.space.allocated_bytes
    assert not [own for own in warned if "outside the model" in str(own.message)]
