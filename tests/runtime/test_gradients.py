"""Gradients that are handed over early: who adds what, when, and to the bit what autograd makes."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.errors import BackwardError
from fxremat.runtime.gradients import Contributors, Gradients, leaves_among, with_gradients
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded

ROWS, WIDTH, COUNT = 6, 5, 3

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")


class Rig:
    """A node of autograd's graph that multiplies by weights, each by a power of two.

    Its backward gives one gradient after the other, the last weight's first, or returns them all.

    Attributes:
        weights: what is trained.
        early: gradients are given.
        own: primals whose gradient is nobody else's; the input is the first primal.
        others: other steps are said to wait.
        there: after each gradient was given, which weights had one.
        asked: of each backward, whether somebody asked for gradients.
        dropped: gradients that nobody held any more once they were given.
        assumed: primals whose gradients hooks are assumed to take.
        untaken: of each backward with any, those that hooks did not take.
    """

    def __init__(self, *, early: bool = True) -> None:
        with seeded(0):
            self.weights = [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(COUNT)]
            self.x = torch.randn(ROWS, WIDTH)
        self.early = early
        self.own = frozenset(range(COUNT + 1))
        self.others = False
        self.contributors = Contributors()
        self.there: list[set[int]] = []
        self.asked: list[bool] = []
        self.dropped: set[int] = set()
        self.assumed: frozenset[int] = frozenset()
        self.untaken: list[frozenset[int]] = []

    def __call__(self, x: Tensor | None = None) -> Tensor:
        found: Tensor = _Product.apply(self, self.x if x is None else x, *self.weights)
        return found

    def made(self, x: Tensor, weights: Sequence[Tensor], tangent: Tensor) -> dict[int, Tensor]:
        found = {i + 1: x.t() @ tangent * (i + 1) / 3 for i in reversed(range(COUNT))}
        found[0] = sum(tangent @ w.t() * (i + 1) / 3 for i, w in enumerate(weights))
        return found

    @property
    def gradients(self) -> list[Tensor | None]:
        return [w.grad for w in self.weights]

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rig: Rig, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.rig, ctx.leaves = rig, leaves_among((x, *weights))
        ctx.save_for_backward(x, *weights)
        return sum(x @ w * (i + 1) / 3 for i, w in enumerate(weights))

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
        rig: Rig = ctx.rig
        x, *weights = ctx.saved_tensors
        made = rig.made(x, weights, tangent)
        if not rig.early:
            return (None, *(made[i] for i in range(COUNT + 1)))
        gradients = Gradients(
            [leaf if leaf is not None and leaf.requires_grad else None for leaf in ctx.leaves],
            places={i: i for i in range(COUNT + 1)},
            own=rig.own,
            contributors=rig.contributors,
            others=rig.others,
            assumed=rig.assumed,
            note_held=rig.untaken.append,
        )
        while made:
            primal = next(iter(made))
            held = weakref.ref(made[primal])
            gradients.give({primal: made.pop(primal)})
            rig.dropped |= {primal} if held() is None else set()
            rig.there.append({i for i, g in enumerate(rig.gradients) if g is not None})
        rig.asked.append(gradients.asked_for)
        return (None, *gradients.finish())


def batch(seed: int) -> Tensor:
    with seeded(seed):
        return torch.randn(ROWS, WIDTH)


def step(rig: Rig, seed: int = 0) -> None:
    rig(batch(seed)).square().sum().backward()


def taught(*, hooked: bool = False) -> Rig:
    """After a step in which every weight got one gradient, and these are gone.

    Args:
        hooked: a hook follows each accumulation.
    """
    rig = Rig()
    for weight in rig.weights if hooked else ():
        weight.register_post_accumulate_grad_hook(lambda _: None)
    step(rig)
    # The first time, autograd does it, unless a hook waits.
    assert rig.there == (IN_TURN if hooked else [set()] * (COUNT + 1))
    assert rig.contributors.sole == set(range(1, COUNT + 1))
    rig.clear()
    rig.there.clear()
    return rig


IN_TURN = [{2}, {1, 2}, {0, 1, 2}, {0, 1, 2}]


def test_gradients_for_which_hooks_wait_are_there_as_soon_as_they_are_made():
    rig = taught(hooked=True)
    step(rig)
    assert rig.there == IN_TURN


def started_unseen(loss: Tensor) -> None:
    """Go back from a loss without torch's Python code, as a program in C++ does."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def test_where_a_backward_began_unseen_the_first_is_left_to_autograd():
    rig = Rig()
    for weight in rig.weights:
        weight.register_post_accumulate_grad_hook(lambda _: None)
    started_unseen(rig(batch(0)).square().sum())
    assert rig.there == [set()] * (COUNT + 1)
    rig.clear()
    rig.there.clear()
    started_unseen(rig(batch(0)).square().sum())
    assert rig.there == IN_TURN


