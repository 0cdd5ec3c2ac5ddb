"""Frozen parameters in host memory: same bits, less memory, and a model that is as before."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.costs.measured.measure import peak_of, resident_bytes
from fxremat.errors import BackwardError, TransferError
from fxremat.module import moving
from fxremat.options.arguments import Arguments
from fxremat.runtime import host_parameter
from fxremat.runtime.host_parameter import HostParameter
from fxremat.runtime.watch import record_transfers
from tests.models.adapters import Adapters
from tests.models.bits import assert_bitwise_equal
from tests.moving import delayed, intercept_copies

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

HOST = fxremat.HostMemory(parameters=True)


TOKENS = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))


def in_host(model: nn.Module) -> list[nn.Parameter]:
    return [own for own in model.parameters() if isinstance(own, HostParameter)]


def trained(model: nn.Module, call: Callable[..., Tensor], steps: int = 10) -> list[Tensor]:
    """The losses of some steps, and what they have left in the model and its gradients."""
    changing = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.AdamW(changing, lr=1e-2)
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    left = [own.detach().clone() for own in model.parameters()]
    return [*losses, *left, *(own.grad for own in changing if own.grad is not None)]


def check_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for own, other in zip(first, second, strict=True):
        assert_bitwise_equal(own, other)


def reference(steps: int = 10) -> list[Tensor]:
    model = Adapters()
    return trained(model, fxremat.compile(model, TOKENS, "100%"), steps)


def measured_peak(model: nn.Module, call: Callable[..., Tensor]) -> int:
    def step() -> None:
        call(TOKENS).backward()

    model.zero_grad()
    return peak_of(step, device=TOKENS.device, resident_bytes=resident_bytes(model, step))


def compiled(
    budget: Any, *, model: nn.Module | None = None, offload: Any = HOST
) -> tuple[nn.Module, fxremat.CompiledModule]:
    model = Adapters() if model is None else model
    call = fxremat.compile(model, TOKENS, budget, offload=offload, assume="strict")
    return model, call


def test_the_least_budget_is_far_below_that_with_all_parameters_on_the_device():
    _, without = compiled("min", offload="auto")
    model, call = compiled("min")
    assert in_host(model)
    assert call.plan.least_budget_bytes <= 0.35 * without.plan.least_budget_bytes
    assert measured_peak(model, call) <= call.plan.budget_bytes
    check_same(trained(model, call), reference())


@pytest.mark.parametrize("share", [0.25, 0.6, 0.9])
def test_budgets_between_keep_bits_and_peak(share: float):
    _, least = compiled("min")
    _, full = compiled("100%", offload=False)
    begin, end = least.plan.budget_bytes, full.plan.budget_bytes
    model, call = compiled(int(begin + share * (end - begin)))
    assert measured_peak(model, call) <= call.plan.budget_bytes
    check_same(trained(model, call), reference())


def test_nothing_is_moved_where_everything_fits():
    model, call = compiled("100%")
    assert not in_host(model)
    assert call.plan.predicted_s <= call.plan.baseline_s


def test_a_share_is_one_of_the_step_on_the_device():
    _, full = compiled("100%", offload=False)
    model, call = compiled("50%")
    assert in_host(model)
    assert call.plan.budget_bytes == full.plan.baseline_peak_bytes // 2


def test_parameters_stay_the_same_objects_and_trained_ones_the_same_tensors():
    model = Adapters()
    before = dict(model.named_parameters())
    compiled("min", model=model)
    after = dict(model.named_parameters())
    assert all(after[name] is own for name, own in before.items())
    assert model.head.weight is model.table.weight
    assert isinstance(model.head.weight, HostParameter)
    trained_ones = [own for own in after.values() if own.requires_grad]
    assert all(type(own) is nn.Parameter for own in trained_ones)


def test_a_checkpoint_is_that_of_a_model_without_host_memory():
    model, _ = compiled("min")
    plain = Adapters()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {name: type(own) for name, own in state.items()} == dict.fromkeys(
        plain.state_dict(), Tensor
    )
    plain.load_state_dict(state)
    check_same(list(plain.parameters()), list(Adapters().parameters()))


@pytest.mark.parametrize("write", ["in_place", "foreach"])
def test_a_write_between_forward_and_backward_is_an_error(write: str):
    """As in eager: the backward would read other values than the forward."""
    model, call = compiled("min")
    moved = [own for own in model.parameters() if isinstance(own, HostParameter)]
    loss = call(TOKENS)
    with torch.no_grad():
        if write == "foreach":
            torch._foreach_mul_(moved, 1.5)
        else:
            for own in moved:
                own.mul_(1.5)
    with pytest.raises(BackwardError):
        loss.backward()


def test_safetensors_saves_parameters_in_host_memory(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = compiled("min")
    state = model.state_dict()
    assert {type(own) for own in state.values()} == {Tensor}
    assert {own.device for own in state.values()} == {torch.device("cpu")}
    safetensors.save_file(
        {name: own.contiguous().clone() for name, own in state.items()}, tmp_path / "model"
    )
    saved = safetensors.load_file(tmp_path / "model")
    for name, own in Adapters().state_dict().items():
        assert torch.equal(saved[name], own)
    kept = model.state_dict(keep_vars=True)
    assert any(isinstance(own, HostParameter) for own in kept.values())


def test_a_checkpoint_is_loaded_into_host_memory():
    model, call = compiled("min")
    others = Adapters()
    with torch.no_grad():
        for own in others.parameters():
            own.mul_(1.5)
    moved = len(in_host(model))
    model.load_state_dict(others.state_dict())
    assert len(in_host(model)) == moved
    check_same(trained(model, call), trained(others, fxremat.compile(others, TOKENS, "100%")))


def test_copies_are_plain_models_that_train_alike():
    model, call = compiled("min")
    copied = copy.deepcopy(model)
    assert not in_host(copied)
    check_same(trained(copied, fxremat.compile(copied, TOKENS, "100%")), trained(model, call))


def test_a_compiled_copy_moves_its_own_parameters():
    _model, call = compiled("min")
    other: Any = copy.deepcopy(call)
    result = trained(other, other)
    assert in_host(other)
    check_same(result, reference())


def test_calls_without_gradients_compute_the_same():
    model, call = compiled("min")
    plain = Adapters().eval()
    model.eval()
    with torch.no_grad():
        assert torch.equal(call(TOKENS), plain(TOKENS))


def test_a_budget_below_the_least_one_leaves_the_model_as_it_was():
    _, least = compiled("min")
    model = Adapters()
    with pytest.raises(fxremat.BudgetError) as caught:
        compiled(least.plan.least_budget_bytes // 2, model=model)
    assert not in_host(model)
    assert caught.value.least_budget_bytes == least.plan.least_budget_bytes
    check_same(trained(model, model), trained(other := Adapters(), other))


def test_host_memory_that_cannot_be_had_leaves_the_model_as_it_was(tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    offload = fxremat.HostMemory(folder=gone, parameters=True)
    gone.rmdir()
    model = Adapters()
    with pytest.raises(fxremat.HostMemoryError):
        compiled("min", model=model, offload=offload)
    assert not in_host(model)


def test_the_limit_of_host_memory_holds_for_parameters():
    model, call = compiled("min", offload=fxremat.HostMemory(limit=100_000, parameters=True))
    assert 0 < sum(own.nbytes for own in in_host(model)) <= 100_000
    assert call._training.loop.host.allocated_bytes <= 100_000


def test_a_copy_that_fails_within_a_step_is_an_error_and_the_next_step_is_right():
    model, call = compiled("min")
    plain_model = Adapters()
    plain = fxremat.compile(plain_model, TOKENS, "100%")

    def fail(_copy: Callable[[], None]) -> None:
        raise OSError("gone")

    torch.manual_seed(5)
    with intercept_copies(fail), pytest.raises(TransferError):
        call(TOKENS).backward()
    model.zero_grad()
    check_same(trained(model, call), trained(plain_model, plain))


def test_an_error_in_the_middle_of_the_move_leaves_the_model_as_it_was():
    model = Adapters()
    count = 0

    def fail_later(copy: Callable[[], None]) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        copy()

    with intercept_copies(fail_later), pytest.raises(KeyboardInterrupt):
        compiled("min", model=model)
    assert count >= 3
    assert not in_host(model)
    check_same(list(model.parameters()), list(Adapters().parameters()))


def test_a_parameter_that_a_graph_refers_to_is_refused():
    model = Adapters()
    held = model.blocks[0].inner.base.weight.view(-1)  # a view refers to its base
    with pytest.raises(fxremat.ArgumentError) as caught:
        compiled("min", model=model)
    assert caught.value.code == "FXR415"
    assert not in_host(model)
    del held


def test_a_parameter_may_be_trained_later():
    model, call = compiled("min")
    weight = model.blocks[3].outer.base.weight
    assert isinstance(weight, HostParameter)
    plain = Adapters()
    for own in (model, plain):
        own.blocks[3].outer.base.weight.requires_grad_()
    with contextlib.suppress(UserWarning):
        check_same(trained(model, call), trained(plain, fxremat.compile(plain, TOKENS, "100%")))


def test_the_first_call_may_be_the_sample():
    model = Adapters()
    call = fxremat.compile(model, budget="min", offload=HOST)
    result = trained(model, call)
    assert in_host(model)
    check_same(result, reference())


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_parameters_is_a_flag(value: Any):
    with pytest.raises(fxremat.ArgumentError):
        fxremat.HostMemory(parameters=value)


def test_copies_start_early_where_there_is_room_and_none_is_left_over():
    model, call = compiled("min")
    code = call.forward_code + call.backward_code
    assert code.count("fetch_early(") > 0
    with record_transfers() as records:
        call(TOKENS).backward()
    copied = sum(record.nbytes for record in records if record.kind == "prefetch")
    assert copied >= sum(own.nbytes for own in in_host(model)) / 2
    assert not host_parameter._early
    assert measured_peak(model, call) <= call.plan.budget_bytes


def test_copies_that_are_late_change_nothing_but_the_time():
    model, call = compiled("min")
    with delayed(seed=1, most_s=0.002):
        check_same(trained(model, call, steps=3), reference(steps=3))


def test_a_step_that_is_given_up_leaves_no_copy_behind():
    model, call = compiled("min")
    loss = call(TOKENS)
    count = 0

    def fail_later(copy: Callable[[], None]) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise OSError("gone")
        copy()

    with intercept_copies(fail_later), pytest.raises(TransferError):
        loss.backward()
    del loss
    model.zero_grad()
    assert not host_parameter._early
    check_same(trained(model, call), reference())


def test_a_saved_plan_is_followed(tmp_path: Path):
    model, call = compiled("min")
    call.plan.save(tmp_path / "plan.json")
    expected = trained(model, call)
    other = Adapters()
    again = fxremat.compile(
        other, TOKENS, plan=fxremat.Plan.load(tmp_path / "plan.json"), offload=HOST, assume="strict"
    )
    check_same(trained(other, again), expected)


ALL = fxremat.HostMemory(parameters="all")


def whole() -> nn.Module:
    """A model all of whose parameters are trained."""
    model = Adapters()
    model.requires_grad_()
    return model


def trained_with(
    model: nn.Module, budget: Any, optimizer: Callable[..., torch.optim.Optimizer], **options: Any
) -> tuple[list[Tensor], fxremat.CompiledModule]:
    """What ten steps with clipped gradients leave, and the compiled model."""
    own = optimizer(model.parameters())
    call = fxremat.compile(model, TOKENS, budget, optimizer=own, assume="strict", **options)
    torch.manual_seed(5)
    for _ in range(10):
        call(TOKENS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own.step()
        own.zero_grad()
    state = [v for s in own.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*(p.detach().clone() for p in model.parameters()), *(v.clone() for v in state)], call


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trained_parameters_in_host_memory_get_the_same_bits(name: str):
    expected, without = trained_with(whole(), "min", OPTIMIZERS[name])
    model = whole()
    left, call = trained_with(model, "min", OPTIMIZERS[name], offload=ALL)
    assert any(own.requires_grad for own in in_host(model))
    assert call.plans[0].least_budget_bytes < without.plans[0].least_budget_bytes
    check_same(left, expected)


def test_trained_parameters_and_state_in_host_memory_get_the_same_bits():
    expected, without = trained_with(whole(), "min", OPTIMIZERS["adamw"])
    both = fxremat.HostMemory(state=True, parameters="all")
    left, call = trained_with(whole(), "min", OPTIMIZERS["adamw"], offload=both)
    assert call.plans[0].least_budget_bytes < 0.6 * without.plans[0].least_budget_bytes
    check_same(left, expected)


def test_gradients_of_trained_parameters_are_counted_once():
    model = whole()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    call = fxremat.compile(model, TOKENS, "min", optimizer=own, offload=ALL)

    def step() -> None:
        call(TOKENS).backward()

    for _ in range(6):
        step()
        own.step()
    assert peak_of(step, device=TOKENS.device, resident_bytes=resident_bytes(model, step)) <= (
        call._training.loop.budget.nbytes
    )


def test_functions_that_only_plan_leave_the_model_as_it_was():
    model = Adapters()
    plan = fxremat.plan(model, TOKENS, "min", offload=HOST)
    assert not in_host(model)
    _, call = compiled("min", offload="auto")
    assert plan.least_budget_bytes < call.plan.least_budget_bytes


def test_the_largest_batch_has_room_of_parameters_in_host_memory():
    model = Adapters()
    budget = fxremat.plan(model, TOKENS, "min").least_budget_bytes
    without = fxremat.max_batch(model, TOKENS, budget, most=64)
    batches = fxremat.max_batch(model, TOKENS, budget, most=64, offload=HOST)
    assert batches.largest.size > without.largest.size
    assert not in_host(model)


def test_an_estimate_has_parameters_in_host_memory():
    model = Adapters()
    without = fxremat.estimate(model, TOKENS)
    estimated = fxremat.estimate(model, TOKENS, offload=HOST)
    assert not in_host(model)
    assert estimated.kept.least_budget_bytes < 0.5 * without.kept.least_budget_bytes


def test_processes_that_plan_together_are_refused():
    model = Adapters()
    with pytest.raises(fxremat.ArgumentError) as caught:
        moving.plan_moving(model, Arguments.read("min", offload=HOST, ranks=fxremat.Ranks()), None)
    assert caught.value.code == "FXR414"
    assert not in_host(model)
