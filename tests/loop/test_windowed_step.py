"""Steps of an optimizer for some parameters at a time: same bits, and never a half-done step."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat.errors import ArgumentError, HostMemoryError, TransferError
from fxremat.loop.trial import step_costs
from fxremat.loop.windowed_step import WindowedStep
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_tensor import HostSpace, HostTensor
from tests.moving import failing, intercept_copies

CPU = torch.device("cpu")
Parameters = list[nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 48), (2000,), (4,), (8, 16, 3, 3), (48, 64), ())
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def grouped(own: Parameters) -> list[dict[str, Any]]:
    if len(own) < 5:
        return [{"params": own[:2]}, {"params": own[2:], "lr": 0.01}]
    return [{"params": own[:2]}, {"params": own[2:5], "lr": 0.01}, {"params": own[5:]}]


def gradient_of(parameter: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number * 1000 + parameter.numel())
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


class Rig:
    """Parameters with an optimizer, whose state is in host memory with ``room_bytes``."""

    def __init__(
        self,
        make: Make,
        *,
        hosted: bool = True,
        room_bytes: int | None = None,
        limit_bytes: int | None = None,
        own: Parameters | None = None,
    ) -> None:
        self.parameters = parameters() if own is None else own
        self.optimizer = make(self.parameters)
        self.space = HostSpace(CPU, folder=None, limit=HostLimit(limit_bytes))
        self.hosted = hosted
        self.room_bytes = room_bytes
        self.number = 0
        self.step = self.windowed() if hosted else None

    def windowed(self) -> WindowedStep:
        return WindowedStep(
            self.optimizer,
            space=self.space,
            hosted_bytes=lambda p: 2 * p.nbytes if p.nbytes > 4096 else 0,
            room=lambda: self.room_bytes,
        )

    def gradients(self, *, without: tuple[int, ...] = ()) -> None:
        self.number += 1
        for at, parameter in enumerate(self.parameters):
            parameter.grad = None
            if at not in without:
                made = gradient_of(parameter, self.number)
                parameter.grad = self.space.place(made.nbytes).put(made) if self.hosted else made

    def train(self, steps: int = 1, **options: Any) -> None:
        for _ in range(steps):
            self.gradients(**options)
            self.optimizer.step()

    def snapshot(self) -> list[list[Any]]:
        """Each parameter with its state."""
        return [
            [p.detach().clone(), *map(plain, self.optimizer.state.get(p, {}).values())]
            for p in self.parameters
        ]

    def on_device_bytes(self) -> int:
        values = (v for own in self.optimizer.state.values() for v in own.values())
        return sum(v.nbytes for v in values if isinstance(v, Tensor) and not is_away(v))


def is_away(value: object) -> bool:
    return isinstance(value, HostTensor)


def plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
    return bool(one == other)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda own: optim.SGD(own, lr=0.1),
    "SGD momentum": lambda own: optim.SGD(grouped(own), lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, foreach=True, maximize=True),
    "SGD fused": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, fused=True),
    "Adam amsgrad": lambda own: optim.Adam(grouped(own), amsgrad=True),
    "Adam weight_decay": lambda own: optim.Adam(own, weight_decay=0.1, maximize=True),
    "AdamW": lambda own: optim.AdamW(grouped(own)),
    "AdamW foreach": lambda own: optim.AdamW(grouped(own), foreach=True, amsgrad=True),
    "AdamW fused": lambda own: optim.AdamW(grouped(own), fused=True),
    "AdamW lr in a tensor": lambda own: optim.AdamW(own, lr=torch.tensor(0.01)),
    "Adamax": optim.Adamax,
    "NAdam": lambda own: optim.NAdam(own, foreach=True),
    "RAdam": optim.RAdam,
    "ASGD": lambda own: optim.ASGD(own, t0=1),
    "Rprop": optim.Rprop,
    "RMSprop": lambda own: optim.RMSprop(own, momentum=0.5, centered=True),
    "Adagrad": lambda own: optim.Adagrad(own, initial_accumulator_value=0.1),
    "Adagrad fused": lambda own: optim.Adagrad(own, fused=True),
    "Adadelta": lambda own: optim.Adadelta(own, foreach=True),
    "Adafactor": optim.Adafactor,
    "Muon": lambda own: optim.Muon([own[0], own[4]]),
}
ROOMS = {"one at a time": None, "none": 0, "some": 1 << 17, "all": 1 << 30}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_have_the_bits_of_plain_ones(name: str, room: str):
    make = OPTIMIZERS[name]
    alone, rig = Rig(make, hosted=False), Rig(make, room_bytes=ROOMS[room])
    for number in range(5):
        without = (1, 3) if number == 2 else ()
        alone.train(without=without)
        rig.train(without=without)
        assert same(alone.snapshot(), rig.snapshot())
        pairs = zip(alone.parameters, rig.parameters, strict=True)
        assert all(same(a.grad, b.grad) for a, b in pairs if a.grad is not None)
    large = [s for p, s in rig.optimizer.state.items() if p.nbytes > 4096]
    values = [v for own in large for v in own.values() if isinstance(v, Tensor) and v.nbytes > 4096]
    assert all(map(is_away, values))


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "Muon"])
def test_every_optimizer_of_torch_that_steps_each_parameter_is_accepted(name: str):
    optimizer = OPTIMIZERS[name](parameters())
    before = torch.random.get_rng_state()
    costs = step_costs(optimizer)
    assert costs.seconds > 0
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(not s or name.startswith("Adagrad") for s in optimizer.state.values())


def test_bfloat16_and_one_dtype_a_group():
    def make(own: Parameters) -> torch.optim.Optimizer:
        return optim.AdamW(grouped(own), foreach=True)

    def own() -> Parameters:
        half = parameters(torch.bfloat16)
        return [*half[:2], *parameters()[2:5], half[5]]

    alone, rig = Rig(make, hosted=False, own=own()), Rig(make, own=own())
    alone.train(4)
    rig.train(4)
    assert same(alone.snapshot(), rig.snapshot())


def test_a_step_has_one_window_on_the_device():
    """And with more room as much as that allows."""
    seen: list[int] = []

    class Watching(optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            values = [v for own in self.state.values() for v in own.values()]
            grads = [p.grad for p in rig.parameters]
            on_device = [v for v in (*values, *grads) if isinstance(v, Tensor) and not is_away(v)]
            seen.append(sum(v.nbytes for v in on_device if v.nbytes > 4096))
            return super().step(closure)

    rig = Rig(Watching)
    rig.train(2)
    sizes = [p.nbytes for p in rig.parameters if p.nbytes > 4096]
    assert max(seen) <= 2 * 3 * max(sizes)
    assert len(seen) == 2 * len(rig.parameters)
    rig.room_bytes = 1 << 30
    seen.clear()
    rig.train()
    assert seen == [3 * sum(sizes)]


def test_closures_hooks_and_schedulers():
    def trained(*, hosted: bool) -> list[Any]:
        rig = Rig(lambda own: optim.AdamW(grouped(own)), hosted=False)
        early = optim.lr_scheduler.StepLR(rig.optimizer, 1, gamma=0.5)
        ran: list[str] = []
        rig.optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
        if hosted:
            rig.hosted, rig.step = True, rig.windowed()
        rig.optimizer.register_step_post_hook(lambda *_: ran.append("post"))
        late = optim.lr_scheduler.LambdaLR(rig.optimizer, lambda epoch: 0.9**epoch)

        def closure() -> Tensor:
            assert torch.is_grad_enabled()
            ran.append("closure")
            rig.gradients()
            return torch.tensor(float(rig.number))

        losses = []
        for _ in range(3):
            losses.append(rig.optimizer.step(closure))
            early.step()
            late.step()
        return [losses, ran, early.get_last_lr(), rig.snapshot()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(trained(hosted=True), trained(hosted=False))


@pytest.mark.parametrize("hosted", [True, False])
def test_a_scheduler_that_steps_first_warns_as_before(hosted: bool):
    rig = Rig(optim.AdamW, hosted=hosted)
    scheduler = optim.lr_scheduler.StepLR(rig.optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_group_may_be_added():
    def trained(*, hosted: bool) -> list[Any]:
        own = parameters()
        rig = Rig(lambda own: optim.AdamW(own[:4]), hosted=hosted, own=own)
        rig.train(2)
        rig.optimizer.add_param_group({"params": own[4:], "lr": 0.1})
        rig.train(2)
        return rig.snapshot()

    assert same(trained(hosted=True), trained(hosted=False))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_state_dict_is_loaded_with_and_without(first: bool, second: bool):
    make = OPTIMIZERS["Adam amsgrad"]
    rig = Rig(make, hosted=first)
    rig.train(3)
    saved = copy.deepcopy(rig.optimizer.state_dict())
    values = [v for own in saved["state"].values() for v in own.values()]
    assert not any(map(is_away, values))
    resumed = Rig(make, hosted=second)
    resumed.train(2)
    resumed.optimizer.load_state_dict(saved)
    for mine, other in zip(resumed.parameters, rig.parameters, strict=True):
        mine.data.copy_(other.data)
    assert same(resumed.snapshot(), rig.snapshot())
    if second:
        assert resumed.on_device_bytes() <= 4 * 4096
    resumed.number = rig.number
    rig.train(2)
    resumed.train(2)
    assert same(resumed.snapshot(), rig.snapshot())


def test_loading_again_and_again_takes_no_more_host_memory_and_keeps_the_dict():
    rig = Rig(OPTIMIZERS["AdamW"])
    rig.train(2)
    saved = rig.optimizer.state_dict()
    before, kept = rig.space.allocated_bytes, copy.deepcopy(saved)
    for _ in range(5):
        rig.optimizer.load_state_dict(saved)
        rig.train()
    assert rig.space.allocated_bytes == before
    for number, entries in kept["state"].items():
        large = [(name, v) for name, v in entries.items() if v.nbytes > 4096]
        assert all(torch.equal(saved["state"][number][name], v) for name, v in large)


def test_a_state_dict_of_another_optimizer_is_torchs_error_and_changes_nothing():
    rig = Rig(OPTIMIZERS["AdamW"])
    rig.train(2)
    before = rig.snapshot()
    other = optim.AdamW(parameters()[:2])
    with pytest.raises(ValueError, match="number of parameter groups"):
        rig.optimizer.load_state_dict(other.state_dict())
    assert same(before, rig.snapshot())


def test_everything_is_as_before_when_it_is_removed():
    rig, alone = (Rig(OPTIMIZERS["AdamW"], hosted=hosted) for hosted in (True, False))
    for own in (rig, alone):
        own.train(2)
    assert rig.step is not None
    rig.step.remove()
    assert "step" not in vars(rig.optimizer)
    assert not any(is_away(v) for own in rig.optimizer.state.values() for v in own.values())
    assert not rig.optimizer._optimizer_state_dict_post_hooks
    assert not rig.optimizer._optimizer_load_state_dict_pre_hooks
    assert not rig.optimizer._optimizer_load_state_dict_post_hooks
    for own in (rig, alone):
        own.train(2)  # with gradients in host memory still
    assert same(rig.snapshot(), alone.snapshot())


def test_neither_keeps_the_other_alive():
    rig = Rig(OPTIMIZERS["AdamW"])
    rig.train()
    optimizer, step = weakref.ref(rig.optimizer), weakref.ref(rig.step)
    rig.step = None
    gc.collect()
    assert step() is None
    rig.train()  # by the optimizer's own code
    del rig
    gc.collect()
    assert optimizer() is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_second_one_for_the_same_optimizer(order: tuple[int, int]):
    """As when a model is compiled again before the first one is gone."""
    rig, alone = (Rig(OPTIMIZERS["AdamW"], hosted=hosted) for hosted in (True, False))
    steps = [rig.step, rig.windowed()]
    rig.step = None
    for at in order:
        for own in (rig, alone):
            own.train(2)
        assert same(rig.snapshot(), alone.snapshot())
        step = steps[at]
        assert step is not None
        step.remove()
        steps[at] = step = None
    for own in (rig, alone):
        own.train(2)
    assert same(rig.snapshot(), alone.snapshot())
    assert not any(is_away(v) for own in rig.optimizer.state.values() for v in own.values())
    assert "step" not in vars(rig.optimizer)


def test_one_optimizer_of_two_models_has_both_states_in_host_memory():
    alone = Rig(OPTIMIZERS["AdamW"], hosted=False)
    rig = Rig(OPTIMIZERS["AdamW"], hosted=False)
    rig.hosted = True
    halves = [{id(p) for p in rig.parameters[:3]}, {id(p) for p in rig.parameters[3:]}]
    steps = [
        WindowedStep(
            rig.optimizer,
            space=rig.space,
            hosted_bytes=lambda p, own=half: 2 * p.nbytes if id(p) in own else 0,
        )
        for half in halves
    ]
    rig.train(3)
    alone.train(3)
    assert same(rig.snapshot(), alone.snapshot())
    assert rig.on_device_bytes() <= 6 * 4096
    assert len(steps) == 2


# Faults: each point of a step.


class AtOperator(TorchDispatchMode):
    """Calls a function before one operator of those that run inside."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__()
        self.number, self.act = number, act
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            self.act()
        return func(*args, **(kwargs or {}))


