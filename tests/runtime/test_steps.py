"""Steps in flight: what a forward leaves behind goes when nobody can run its backward any more."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat import torch_compat
from fxremat.errors import BackwardError
from fxremat.module.compiled import CompiledModule
from fxremat.runtime.steps import InFlight, Step, latest_step
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded

ROWS, WIDTH = 64, 16
OUTPUT_BYTES = ROWS * WIDTH * 4

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def batch(seed: int = 0, rows: int = ROWS) -> Tensor:
    with seeded(seed):
        return torch.randn(rows, WIDTH)


class Blocks(nn.Module):
    """Layers, and what becomes of the last one's result."""

    def __init__(self, end: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.end = end

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.end(x)


def compiled(
    end: Callable[[Tensor], Any] = lambda x: x, budget: float | str | int = "16 MiB"
) -> CompiledModule:
    """With room for many steps, unless told otherwise."""
    with seeded(0):
        return fxremat.compile(Blocks(end), batch(), budget)


ENDS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x,
    "read_by_its_backward": torch.tanh,
    "several": lambda x: (torch.sigmoid(x), {"half": x[:2], "sum": x.exp().sum()}),
    "viewed": lambda x: torch.tanh(x).view(-1),
    "softmax": lambda x: torch.log_softmax(x, 1),
}
each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


def total(outputs: Any) -> Tensor:
    """A loss of whatever is returned."""
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing goes but what nobody refers to."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_bytes(run: Callable[[], object]) -> int:
    """What is allocated by ``run`` and still there afterwards, without a collection."""
    with uncollected(), torch_compat.AllocationLog() as log:
        run()
    return sum(change for _mark, change in log.events)


def confirm_bits(call: CompiledModule) -> Tensor:
    """Two steps, after which nothing new is learned; a batch."""
    x = batch()
    for _ in range(2):
        call.zero_grad()
        total(call(x)).backward()
    call.zero_grad()
    return x


@each_end
def test_a_dropped_graph_frees_its_memory_at_once(end: Callable[[Tensor], Any]):
    call = compiled(end)
    x = confirm_bits(call)
    assert left_bytes(lambda: call(x)) == 0
    assert left_bytes(lambda: total(call(x))) == 0
    kept: list[Any] = []
    assert left_bytes(lambda: kept.append(call(x))) > OUTPUT_BYTES


@each_end
def test_an_input_that_is_differentiated_goes_with_its_graph(end: Callable[[Tensor], Any]):
    call = compiled(end)
    confirm_bits(call)
    x = batch().requires_grad_()
    total(call(x)).backward()
    assert left_bytes(lambda: call(x)) == 0
    assert left_bytes(lambda: call(2 * x)) == 0


@each_end
def test_an_error_before_the_backward_frees_all(end: Callable[[Tensor], Any]):
    call = compiled(end)
    x = confirm_bits(call)

    def fail() -> None:
        y = call(x)
        raise ZeroDivisionError(total(y))

    with uncollected(), torch_compat.AllocationLog() as log, suppress(ZeroDivisionError):
        fail()
    assert sum(change for _mark, change in log.events) == 0


@each_end
def test_after_a_backward_gradients_are_all_that_is_left(end: Callable[[Tensor], Any]):
    call = compiled(end)
    x = confirm_bits(call)
    expected = sum(p.nbytes for p in call.parameters())
    assert left_bytes(lambda: total(call(x)).backward()) == expected
    assert left_bytes(lambda: total(call(x)).backward()) == 0


def test_a_result_that_is_held_holds_nothing_else_after_the_backward():
    call = compiled(torch.tanh)
    x = confirm_bits(call)
    total(call(x)).backward()
    kept: list[Tensor] = []

    def run() -> None:
        y = call(x)
        y.sum().backward()
        kept.append(y)

    assert left_bytes(run) == OUTPUT_BYTES


def test_a_graph_that_is_retained_goes_when_it_is_dropped():
    call = compiled(torch.tanh)
    x = confirm_bits(call)
    total(call(x)).backward()

    def run() -> None:
        loss = total(call(x))
        for _ in range(3):
            loss.backward(retain_graph=True)

    assert left_bytes(run) == 0


def test_a_second_backward_is_refused_as_autograd_does():
    call = compiled()
    loss = call(batch()).sum()
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()
    call.zero_grad()
    call(batch()).sum().backward()


# Writing to what the backward reads.


def write_input(call: CompiledModule, x: Tensor, _y: Tensor) -> None:
    x.add_(1)


def write_result(call: CompiledModule, _x: Tensor, y: Tensor) -> None:
    y.mul_(2)


def write_a_view_of_the_result(call: CompiledModule, _x: Tensor, y: Tensor) -> None:
    y.detach()[0].zero_()


def write_parameter(call: CompiledModule, _x: Tensor, _y: Tensor) -> None:
    with torch.no_grad():
        call.layers[1].weight.mul_(2)


