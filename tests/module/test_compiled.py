"""The compiled module is the user's model in all but its training forward."""

import contextlib
import copy
import functools
import inspect
import io
import pickle
import re
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxremat


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(32))
        self.label = "net"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).tanh())
        return self.norm(x * self.scale)

    def describe(self) -> str:
        return f"{self.label} of {len(self.layers)}"


pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair() -> tuple[Net, fxremat.CompiledModule]:
    model = Net()
    return model, fxremat.compile(model, X, "min")


def test_it_shares_what_the_model_has(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    assert list(compiled.state_dict()) == list(Net().state_dict())
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(compiled.buffers(), model.buffers(), strict=True))
    assert list(compiled.modules())[1:] == list(model.modules())[1:]
    other = Net()
    nn.init.zeros_(other.layers[0].weight)
    compiled.load_state_dict(other.state_dict())
    assert not model.layers[0].weight.any()


def test_attributes_are_the_models(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    assert compiled.describe() == "net of 4"
    compiled.label = "other"
    assert model.label == "other" and compiled.describe() == "other of 4"
    compiled.extra = nn.Parameter(torch.zeros(1))
    assert "extra" in dict(model.named_parameters())
    del compiled.extra
    assert "extra" not in dict(model.named_parameters())
    with pytest.raises(AttributeError, match="missing"):
        _ = compiled.missing
    assert "Net" in repr(compiled)


def test_modes_are_the_models(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    assert compiled.training
    assert compiled.eval() is compiled
    assert not model.training and not model.drop.training and not compiled.training
    compiled.train()
    assert model.training and model.drop.training
    model.eval()
    assert not compiled.training


def test_eval_and_no_grad_run_the_original_forward(pair: tuple[Net, fxremat.CompiledModule]):
    model, compiled = pair
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    compiled.eval()
    with torch.no_grad():
        assert torch.equal(compiled(X), model(X))
    assert len(calls) == 2
    compiled.train()
    with torch.no_grad():
        torch.manual_seed(3)
        found = compiled(X)
        torch.manual_seed(3)
        assert torch.equal(found, model(X))
    assert len(calls) == 4
    assert len(compiled.plans) == 1
    handle.remove()


def test_a_plan_has_what_its_steps_took(pair: tuple[Net, fxremat.CompiledModule]):
    compiled = fxremat.compile(Net(), X, pair[1].plan.budget_bytes, loss=torch.sum)
    assert compiled.plan.measured_peak_bytes is None
    for _ in range(3):
        compiled.zero_grad()
        compiled(X).sum().backward()
    plan = compiled.plan
    assert plan.measured_peak_bytes is not None
    assert plan.measured_peak_bytes <= plan.predicted_held_bytes
    assert plan.measured_peak_bytes > sum(p.nbytes for p in compiled.parameters())
    assert f"({plan.measured_peak_bytes} bytes)" in plan.explain()


def test_a_plan_names_the_model_and_the_batch(pair: tuple[Net, fxremat.CompiledModule]):
    compiled = fxremat.compile(Net(), X, pair[1].plan.budget_bytes)
    assert compiled.plan.model == "Net"
    assert compiled.plan.arguments == (("args[0]", "float32[64, 32]"),)
    compiled(X[:48]).sum().backward()
    assert compiled.plan.arguments == (("args[0]", "float32[48, 32]"),)
    assert "float32[48, 32]" in compiled.plan.explain()


def test_a_budget_that_is_too_small_is_told_without_the_frames_of_torch(pair):
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.compile(Net(), X, 0.01)
    assert len(traceback.extract_tb(caught.value.__traceback__)) < 8
    assert caught.value.__cause__ is None
    compiled = fxremat.compile(Net(), X, pair[1].plan.budget_bytes, strict=True)
    with pytest.raises(fxremat.BudgetError) as caught:
        compiled(X.repeat(50, 1))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert len(frames) < 9
    assert not any("/_dynamo/" in frame.filename for frame in frames)


def test_a_budget_error_names_the_module_and_the_line(pair):
    with pytest.raises(fxremat.BudgetError) as caught:
        fxremat.compile(Net(), X, 0.01, assume="strict")
    assert re.search(rf"needed by \w+.* in module [\w.]+, at {__file__}:\d+ ", str(caught.value))


def test_other_shapes_are_planned_anew(pair: tuple[Net, fxremat.CompiledModule]):
    compiled = fxremat.compile(Net(), X, pair[1].plan.budget_bytes, strict=True)
    first = compiled.plan
    compiled(X[:32]).sum().backward()
    assert len(compiled.plans) == 2 and compiled.plan is compiled.plans[1]
    assert compiled.plan.sizes and not first.sizes
    compiled.zero_grad()
    compiled(X).sum().backward()
    assert len(compiled.plans) == 2 and compiled.plan.schedule == first.schedule
    compiled.zero_grad()
    with pytest.raises(fxremat.BudgetError, match=str(first.budget_bytes)):
        compiled(X.repeat(50, 1))


def test_moving_the_model_plans_anew():
    compiled = fxremat.compile(Net(), X, 1.0, strict=True)
    assert compiled.double() is compiled
    assert compiled.layers[0].weight.dtype == torch.float64
    with pytest.raises(fxremat.BudgetError):
        compiled(X.double())  # twice the bytes, the same budget
    compiled.float()
    compiled(X).sum().backward()
    assert compiled.layers[0].weight.grad.dtype == torch.float32


def test_the_code_can_be_printed(pair: tuple[Net, fxremat.CompiledModule]):
    _, compiled = pair
    assert "stage" in compiled.forward_code and "F_" in compiled.forward_code
    assert "_backward(args)" in compiled.backward_code
    for code in (compiled.forward_code, compiled.backward_code):
        compile(code, "emitted", "exec")


def test_containers_stay_containers():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    compiled = fxremat.compile(model, X, 1.0)
    assert len(compiled) == 3 and compiled[0] is model[0]
    assert list(compiled) == list(model)
    with pytest.raises(TypeError):
        len(fxremat.compile(Net(), X, 1.0))


def same_step(one: nn.Module, other: nn.Module) -> bool:
    """Whether a step of both leaves the same gradients."""
    for each in (one, other):
        each.zero_grad()
        torch.manual_seed(3)
        each(X).square().sum().backward()
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)


def saved(compiled: fxremat.CompiledModule) -> fxremat.CompiledModule:
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = (copy.deepcopy, lambda compiled: pickle.loads(pickle.dumps(compiled)), saved)


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_copies_follow_the_plan_they_were_copied_with(pair, copied):
    _, compiled = pair
    kept = compiled.plans[0]
    other = copied(compiled)
    assert isinstance(other, Net) and isinstance(other, fxremat.CompiledModule)
    assert not other.plans
    with pytest.raises(fxremat.PlanError, match="planned"):
        _ = other.plan
    assert other.norm.weight is not compiled.norm.weight
    assert same_step(compiled, other)
    assert other.plans[0].schedule == kept.schedule
    assert other.plans[0].budget_bytes >= kept.budget_bytes


class TwoOutputs(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = super().forward(x)
        return found.square().mean(), found


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.slow), 8])
def test_a_loss_of_any_kind_is_no_part_of_what_is_saved(copied, rows):
    compiled = fxremat.compile(
        TwoOutputs(), X, "min", loss=fxremat.Loss(lambda out: out[0], drop_unused=True)
    )
    other = copied(copied(compiled))
    for each in (compiled, other):
        loss, rest = each(X[:rows])
        assert rest is None
        loss.backward()
    if rows is None:
        assert other.plan == compiled.plan


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_of_what_was_loaded_plans_for_the_same_loss(copied):
    compiled = fxremat.compile(TwoOutputs(), X, "min", loss=lambda out: out[0])
    other = copied(saved(compiled))
    other(X)[0].backward()
    assert other.plan == compiled.plan