class WrongError(Exception):
    """Of the user's own."""


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def few() -> Parameters:
    own = parameters()
    return [own[2], own[0], own[4]]


def reference(
    make: Make, steps: int, own: Callable[[], Parameters] = few
) -> tuple[list[list[Any]], list[list[Any]]]:
    alone = Rig(make, hosted=False, own=own())
    alone.train(steps)
    before = alone.snapshot()
    alone.train()
    return before, alone.snapshot()


def none_is_between(rig: Rig, before: list[list[Any]], after: list[list[Any]]) -> int:
    """Check it; return how many parameters are after the step."""
    now = rig.snapshot()
    is_after = [same(own, mine) for own, mine in zip(now, after, strict=True)]
    is_before = [same(own, mine) for own, mine in zip(now, before, strict=True)]
    assert all(a or b for a, b in zip(is_after, is_before, strict=True))
    return sum(is_after)


FAULTY = {
    "one at a time": ("AdamW", None, 2),
    "the first step": ("AdamW", None, 0),
    "no room": ("Adam amsgrad", 0, 2),
    "several foreach": ("AdamW foreach", 1 << 17, 1),
    "all fused": ("AdamW fused", 1 << 30, 1),
    "momentum": ("SGD momentum", 1 << 17, 0),
}


@pytest.mark.parametrize("times", [1, 1 << 30])
@pytest.mark.parametrize("case", FAULTY)
def test_a_copy_that_fails_at_each_point(case: str, times: int):
    name, room_bytes, steps = FAULTY[case]
    make = OPTIMIZERS[name]
    before, after = reference(make, steps)
    point, raised, stepped = 0, 0, set()
    while True:
        rig = Rig(make, room_bytes=room_bytes, own=few())
        rig.train(steps)
        rig.gradients()
        made: list[int] = []
        with breaking(made, after=point, times=times):
            try:
                rig.optimizer.step()
            except TransferError as error:
                raised += 1
                assert error.__notes__
        stepped.add(none_is_between(rig, before, after))
        if times > 1 and made[0] > point:
            rig.optimizer.step()
        assert same(rig.snapshot(), after)
        assert rig.on_device_bytes() <= 4 * 4096
        if made[0] <= point:
            break
        point += 1
    assert point >= 4
    assert raised == (0 if times == 1 else point)
    assert times == 1 or len(stepped) > 1