@pytest.mark.parametrize("where", ["in the loss", "as a root", "below the model"])
def test_hooks_see_the_sum_of_all_gradients_in_the_first_step(where: str):
    def trained(*, early: bool) -> tuple[list[Tensor], Rig]:
        rig, seen = Rig(early=early), []
        weight = rig.weights[1]
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        x = batch(0) @ weight if where == "below the model" else batch(0)
        losses = [rig(x).square().sum(), weight.square().sum()]
        if where == "as a root":
            torch.autograd.backward([losses[0], weight], [None, torch.ones_like(weight)])
        else:
            (sum(losses) if where == "in the loss" else losses[0]).backward()
        return seen, rig

    (seen, rig), (expected, other) = trained(early=True), trained(early=False)
    assert len(seen) == len(expected) == 1
    assert_bitwise_equal(seen, expected)
    assert_bitwise_equal(rig.gradients, other.gradients)


def test_first_ones_for_which_none_waits_are_left_to_autograd():
    """They would stay as well: nothing is gained."""
    rig = taught()
    step(rig)
    assert rig.there == [set()] * (COUNT + 1)
    assert rig.contributors.sole == set(range(1, COUNT + 1))


def test_one_that_exists_is_added_to_in_place():
    rig = taught()
    step(rig)
    before, values = rig.gradients, [g.clone() for g in rig.gradients]
    step(rig, 1)
    assert all(a is b for a, b in zip(before, rig.gradients, strict=True))
    assert all((a != b).any() for a, b in zip(values, rig.gradients, strict=True))


def test_none_is_copied_where_there_is_none():
    """What was made is what is there."""
    rig, places = taught(), []
    made = rig.made

    def noted(*args: Any) -> dict[int, Tensor]:
        found = made(*args)
        places.extend(found[i + 1].data_ptr() for i in range(COUNT))
        return found

    rig.made = noted  # type: ignore[method-assign]
    step(rig)
    assert [g.data_ptr() for g in rig.gradients] == places


# What a caller may do. Each is run with gradients handed over early, and as autograd does it.


def accumulated(rig: Rig) -> None:
    for seed in range(4):
        step(rig, seed)


def cleared_in_between(rig: Rig) -> None:
    for seed in range(4):
        rig.clear()
        step(rig, seed)


def set_to_zero(rig: Rig) -> None:
    for seed in range(4):
        for gradient in rig.gradients:
            if gradient is not None:
                gradient.zero_()
        step(rig, seed)


def penalty_from_the_third_step_on(rig: Rig) -> None:
    for seed in range(5):
        rig.clear()
        loss = rig(batch(seed)).square().sum()
        if seed >= 2:
            loss = loss + rig.weights[1].square().sum()
        loss.backward()


def penalty_each_time(rig: Rig) -> None:
    for seed in range(4):
        loss = rig(batch(seed)).square().sum() + rig.weights[0].square().sum()
        loss.backward()


def penalty_now_and_then(rig: Rig) -> None:
    for seed in range(6):
        loss = rig(batch(seed)).square().sum()
        if seed % 2 == 0:
            loss = loss + rig.weights[2].square().sum()
        loss.backward()


def penalty_on_what_a_step_without_one_left(rig: Rig) -> None:
    penalty_each_time(rig)
    rig.clear()
    step(rig)
    penalty_each_time(rig)