def test_what_was_never_planned_is_saved_without_its_loss_and_says_so():
    loss = fxremat.Loss(lambda out: out[0], drop_unused=True)
    compiled = fxremat.compile(TwoOutputs(), budget="1 GiB", loss=loss)
    with pytest.warns(fxremat.BudgetWarning, match="TwoOutputs"):
        loaded = saved(compiled)
    assert loaded(X)[1] is not None
    assert copy.copy(compiled)(X)[1] is None
    assert fxremat.compile(loaded, budget="1 GiB", loss=loss)(X)[1] is None


def test_the_models_own_loss_is_saved_before_any_step():
    compiled = fxremat.compile(
        TwoOutputs(), budget="1 GiB", loss=fxremat.Loss("own", drop_unused=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        assert saved(compiled)(X)[1] is None


def test_a_copy_of_another_step_is_planned_anew(pair):
    _, compiled = pair
    other = copy.deepcopy(compiled)
    other(X[:8]).sum().backward()
    assert other.plan.budget_bytes < compiled.plan.budget_bytes  # it is "min", too
    assert other.plan.counted_bytes < compiled.plan.counted_bytes


def test_averages_of_it_are_made():
    compiled = fxremat.compile(Net(), X, "min")
    averaged = torch.optim.swa_utils.AveragedModel(compiled)
    compiled(X).sum().backward()
    averaged.update_parameters(compiled)
    with torch.no_grad():
        assert torch.equal(averaged.eval()(X), compiled.eval()(X))


def test_it_is_of_the_models_class(pair):
    model, compiled = pair
    assert isinstance(compiled, Net)
    assert type(compiled).__name__ == "Net" and type(compiled).__module__ == Net.__module__
    assert str(compiled) == str(model)
    for each in (compiled.forward, type(compiled).forward):
        own = model.forward if each is not type(compiled).forward else Net.forward
        assert inspect.signature(each) == inspect.signature(own)
    assert vars(compiled) is vars(model)


def test_a_forward_that_others_put_there_is_called(pair):
    """As Accelerate does, and takes away again."""
    model, compiled = pair
    planned = compiled.forward

    @functools.wraps(planned.__func__)
    def doubled(self: nn.Module, *args: Tensor) -> Tensor:
        return 2 * planned.__func__(self, *args)

    torch.manual_seed(3)
    expected = 2 * compiled(X)
    compiled.forward = types.MethodType(doubled, compiled)
    torch.manual_seed(3)
    found = compiled(X)
    assert torch.equal(found, expected)
    assert not torch.equal(model.eval()(X), compiled(X))
    assert model.forward.__func__ is Net.forward
    compiled.train()
    compiled.forward = types.MethodType(Net.forward, compiled)
    assert compiled.forward == planned
    compiled.forward = doubled
    del compiled.forward
    assert compiled.forward == planned


def test_hooks_are_called_whenever_they_were_added(pair):
    model, compiled = pair
    seen: list[str] = []
    compiled(X).sum().backward()
    handles = [
        compiled.register_forward_hook(lambda *_: seen.append("own")),
        model.norm.register_forward_hook(lambda *_: seen.append("inner")),
        compiled.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    assert sorted(seen) == ["backward", "inner", "own"]
    for handle in handles:
        handle.remove()
    compiled(X).sum().backward()
    assert len(seen) == 3


def test_a_hook_that_changes_what_an_inner_module_returns_is_followed(pair):
    model, compiled = pair
    compiled(X)
    handle = model.layers[1].register_forward_hook(lambda _m, _i, output: output * 0)
    torch.manual_seed(3)
    found = compiled(X)
    torch.manual_seed(3)
    assert torch.equal(found, model(X))
    handle.remove()
    torch.manual_seed(3)
    found = compiled(X)
    torch.manual_seed(3)
    assert torch.equal(found, model(X))


def test_what_is_compiled_is_compiled_anew(pair):
    model, compiled = pair
    again = fxremat.compile(compiled, X, 1.0)
    assert vars(again) is vars(model)
    assert again.plan.counted_bytes > compiled.plan.counted_bytes
    torched = fxremat.compile(torch.compile(model, backend="eager"), X, 1.0)
    assert type(torched).__name__ == "Net" and vars(torched) is vars(model)


def test_without_a_sample_the_first_step_is_one():
    compiled = fxremat.compile(Net(), budget="1 MiB")
    assert compiled.plans == ()
    with torch.no_grad():
        compiled(X)
    assert compiled.plans == ()
    assert same_step(compiled, fxremat.compile(Net(), X, "1 MiB"))
    assert len(compiled.plans) == 1


def test_training_in_eval_mode_is_warned_of():
    compiled = fxremat.compile(Net().eval(), X, "min")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(X)
    with pytest.warns(fxremat.BudgetWarning, match="train"):
        compiled(X).sum().backward()
    compiled.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        compiled(X).sum().backward()
        compiled.eval()(X)


def test_so_it_is_after_steps_that_were_planned_and_not_of_an_evaluation():
    compiled = fxremat.compile(Net(), X, "min")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        compiled(X).sum().backward()
        compiled.eval()(X)
    with pytest.warns(fxremat.BudgetWarning, match="no budget holds"):
        compiled(X).sum().backward()
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error", fxremat.BudgetWarning)
        compiled(X).sum().backward()


class Logged(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Overridden(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch": Logged,
    "flops": functools.partial(FlopCounterMode, display=False),
    "no data": functools.partial(FakeTensorMode, allow_non_fake_inputs=True),
    "eager": functools.partial(torch.compiler.set_stance, "force_eager"),
    "known only": functools.partial(torch.compiler.set_stance, "eager_on_recompile"),
    "function": Overridden,
    "device": functools.partial(torch.device, "cpu"),
}
UNPLANNED = ("dispatch", "flops", "no data", "eager")
"""Under these, nothing is planned."""


def step_of(model: nn.Module, mode: AbstractContextManager[Any], *, backward: bool) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(1)
    with contextlib.ExitStack() as both:
        both.enter_context(mode)
        loss = model(X).square().sum()
        if not backward:
            both.close()
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("at", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODES)
def test_steps_around_one_under_a_mode_are_planned(name: str, at: int, backward: bool) -> None:
    reference, compiled = Net(), fxremat.compile(Net(), budget="min")
    for i in range(3):
        here = i == at
        mode = MODES[name] if here else contextlib.nullcontext
        first = here and i == 0
        warned = here and (name in UNPLANNED or (first and name == "known only"))
        found: list[Any]
        with (
            pytest.warns(fxremat.BudgetWarning, match="no plan")
            if warned
            else contextlib.nullcontext()
        ):
            found = step_of(compiled, mode(), backward=backward)
        expected = step_of(reference, contextlib.nullcontext(), backward=backward)
        if not (here and name == "no data"):
            assert all(map(torch.equal, found, expected))
    assert any(compiled.plan is own for own in compiled.plans)


@pytest.mark.parametrize("name", ["dispatch", "flops"])
def test_a_backward_under_a_mode_has_the_same_bits(name: str) -> None:
    reference, compiled = Net(), fxremat.compile(Net(), X, "min")
    for model in (reference, compiled):
        torch.manual_seed(1)
        loss = model(X).square().sum()
        with MODES[name]():
            loss.backward()
    pairs = zip(reference.parameters(), compiled.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_a_sample_may_be_planned_under_a_mode() -> None:
    with Logged():
        compiled = fxremat.compile(Net(), X, "min")
    assert compiled.plan.budget_bytes
    with pytest.warns(fxremat.BudgetWarning, match="no plan"), MODES["flops"]():
        compiled(X)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no plan")
        compiled(X).sum().backward()


def test_a_mode_of_another_thread_is_none_of_this_one() -> None:
    compiled = fxremat.compile(Net(), X, "min")
    inside, may_go = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        with pytest.warns(fxremat.BudgetWarning, match="no plan"), Logged():
            found.append(compiled(X).sum().item())
            inside.set()
            assert may_go.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(60)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "no plan")
            compiled(X).sum().backward()
    finally:
        may_go.set()
        thread.join()
    assert len(found) == 1
    assert len(compiled.plans) >= 1


class Particular(Net):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 7:
            raise KeyError("seven")
        return super().forward(x)


def test_what_the_model_raises_is_raised_as_it_is():
    model = Particular()
    compiled = fxremat.compile(model, X, 1.0)
    before = {name: t.clone() for name, t in compiled.state_dict().items()}
    with pytest.raises(KeyError, match="seven"):
        compiled(X[:7])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled(X[:, :5])
    assert all(torch.equal(t, before[name]) for name, t in compiled.state_dict().items())
    with pytest.raises(KeyError, match="seven"):
        fxremat.compile(model, X[:7], 1.0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Differentiates(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return slope


class Cumulative(Net):
    def __init__(self):
        super().__init__()
        self.norm.momentum = None


def hooked() -> Net:
    model = Net()
    model.norm.register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (Recurrent, "LSTMCell"),
        (Differentiates, "autograd.grad"),
        (Cumulative, "momentum"),
        (hooked, "on the compiled model"),
    ],
)
def test_what_cannot_be_captured_is_told_with_a_remedy(build: Callable[[], nn.Module], remedy: str):
    with pytest.raises(fxremat.CaptureError, match=remedy) as caught:
        fxremat.compile(build(), X, 1.0, regions="one")
    assert "test_compiled.py" in str(caught.value)
    assert "Hint" not in str(caught.value)


def test_one_graph_of_a_model_with_an_lstm_is_refused_with_a_remedy():
    with pytest.raises(fxremat.CaptureError, match="LSTMCell"):
        fxremat.compile(Recurrent(), X, 1.0, regions="one")


def test_planning_leaves_buffers_that_uncaptured_code_has_written():
    model = Cumulative()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fxremat.compile(model, X, 1.0)
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_numpy_in_the_forward_is_no_wrong_sample():
    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.from_numpy(np.abs(x.detach().numpy())))

    assert same_step(fxremat.compile(Counts(), X, 1.0), Counts())


class Larger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = fxremat.compile(Net(), X, "min")
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


def test_a_part_of_a_larger_model_is_planned_with_it():
    larger = Larger()
    whole = fxremat.compile(larger, X, "min")
    torch._dynamo.reset()
    assert list(whole.state_dict()) == list(larger.state_dict())
    assert same_step(whole, Larger())
    assert not larger.net.plan.also_held and len(larger.net.plans) == 1


def test_threads_that_train_first_at_once_share_a_plan():
    compiled = fxremat.compile(Net(), budget="1 MiB")
    threads = [threading.Thread(target=compiled, args=(X,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(plan) for plan in compiled.plans}) == len(compiled.plans) >= 1


def test_replicas_are_refused(pair):
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        pair[1]._replicate_for_data_parallel()


def test_sizes_of_one_model_say_nothing_of_another():
    """Dynamo remembers by file, line and name which sizes were seen to vary."""
    assert not fxremat.compile(Net(), X, 1.0).plan.sizes
    assert not fxremat.compile(Net(), X[:32], 1.0).plan.sizes


def test_few_frames_lie_between_a_call_and_emitted_code(pair):
    _, call = pair
    package, counts = str(Path(fxremat.__file__).parent), []

    def counted(run: Callable[..., object]) -> Callable[..., object]:
        def stage(args: list[object]) -> object:
            frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
            counts.append(sum(f.f_code.co_filename.startswith(package) for f in frames))
            return run(args)

        return stage

    forward = call._training.latest[1].forward
    forward.call_through(counted)
    call(X)
    assert counts
    assert max(counts) <= 7


def test_copies_of_what_travels_keep_to_limits_of_their_own():
    compiled = fxremat.compile(Net(), X, "min", offload=fxremat.HostMemory("only", limit="8 MiB"))
    host_bytes = compiled.plan.host_bytes
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert same_step(compiled, other)
        assert other.plans[0].host_bytes == host_bytes


class Scaled(Net):
    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return super().forward(x) * scale


def test_hooks_before_the_forward_run_on_the_sample_as_on_any_call():
    def build() -> Scaled:
        model = Scaled()
        model.register_forward_pre_hook(
            lambda _model, args, kwargs: (args, {**kwargs, "scale": 2.0}), with_kwargs=True
        )
        return model

    compiled = fxremat.compile(build(), X, "min")
    assert same_step(compiled, build())
    assert len(compiled.plans) == 1
    later = fxremat.compile(build(), budget=compiled.plan.budget_bytes)
    assert same_step(later, build())


def test_hooks_of_what_is_wrapped_are_called(tmp_path: Path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    try:
        model, seen = Net(), []
        compiled = fxremat.compile(nn.parallel.DistributedDataParallel(model), X, 1.0)
        model.register_forward_hook(lambda _m, _i, output: seen.append(output.shape))
        compiled(X).sum().backward()
        assert seen == [X.shape]
    finally:
        torch.distributed.destroy_process_group()


def test_what_was_scripted_is_refused():
    with pytest.raises(fxremat.ArgumentError, match="scripted"):
        fxremat.compile(torch.jit.script(nn.Linear(32, 32)), X, 1.0)


class Clamps(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5)
            self.norm.weight.mul_(0.5)
        raise ValueError("always")


def test_what_is_refused_is_not_changed():
    model = Clamps()
    with pytest.raises(ValueError, match="always"):
        fxremat.compile(model, X, 1.0)
    assert torch.equal(model.norm.weight, torch.ones(32)) and torch.equal(
        model.scale, torch.ones(32)
    )