@contextlib.contextmanager
def breaking(made: list[int], *, after: int, times: int) -> Iterator[None]:
    """``times`` copies from number ``after`` on raise; ``made`` counts all."""
    made[:] = [0]

    def act(copy: Callable[[], None]) -> None:
        made[0] += 1
        if after < made[0] <= after + times:
            raise RuntimeError("broken")
        copy()

    with intercept_copies(act):
        yield


@pytest.mark.parametrize("error", [WrongError("mine"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("case", FAULTY)
def test_an_error_at_each_operator_of_the_optimizer(case: str, error: BaseException):
    name, room_bytes, steps = FAULTY[case]
    make = OPTIMIZERS[name]
    before, after = reference(make, steps)
    number = 1
    while True:
        rig = Rig(make, room_bytes=room_bytes, own=few())
        rig.train(steps)
        rig.gradients()
        with AtOperator(number, raising(type(error)(*error.args))) as mode:
            try:
                rig.optimizer.step()
            except type(error) as caught:
                assert error.args == caught.args
        stepped = none_is_between(rig, before, after)
        if mode.count < number:
            break
        if stepped < len(rig.parameters):
            rig.optimizer.step()
        assert same(rig.snapshot(), after), number
        number += 1
    assert number > 10


@pytest.mark.parametrize("case", FAULTY)
def test_an_interrupt_at_each_operator_takes_effect_after_the_step(case: str):
    name, room_bytes, steps = FAULTY[case]
    make = OPTIMIZERS[name]
    before, after = reference(make, steps)
    number = 1
    while True:
        rig = Rig(make, room_bytes=room_bytes, own=few())
        rig.train(steps)
        rig.gradients()
        with AtOperator(number, interrupt) as mode:
            try:
                rig.optimizer.step()
            except KeyboardInterrupt:
                pass
            else:
                assert mode.count < number
        assert none_is_between(rig, before, after) in (0, len(rig.parameters))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if mode.count < number:
            break
        number += 1
    assert number > 10


def failed_halfway(make: Make) -> Rig:
    rig = Rig(make)
    rig.train(2)
    rig.gradients()
    with failing(RuntimeError("broken"), after=8), pytest.raises(TransferError) as raised:
        rig.optimizer.step()
    assert "have been stepped" in raised.value.__notes__[-1]
    return rig


def skip(rig: Rig) -> None:
    rig.gradients()


def zero(rig: Rig) -> None:
    rig.optimizer.zero_grad(set_to_none=False)


def restore(rig: Rig) -> None:
    for parameter in rig.parameters:
        parameter.data.zero_()


@pytest.mark.parametrize("then", [skip, zero])
def test_a_step_with_other_gradients_steps_all(then: Callable[[Rig], None]):
    """Also if these have the addresses of the former ones."""
    for _ in range(20):
        rig = failed_halfway(OPTIMIZERS["AdamW"])
        then(rig)
        before = rig.snapshot()
        alone = Rig(OPTIMIZERS["AdamW"], hosted=False)
        for parameter, (value, *_rest) in zip(alone.parameters, before, strict=True):
            parameter.data.copy_(value)
        alone.optimizer.load_state_dict(copy.deepcopy(rig.optimizer.state_dict()))
        for mine, other in zip(alone.parameters, rig.parameters, strict=True):
            mine.grad = None if other.grad is None else other.grad.clone()
        rig.optimizer.step()
        alone.optimizer.step()
        assert same(rig.snapshot(), alone.snapshot())


def test_a_step_after_a_state_dict_was_loaded_steps_all():
    rig = Rig(OPTIMIZERS["AdamW"])
    rig.train(2)
    saved = copy.deepcopy(rig.optimizer.state_dict())
    values = [p.detach().clone() for p in rig.parameters]
    rig.gradients()
    with failing(RuntimeError("broken"), after=8), pytest.raises(TransferError):
        rig.optimizer.step()
    rig.optimizer.load_state_dict(saved)
    for parameter, value in zip(rig.parameters, values, strict=True):
        parameter.data.copy_(value)
    rig.optimizer.step()
    assert same(rig.snapshot(), reference(OPTIMIZERS["AdamW"], 2, parameters)[1])


def test_host_memory_that_is_too_small_is_a_typed_error_and_none_is_between():
    before, after = reference(OPTIMIZERS["AdamW"], 0, parameters)
    rig = Rig(OPTIMIZERS["AdamW"], limit_bytes=90_000)
    with pytest.raises(HostMemoryError):
        rig.train()
    none_is_between(rig, before, after)
    for _ in range(20):
        with contextlib.suppress(HostMemoryError):
            rig.optimizer.step()
    assert same(rig.snapshot(), after)


# Optimizers that are refused.


class Norm(optim.SGD):
    """Depends on all parameters."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return super().step(closure)


class Counting(optim.SGD):
    """Does something at every fifth call."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class GroupCounting(optim.SGD):
    """Counts in a group, as Lookahead and free schedules do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class Remembering(optim.SGD):
    """Knows all parameters."""

    def __init__(self, own: Parameters, lr: float) -> None:
        super().__init__(own, lr=lr)
        self.everything = list(own)


class NeedsMore(optim.SGD):
    """Its step needs an argument."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure())


class Averaging(optim.SGD):
    """Counts the parameters that it steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / len(group["params"])
        return super().step(closure)


@pytest.mark.parametrize("kind", [Norm, Counting, GroupCounting, Remembering, NeedsMore, Averaging])
def test_one_that_depends_on_more_than_a_parameter_is_refused(kind: Any):
    optimizer = kind(parameters(), lr=0.1)
    with pytest.raises(ArgumentError) as raised:
        step_costs(optimizer)
    assert raised.value.code == "FXR411"
    assert kind.__name__ in str(raised.value)


@pytest.mark.parametrize("kind", [Norm, Counting, GroupCounting])
def test_also_with_one_parameter_of_its_kind_in_each_group(kind: Any):
    own = parameters()
    with pytest.raises(ArgumentError):
        step_costs(kind([{"params": [own[0]]}, {"params": [own[1]]}], lr=0.1))


def test_lbfgs_is_refused():
    with pytest.raises(ArgumentError):
        step_costs(optim.LBFGS(parameters()))


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_small_parameters_only(shape: tuple[int, ...]):
    step_costs(optim.AdamW([nn.Parameter(torch.ones(shape))]))