def penalty_alone(rig: Rig) -> None:
    step(rig)
    rig.weights[0].square().sum().backward()
    step(rig, 1)


def tensor_hooks(rig: Rig) -> list[Tensor]:
    seen: list[Tensor] = []
    step(rig)
    rig.weights[0].register_hook(lambda g: 2 * g)
    handle = rig.weights[1].register_hook(lambda g: seen.append(g.clone()))
    step(rig, 1)
    step(rig, 2)
    handle.remove()
    step(rig, 3)
    return seen


def several_hooked_at_once(rig: Rig) -> list[Any]:
    seen: list[Any] = []
    step(rig)
    torch.autograd.graph.register_multi_grad_hook(
        rig.weights[:2], lambda gradients: seen.append([g.clone() for g in gradients])
    )
    step(rig, 1)
    step(rig, 2)
    return seen


def hooks_of_the_node_that_accumulates(rig: Rig) -> list[Tensor]:
    """As wrappers that gather gradients have them."""
    seen: list[Tensor] = []
    weight = rig.weights[1]
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    for seed in range(3):
        step(rig, seed)
    return seen


def post_accumulate_hooks(rig: Rig) -> list[Tensor]:
    seen: list[Tensor] = []
    for weight in rig.weights:
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for seed in range(4):
        if seed == 2:
            rig.clear()
        step(rig, seed)
    seen.sort(key=lambda gradient: gradient.flatten().tolist())  # who is first may differ
    return seen


def one_hook_removed_and_another_added(rig: Rig) -> list[str]:
    seen: list[str] = []
    weight = rig.weights[0]
    first = weight.register_post_accumulate_grad_hook(lambda _: seen.append("first"))
    step(rig)
    step(rig, 1)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("second"))
    step(rig, 2)
    first.remove()
    step(rig, 3)
    return seen


def optimizer_in_the_backward(rig: Rig) -> list[Tensor]:
    def update(weight: Tensor) -> None:
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        weight.grad = None

    for weight in rig.weights:
        weight.register_post_accumulate_grad_hook(update)
    for seed in range(4):
        step(rig, seed)
    return [w.detach().clone() for w in rig.weights]


def asked_for(rig: Rig) -> list[Any]:
    accumulated(rig)
    found = [torch.autograd.grad(rig().sum(), rig.weights)]
    loss = rig().square().sum()
    found.append(torch.autograd.grad(loss, rig.weights[1:]))
    step(rig, 5)
    return found


def only_some_inputs(rig: Rig) -> None:
    step(rig)
    for seed in range(3):
        rig(batch(seed)).square().sum().backward(inputs=rig.weights[:2])
    step(rig, 5)