def step_optimizer(call: CompiledModule, _x: Tensor, _y: Tensor) -> None:
    for p in call.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(call.parameters(), 0.1).step()


WRITES = [write_input, write_result, write_a_view_of_the_result, write_parameter, step_optimizer]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_the_backward_reads_must_not_be_written_to(write: Callable[..., None]):
    """So says autograd, too."""
    for call in (compiled(torch.tanh), Blocks(torch.tanh)):
        x = batch()
        y = call(x)
        loss = y.sum()
        write(call, x, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            loss.backward()
        if isinstance(call, CompiledModule):
            assert isinstance(caught.value, BackwardError)
            del caught, y, loss
            call.zero_grad()
            call(batch()).sum().backward()


def test_what_the_backward_does_not_read_may_be_written_to():
    call, plain = compiled(), Blocks()
    plain.load_state_dict(call.state_dict())
    for model in (call, plain):
        y = model(batch())
        y.mul_(2)
        y.sum().backward()
    found, expected = ([p.grad for p in m.parameters()] for m in (call, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_an_error_is_told_before_anything_is_added():
    call = compiled()
    x = batch()
    y = call(x)
    x.add_(1)
    with pytest.raises(BackwardError):
        y.sum().backward()
    assert all(p.grad is None for p in call.parameters())


# What others do with saved tensors and with results.


def gradients(call: CompiledModule, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    call.zero_grad()
    run(batch(3)).square().sum().backward()
    return [p.grad for p in call.parameters()]


def saved_to_a_file(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "on_the_host": torch.autograd.graph.save_on_cpu,
    "pickled": lambda: torch.autograd.graph.saved_tensors_hooks(pickle.dumps, pickle.loads),
    "in_files": lambda: torch.autograd.graph.saved_tensors_hooks(saved_to_a_file, torch.load),
    "copied": lambda: torch.autograd.graph.saved_tensors_hooks(copy.deepcopy, lambda t: t),
    "cloned": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t),
    "as_they_are": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("elsewhere", ELSEWHERE.values(), ids=ELSEWHERE)
def test_hooks_may_keep_saved_tensors_elsewhere(elsewhere: Callable[[], Any]):
    call = compiled(torch.tanh)
    expected = [g.clone() for g in gradients(call, call)]

    def run(x: Tensor) -> Tensor:
        with elsewhere():
            return call(x)

    assert_bitwise_equal(gradients(call, run), expected)
    call.zero_grad()
    x = batch()
    run(x).sum().backward()
    assert left_bytes(lambda: run(x)) == 0
    assert left_bytes(lambda: run(x).sum().backward()) == 0


def test_a_step_that_hooks_give_to_two_backwards_is_read_once():
    call = compiled()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: kept[0]):
        first, second = call(batch()).sum(), call(batch()).sum()
    first.backward()
    with pytest.raises(BackwardError) as caught:
        second.backward()
    assert caught.value.code == "FXR702"


def test_hooks_that_lose_a_step_are_an_error():
    call = compiled()
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.tensor([-7])):
        y = call(batch())
    with pytest.raises(BackwardError):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model_keeps_nothing(reentrant: bool):
    call = compiled(torch.tanh)
    expected = [g.clone() for g in gradients(call, call)]

    def checkpointed(x: Tensor) -> Tensor:
        x.requires_grad_()
        result: Tensor = checkpoint(call, x, use_reentrant=reentrant, preserve_rng_state=False)
        return result

    for _ in range(2):
        assert_bitwise_equal(gradients(call, checkpointed), expected)
    call.zero_grad()
    x, kept = batch(), []
    assert left_bytes(lambda: kept.append(checkpointed(x))) == OUTPUT_BYTES


def test_results_may_be_copied_and_written_out():
    call = compiled(torch.tanh)
    y = call(batch())
    value = y.detach().clone()
    file = io.BytesIO()
    torch.save(y.detach(), file)
    file.seek(0)
    copies = [
        copy.deepcopy(y.detach()),
        pickle.loads(pickle.dumps(y.detach())),
        torch.load(file),
        copy.copy(y),
    ]
    y.sum().backward()
    assert_bitwise_equal(copies, [value] * len(copies))


# Tokens, and who waits.


def made(*, saved: int = 1, outputs: tuple[Tensor, ...] = (), held_bytes: int = 5) -> Step:
    """A step of no model."""
    tensors = [torch.ones(2) for _ in range(saved)]
    step = Step(None, lambda _: None, context=None, leaves=())
    step.keep(tensors, outputs, held_bytes=held_bytes)
    return step


def copying() -> AbstractContextManager[Any]:
    """Hooks that put copies in the place of what autograd saves."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    found: AbstractContextManager[Any] = hooks(torch.clone, torch.clone)
    return found


def in_a_backward(run: Callable[[], object], *, retain: bool = False) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: run() and None)
    x.sum().backward(retain_graph=retain)


def test_a_token_and_its_copies_lead_to_their_step():
    plain = [made() for _ in range(3)]
    with copying():
        copied = [made() for _ in range(3)]
    for step in (*plain, *copied):
        token = step.token()
        assert token.numel() == 1
        assert token.device.type == "cpu"
        assert Step.of(token) is Step.of(copy.deepcopy(token)) is step
    for step in copied:
        assert Step.of(step.token().clone()) is step
    numbers = [s.number for s in (*plain, *copied)]
    assert numbers == sorted({*numbers})


def test_a_copy_of_a_token_that_no_hook_may_copy_leads_to_no_step():
    with pytest.raises(BackwardError, match="hooks on saved tensors"):
        Step.of(made().token().clone())


def test_a_token_holds_its_step_and_a_copy_does_not():
    with copying():
        step = made()
    latest_step()  # it is held until somebody has asked for it
    gone, token = weakref.ref(step), step.token()
    copied = token.clone()
    del step
    assert Step.of(copied) is gone()
    del token
    assert gone() is None
    with pytest.raises(BackwardError):
        Step.of(copied)


def test_what_was_saved_is_taken_once():
    step, counts = made(saved=2), []
    for _ in range(2):
        in_a_backward(lambda: counts.append(len(step.take())), retain=True)
    in_a_backward(lambda: counts.append(len(step.take())))
    assert counts == [2, 2, 2]
    with pytest.raises(BackwardError, match="retain_graph"):
        in_a_backward(step.take)


def test_steps_wait_until_they_are_taken_or_gone():
    flight, steps = InFlight(), [made(held_bytes=3 + i) for i in range(3)]
    for step in steps:
        flight.add(step)
    assert sorted(s.held_bytes for s in flight) == [3, 4, 5]
    in_a_backward(steps[0].take, retain=True)
    in_a_backward(steps[1].take)
    assert sorted(s.held_bytes for s in flight) == [3, 5]
    del steps, step
    assert not list(flight)


def test_results_count_as_long_as_somebody_holds_them():
    flight = InFlight()
    y, other = torch.ones(10), torch.ones(100)
    waits, done = made(outputs=(y,)), made(outputs=(other,))
    flight.add(waits)
    flight.add(done)
    nbytes = other.nbytes
    assert flight.kept_bytes([waits]) == nbytes
    assert flight.kept_bytes([]) == y.nbytes + nbytes
    view = other[3:]
    del other
    assert flight.kept_bytes([waits]) == nbytes
    del view
    assert flight.kept_bytes([waits]) == 0
    assert flight.kept_bytes([]) == y.nbytes


def test_of_numbers_that_are_held_all_but_one_of_the_latest_step_count():
    flight = InFlight()
    losses = [torch.ones(()), torch.ones(())]
    for loss in losses:
        flight.add(made(outputs=(loss,)))
    assert flight.kept_bytes([]) == losses[0].nbytes
    both = torch.ones(()), torch.ones(())
    flight.add(made(outputs=both))
    assert flight.kept_bytes([]) == losses[0].nbytes + losses[1].nbytes + both[0].nbytes


def test_gradients_that_were_asked_for_count_as_long_as_they_are_held():
    flight = InFlight()
    gradient = torch.ones(10)
    flight.returned([gradient, None])
    assert flight.kept_bytes([]) == gradient.nbytes
    del gradient
    assert flight.kept_bytes([]) == 0


def test_threads_have_their_own_steps():
    """Each goes forward and back for itself, at the same time."""
    call = compiled()
    with torch.no_grad():
        for p in call.parameters():
            p.zero_()
    x = torch.ones(ROWS, WIDTH)
    confirm_bits(call)
    rounds, count = 10, 3
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(rounds):
                losses = [call(x).sum() for _ in range(2)]
                for loss in losses:
                    loss.backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    bias = call.layers[-1].bias.grad  # half of every row's, in binary exact
    assert bias.eq(0.5 * ROWS * rounds * count * 2).all()
    assert left_bytes(run) == 0


@pytest.mark.slow
def test_ten_thousand_steps_leave_nothing():
    """Of mixed sizes; some are dropped, some fail, some overlap."""
    call = compiled(torch.tanh)
    draw = random.Random(0)
    sizes = (ROWS, ROWS // 2, 3 * ROWS // 4)
    batches = [batch(rows=n) for n in sizes]
    waiting: list[Tensor] = []

    def some(count: int) -> None:
        for _ in range(count):
            y = call(draw.choice(batches))
            match draw.randrange(5):
                case 0:
                    del y
                case 1:
                    waiting.append(y)
                case 2:
                    waiting.clear()
                case _:
                    y.sum().backward()
                    call.zero_grad(set_to_none=draw.random() < 0.5)
        waiting.clear()
        call.zero_grad()

    some(1000)
    plans, objects = len(call.plans), objects_alive()
    some(8000)
    assert left_bytes(lambda: some(1000)) == 0
    assert len(call.plans) <= max(2 * plans, 64)
    assert objects_alive() - objects < 200 * max(1, len(call.plans) - plans) + 500


def objects_alive() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor | Step) for o in gc.get_objects())
