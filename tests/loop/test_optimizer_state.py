"""State of optimizers before it exists, and of which parameters it is counted."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fxremat
from fxremat.loop import optimizer_state
from fxremat.loop.optimizer_state import counted_state, optimizer_bytes

MODEL = nn.Linear(100, 50)


def state_bytes(optimizer, model) -> tuple[int, ...]:
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return counted_state(optimizer_bytes(optimizers, model), model, None)


def real_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the state takes after a real step."""
    for parameter in MODEL.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    MODEL.zero_grad()
    states = optimizer.state.values()
    return sum(t.nbytes for s in states for t in s.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_the_state_of_an_optimizer(kind, options):
    optimizer = kind(MODEL.parameters(), **options)
    fresh = not optimizer.state
    found = sum(state_bytes(optimizer, MODEL))
    assert fresh == (not optimizer.state), "the trial leaves no state behind"
    assert found == real_state_bytes(kind(MODEL.parameters(), **options))


def test_a_class_stands_for_its_defaults():
    assert sum(state_bytes(torch.optim.AdamW, MODEL)) == real_state_bytes(
        torch.optim.AdamW(MODEL.parameters())
    )
    assert state_bytes([], MODEL) == ()


def test_each_tensor_of_the_state_rounds_up_for_itself(monkeypatch: pytest.MonkeyPatch):
    weight, bias = MODEL.weight.nbytes, MODEL.bias.nbytes
    whole = state_bytes(torch.optim.Adam, MODEL)
    assert sorted(whole) == sorted([weight, weight, bias, bias, 4, 4])
    monkeypatch.setattr(optimizer_state, "allocated_bytes", lambda n, _device: -(-n // 512) * 512)
    assert weight % 512, "nothing would be rounded"
    assert bias < 256, "two would fit where one does"
    rounded = state_bytes(torch.optim.Adam, MODEL)
    assert sorted(rounded) == [512] * 4 + [-(-weight // 512) * 512] * 2


class Counting(torch.optim.Optimizer):
    """Keeps its count of steps, and a number more, on a device of their own."""

    def __init__(self, parameters, device: str):
        super().__init__(parameters, {"device": device})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = torch.ones((), device=group["device"])
                state["scale"] = torch.ones(3, device=group["device"])
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float64)


def test_what_lies_on_another_device_is_not_counted():
    means = [2 * p.nbytes for p in MODEL.parameters()]
    assert sorted(state_bytes(Counting(MODEL.parameters(), "meta"), MODEL)) == sorted(means)
    here = state_bytes(Counting(MODEL.parameters(), "cpu"), MODEL)
    assert sorted(here) == sorted([*means, 4, 4, 12, 12])


def test_state_of_a_parameters_dtype_is_found_in_that_dtype():
    model = nn.Linear(100, 50, dtype=torch.bfloat16)
    groups = [{"params": list(model.parameters())}, {"params": list(MODEL.parameters())}]
    found = state_bytes(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model)
    assert sorted(found) == sorted([p.nbytes for g in groups for p in g["params"]])


def test_each_group_has_its_own_options():
    groups = [
        {"params": [MODEL.weight], "momentum": 0.9},
        {"params": [MODEL.bias], "momentum": 0.0},
    ]
    assert state_bytes(torch.optim.SGD(groups, lr=0.1), MODEL) == (MODEL.weight.nbytes,)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(TypeError, match=r"LBFGS.*reserve="):
        state_bytes(torch.optim.LBFGS(MODEL.parameters()), MODEL)


@pytest.mark.parametrize("size", [(300, 700), (500, 500), (40, 30, 60), (70_000,)])
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.AdamW, torch.optim.Muon])
def test_state_follows_the_shape_of_a_parameter(kind, size):
    """Of a stand-in of other sizes: factored state has a row and a column for a matrix."""
    if kind is torch.optim.Muon and len(size) != 2:
        pytest.skip("of matrices alone")
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = kind([parameter], lr=0.1)
    (found,) = optimizer_bytes([optimizer], nn.ParameterList([parameter])).values()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = [t.nbytes for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
    assert sorted(found) == sorted(made)


def test_state_that_exists_is_what_it_is():
    optimizer = torch.optim.Adam(MODEL.parameters())
    for parameter in MODEL.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    MODEL.zero_grad()
    optimizer.state[MODEL.weight]["more"] = torch.zeros(1000)
    assert 4000 in state_bytes(optimizer, MODEL)


def test_optimizers_of_several_parts_add_up():
    matrices, others = torch.optim.SGD([MODEL.weight], 0.1, momentum=0.9), torch.optim.AdamW
    other = others([MODEL.bias])
    both = state_bytes([matrices, other], MODEL)
    assert sorted(both) == sorted([*state_bytes(matrices, MODEL), *state_bytes(other, MODEL)])


def test_a_parameter_without_a_gradient_keeps_no_state():
    state = optimizer_bytes([torch.optim.AdamW], MODEL)
    assert counted_state(state, MODEL, [MODEL.bias]) == state[id(MODEL.bias)]


class Twice(torch.optim.Adam):
    """Its step makes one of its base class."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, Twice])
def test_a_trial_step_is_seen_by_nobody(kind: Any):
    """Hooks of all optimizers and of this one, a scheduler's count of steps, a profiler."""
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[object] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    before = copy.deepcopy((scheduler.state_dict(), [*vars(optimizer)]))
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert state_bytes(optimizer, model)
        assert not seen
        assert (scheduler.state_dict(), [*vars(optimizer)]) == before
        assert not optimizer.state
        if kind is not Twice:
            assert not [e for e in profile.events() if e.name.startswith("Optimizer.step")]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert {*seen} == {"before any", "before", "after", "after any"}
    finally:
        for handle in handles:
            handle.remove()


def test_other_threads_are_heard_during_a_trial_step():
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    seen: list[object] = []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            thread = threading.Thread(target=other.step)
            thread.start()
            thread.join()
            return super().step(closure)

    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        state_bytes(Slow(MODEL.parameters(), 0.1, momentum=0.9), MODEL)
        assert seen and {id(optimizer) for optimizer in seen} == {id(other)}
    finally:
        handle.remove()


class Blockwise(torch.optim.Optimizer):
    """Has attributes; its state is in blocks of so many elements, with a table for all of them."""

    def __init__(self, parameters: Any, block: int) -> None:
        super().__init__(parameters, {})
        self.block, self.calls = block, [0]
        self.table = torch.arange(256.0)

    def step(self, closure: Any = None) -> Any:
        self.calls[0] += 1
        self.table += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    blocked = parameter.numel() >= 4096 and parameter.numel() % self.block == 0
                    kind = torch.uint8 if blocked else torch.float32
                    blocks = parameter.numel() // self.block if blocked else 0
                    self.state[parameter] = {
                        "codes": torch.zeros_like(parameter, dtype=kind),
                        "scales": torch.zeros(blocks),
                        "table": self.table,
                    }


@pytest.mark.parametrize("size", [(512, 512), (64, 64), (5, 5), (65_536,), (128, 64, 3, 3)])
def test_state_in_blocks_is_measured_without_a_trace(size: tuple[int, ...]):
    parameter = nn.Parameter(torch.zeros(size))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Blockwise([parameter], block=256)
    (found,) = optimizer_bytes([optimizer], nn.ParameterList([parameter])).values()
    assert optimizer.calls == [0] and torch.equal(optimizer.table, torch.arange(256.0))
    assert parameter.grad is not None and not optimizer.state
    optimizer.step()
    assert sorted(found) == sorted(t.nbytes for t in optimizer.state[parameter].values())


def test_an_optimizer_that_wraps_another_is_refused():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return self.inner.step()

    with pytest.raises(fxremat.ArgumentError, match=r"Lookahead wraps a SGD.*reserve="):
        state_bytes(Lookahead(torch.optim.SGD(MODEL.parameters(), 0.1)), MODEL)