def retained(rig: Rig) -> None:
    step(rig)
    for seed in range(2):
        loss = rig(batch(seed)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()


def two_steps_at_once(rig: Rig) -> None:
    """Autograd sums up what both give, then adds that to what exists."""
    step(rig)
    for seed in range(3):
        rig.others = True
        one, other = rig(batch(seed)), rig(batch(seed + 7))
        (one.square().sum() + other.sin().sum()).backward()
        rig.others = False
        step(rig, seed + 20)


def with_anomalies_detected(rig: Rig) -> None:
    step(rig)
    with torch.autograd.set_detect_anomaly(True):
        step(rig, 1)
        rig.clear()
        step(rig, 2)
    step(rig, 3)


def a_transposed_weight(rig: Rig) -> list[tuple[int, ...]]:
    rig.weights[1] = rig.weights[1].detach().t().contiguous().t().requires_grad_()
    assert not rig.weights[1].is_contiguous()
    strides = []
    for seed in range(3):
        step(rig, seed)
        strides.append(rig.weights[1].grad.stride())
    return strides


def a_gradient_of_other_strides(rig: Rig) -> list[tuple[int, ...]]:
    made = rig.made

    def transposed(*args: Any) -> dict[int, Tensor]:
        return {i: g.t().contiguous().t() for i, g in made(*args).items()}

    strides = []
    for seed in range(5):
        if seed == 2:
            rig.clear()
            rig.made = transposed  # type: ignore[method-assign]
        step(rig, seed)
        strides.append(rig.weights[1].grad.stride())
    return strides


def a_gradient_that_another_holds(rig: Rig) -> Tensor:
    """As the gradient of the output, where a parameter is added to the result."""
    made, kept = rig.made, torch.ones(WIDTH, WIDTH)
    rig.own = rig.own - {2}
    rig.made = lambda *args: {**made(*args), 2: kept.clone()}  # type: ignore[method-assign]
    step(rig)
    rig.clear()
    rig.made = lambda *args: {**made(*args), 2: kept}  # type: ignore[method-assign]
    accumulated(rig)
    return kept


def a_frozen_weight(rig: Rig) -> None:
    rig.weights[1].requires_grad_(False)
    accumulated(rig)
    rig.weights[1].requires_grad_()
    accumulated(rig)


def gradients_of_the_input(rig: Rig) -> Tensor | None:
    x = batch(9).requires_grad_()
    for _ in range(3):
        rig(x).square().sum().backward()
    return x.grad


def a_shared_weight(rig: Rig) -> None:
    """It goes into the node twice."""
    rig.weights[2] = rig.weights[0]
    accumulated(rig)
    rig.clear()
    accumulated(rig)


CALLERS: list[Callable[[Rig], Any]] = [
    accumulated, cleared_in_between, set_to_zero, penalty_from_the_third_step_on,
    penalty_each_time, penalty_on_what_a_step_without_one_left, penalty_alone, tensor_hooks,
    several_hooked_at_once,
    hooks_of_the_node_that_accumulates, post_accumulate_hooks,
    one_hook_removed_and_another_added, optimizer_in_the_backward, asked_for, only_some_inputs,
    retained, two_steps_at_once, with_anomalies_detected, a_transposed_weight,
    a_gradient_of_other_strides, a_gradient_that_another_holds, a_frozen_weight,
    gradients_of_the_input, a_shared_weight, penalty_now_and_then,
]  # fmt: skip


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
def test_the_bits_are_those_of_autograd(caller: Callable[[Rig], Any]):
    found = []
    for early in (False, True):
        rig = Rig(early=early)
        returned = caller(rig)
        found.append((returned, rig.gradients, rig.weights))
    assert_bitwise_equal(found[1], found[0])


def test_a_weight_that_others_give_a_gradient_is_left_to_autograd_from_then_on():
    rig = taught()
    for seed in range(3):
        rig.clear()
        (rig(batch(seed)).sum() + rig.weights[1].sum()).backward()
        assert rig.contributors.sole == {1, 3}
        assert rig.contributors.joined == {2}
    for weight in rig.weights[::2]:
        weight.register_post_accumulate_grad_hook(lambda _: None)
    rig.clear()
    rig.there.clear()
    (rig(batch(3)).sum() + rig.weights[1].sum()).backward()
    assert rig.there == [{2}, {2}, {0, 2}, {0, 2}]


def test_steps_of_one_backward_are_left_to_autograd():
    rig = taught(hooked=True)
    rig.others = True
    (rig(batch(0)).sum() + rig(batch(1)).sum()).backward()
    assert rig.there == [set()] * (2 * COUNT + 2)
    rig.others = False
    rig.clear()
    rig.there.clear()
    step(rig)
    assert rig.there == IN_TURN


def test_the_last_of_several_steps_knows_of_the_others():
    """No other waits any more when it begins, yet autograd sums up."""
    rig = taught(hooked=True)
    made, waiting = rig.made, [True, False]

    def told(*args: Any) -> dict[int, Tensor]:
        rig.others = waiting.pop(0)
        return made(*args)

    rig.made = told  # type: ignore[method-assign]
    (rig(batch(0)).sum() + rig(batch(1)).sum()).backward()
    assert not waiting
    assert rig.there == [set()] * (2 * COUNT + 2)


def test_hooks_see_the_whole_gradient_each_time_once():
    rig = taught()
    rig.there.clear()
    seen: list[Tensor] = []
    rig.weights[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for seed in range(3):
        rig.clear()
        step(rig, seed)
        assert len(seen) == seed + 1
        assert_bitwise_equal(seen[-1], rig.weights[1].grad)


def test_hooks_run_when_the_gradient_is_there():
    rig, when = taught(), []
    rig.weights[2].register_post_accumulate_grad_hook(lambda _: when.append(len(rig.there)))
    step(rig)
    step(rig)
    assert when == [0, COUNT + 1]


def test_a_gradient_that_joins_after_the_hooks_is_an_error_and_then_is_not():
    rig = taught()
    seen: list[Tensor] = []
    rig.weights[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step(rig)
    rig.clear()

    def joined() -> Tensor:
        return rig(batch(1)).square().sum() + rig.weights[1].square().sum()

    with pytest.raises(BackwardError, match=f"(?s){WIDTH}, {WIDTH}.*FXR707"):
        started_unseen(joined())
    rig.clear()
    seen.clear()
    started_unseen(joined())
    (only,) = seen
    assert_bitwise_equal(only, rig.weights[1].grad)
    others = Rig(early=False)
    (others(batch(1)).square().sum() + others.weights[1].square().sum()).backward()
    assert_bitwise_equal(rig.gradients, others.gradients)


def test_what_nobody_asked_for_goes_at_once():
    rig = taught()
    rig().sum().backward(inputs=rig.weights[:1])
    assert [g is None for g in rig.gradients] == [False, True, True]
    assert rig.dropped >= {2, 3}


def test_hooks_may_take_the_gradient_from_the_first_step_on():
    rig, when = Rig(), []

    def take(weight: Tensor) -> None:
        when.append(len(rig.there))
        weight.grad = None

    rig.weights[2].register_post_accumulate_grad_hook(take)
    for _ in range(3):
        step(rig)
    each = COUNT + 1
    assert when == [0, each, 2 * each]  # with the first gradient
    assert rig.contributors.taken == {3}
    assert not rig.contributors.held


def test_whoever_assumed_that_hooks_take_gradients_learns_of_those_they_left():
    rig = Rig()
    for weight in rig.weights:
        weight.register_post_accumulate_grad_hook(lambda _: None)
    rig.weights[2].register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
    rig.assumed = frozenset({2, 3})
    step(rig)
    assert rig.untaken == [{2}]
    assert rig.contributors.held == {1, 2}
    assert rig.contributors.taken == {3}


def test_whoever_assumed_it_learns_of_gradients_that_hooks_got_late():
    rig = Rig()
    rig.weights[1].register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
    rig.assumed = frozenset({2})
    with torch.autograd.detect_anomaly():
        step(rig)
    assert rig.untaken == [{2}]
    assert rig.contributors.held == {2}


def test_a_gradient_of_no_number_is_found_where_anomalies_are_detected():
    rig = taught()
    with torch.no_grad():
        rig.x.fill_(torch.nan)
    loss = rig(rig.x).sum()
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RuntimeError, match="nan"),
    ):
        loss.backward()


def test_who_asks_for_gradients_gets_them_and_no_leaf_does():
    rig = taught()
    found = torch.autograd.grad(rig().sum(), rig.weights)
    assert all(isinstance(g, Tensor) for g in found)
    assert rig.gradients == [None] * COUNT
    step(rig)
    assert rig.asked == [False, True, False]


def test_an_error_of_a_hook_comes_out_and_the_next_step_is_whole():
    rig = taught()

    def fail(_weight: Tensor) -> None:
        raise ZeroDivisionError

    handle = rig.weights[1].register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError):
        step(rig)
    handle.remove()
    rig.clear()
    step(rig)
    others = Rig(early=False)
    step(others)
    assert_bitwise_equal(rig.gradients, others.gradients)


def hooks_of(weight: Tensor) -> list[Any]:
    return list((weight._post_accumulate_grad_hooks or {}).values())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_hooks_are_the_users_own_after_each_backward(steps: int):
    """Also while gradients are learned of, and for those who copy a weight meanwhile."""
    rig = Rig()
    copies: list[Tensor] = []

    def hook(weight: Tensor) -> None:
        copies.append(copy.deepcopy(weight))
        copies.append(pickle.loads(pickle.dumps(weight)))

    for weight in rig.weights:
        weight.register_post_accumulate_grad_hook(hook)
    for seed in range(steps):
        step(rig, seed)
        assert [hooks_of(weight) for weight in rig.weights] == [[hook]] * COUNT
    assert len(copies) == 2 * COUNT * steps
    assert not any(hooks_of(weight) for weight in copies)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_hooks_are_the_users_own_after_a_backward_that_has_raised(steps: int):
    rig = Rig()
    wrong = [False]

    def hook(_weight: Tensor) -> None:
        if wrong[0]:
            raise ZeroDivisionError

    for weight in rig.weights:
        weight.register_post_accumulate_grad_hook(hook)
    for seed in range(steps):
        step(rig, seed)
    wrong[0] = True
    with pytest.raises(ZeroDivisionError):
        step(rig)
    assert [hooks_of(weight) for weight in rig.weights] == [[hook]] * COUNT


def test_hooks_run_once_a_backward_though_another_thread_goes_back_meanwhile():
    rig, seen = taught(), []
    losses = [rig(batch(seed)).sum() for seed in range(2)]

    def take(weight: Tensor) -> None:
        seen.append(threading.get_ident())
        weight.grad = None

    def take_when_another_has_ended(weight: Tensor) -> None:
        if losses:
            thread = threading.Thread(target=losses.pop().backward)
            thread.start()
            thread.join()
        weight.grad = None

    rig.weights[2].register_post_accumulate_grad_hook(take)
    rig.weights[1].register_post_accumulate_grad_hook(take_when_another_has_ended)
    losses.pop().backward()
    assert not losses
    assert len(seen) == len(set(seen)) == 2
    assert hooks_of(rig.weights[1]) == [take_when_another_has_ended]
    assert hooks_of(rig.weights[2]) == [take]


def test_threads_that_go_back_through_the_same_leaves_lose_nothing():
    """Sums of whole numbers are the same in any order."""
    rig = taught()
    rig.made = lambda x, _w, g: {i: x.t() @ g for i in (3, 2, 1)}  # type: ignore[method-assign]
    rounds, count = 100, 4
    sums: list[list[Tensor | None]] = []
    losses = [rig(torch.ones(ROWS, WIDTH)).sum() for _ in range(rounds * count)]

    def clear() -> None:
        rig.clear()
        rig.contributors = Contributors(sole={1, 2, 3})

    begin = threading.Barrier(count, action=clear)
    end = threading.Barrier(count, action=lambda: sums.append(rig.gradients))

    def run() -> None:
        for _ in range(rounds):
            begin.wait()
            losses.pop().backward()
            end.wait()

    threads = [threading.Thread(target=run) for _ in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(sums) == rounds
    for gradient in (g for found in sums for g in found):
        assert gradient is not None
        assert gradient.eq(count * ROWS).all()


class Special(Tensor):
    """Has its own ways."""


def test_leaves_are_told_from_all_else():
    plain = torch.ones(2)
    leaves = [plain, torch.ones(2, requires_grad=True), torch.nn.Parameter(plain)]
    assert all(a is b for a, b in zip(leaves_among(leaves), leaves, strict=True))
    computed = 2 * torch.ones(2, requires_grad=True)
    assert leaves_among([computed, plain.as_subclass(Special), 7, None]) == [None] * 4


def test_leaves_with_gradients_are_told():
    leaves = [torch.ones(2, requires_grad=True) for _ in range(3)]
    leaves[1].sum().backward()
    assert with_gradients([None, *leaves]) == {2}


def test_who_still_holds_a_backward_that_has_ended_holds_no_gradient(monkeypatch: Any):
    """Autograd's thread may do so, for longer than ``backward()`` takes."""
    held: list[Callable[[], None]] = []
    queue = torch_compat.after_backward

    def after_backward(callback: Callable[[], None]) -> None:
        held.append(callback)
        queue(callback)

    monkeypatch.setattr(torch_compat, "after_backward", after_backward)
    rig = Rig()
    for _ in range(3):
        rig().sum().backward()
        made = [weakref.ref(gradient) for gradient in rig.gradients]
        rig.clear()
        assert held and not any(gradient() is not None for gradient in made)
