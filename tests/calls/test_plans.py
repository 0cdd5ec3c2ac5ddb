"""Plans of one captured graph: which one a call gets, and what a refusal leaves behind."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import BudgetError, BudgetWarning
from fxremat.graph import calls
from fxremat.graph.graph import Graph
from fxremat.module.compiled import CompiledModule
from fxremat.planner.search.bound import Relaxation
from fxremat.report.plan import Plan
from tests.efforts import WHOLE
from tests.models.bits import assert_bitwise_equal
from tests.models.zoo import seeded

ROWS, WIDTH, LAYERS = 64, 16, 8
OUTPUT_BYTES = ROWS * WIDTH * 4

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")


def batch(seed: int = 0) -> Tensor:
    with seeded(seed):
        return torch.randn(ROWS, WIDTH)


def model(*, norms: bool = False, width: int = WIDTH, layers: int = LAYERS) -> nn.Sequential:
    with seeded(0):
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.GELU()]
            parts += [nn.BatchNorm1d(width), nn.Dropout(0.1)] if norms else []
        return nn.Sequential(*parts)


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum()


def roomy(**options: object) -> CompiledModule:
    """Nothing that follows is too much."""
    return fxremat.compile(model(), batch(), "16 MiB", loss=loss_of, **options)


def tight(share: float = 1.0, **options: object) -> CompiledModule:
    """Within a share of what a step alone takes with everything kept."""
    strict = {"loss": loss_of, "assume": "strict"}
    full = fxremat.plan(model(), batch(), 1.0, **strict).budget_bytes
    torch._dynamo.reset()
    return fxremat.compile(model(), batch(), int(share * full), **strict, **options)


def back(call: CompiledModule, seed: int = 0) -> None:
    loss_of(call(batch(seed))).backward()


def cleared(call: CompiledModule) -> None:
    """A step without gradients, after two that may teach."""
    for _ in range(3):
        call.zero_grad()
        back(call)
    call.zero_grad()


def gradient_bytes(call: CompiledModule) -> int:
    return sum(p.nbytes for p in call.parameters())


def beside(plan: Plan) -> int:
    return sum(nbytes for _, nbytes in plan.also_held)


def recomputes(call: CompiledModule) -> bool:
    """Whether the latest step takes longer for its memory."""
    return call.plan.predicted_s > call.plan.baseline_s


def test_the_first_plan_is_that_of_a_step_alone():
    call = tight()
    assert len(call.plans) == 1
    cleared(call)
    assert len(call.plans) == 1
    assert not call.plan.also_held
    assert not recomputes(call)


def test_where_there_is_room_one_plan_is_for_all():
    call = roomy()
    alone = call.plan
    kept = [call(batch(seed)) for seed in range(4)]
    for y in kept:
        y.sum().backward()
    back(call)
    assert {plan.schedule for plan in call.plans} == {alone.schedule}


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
def test_a_plan_is_for_all_only_while_there_is_room():
    """However little each call finds more than the call before."""
    alone = fxremat.plan(model(), batch(), 1.0, loss=loss_of)
    torch._dynamo.reset()
    budget = alone.budget_bytes + 5 * alone.waiting_bytes // 2
    call = fxremat.compile(model(), batch(), budget, loss=loss_of)

    def wait(count: int) -> None:
        call.zero_grad()
        for y in [call(batch(seed)) for seed in range(count)]:
            loss_of(y).backward()

    for count in range(1, 5):
        wait(count)  # more may be learned, and is warned of
        assert fxremat.measure_step(call, functools.partial(wait, count)).peak_bytes <= budget
    assert recomputes(call)


def is_as(plan: fxremat.Plan, other: fxremat.Plan) -> bool:
    """Whether both are one plan, whatever was measured of it meanwhile."""
    return replace(plan, measured_peak_bytes=None) == replace(other, measured_peak_bytes=None)


def test_gradients_that_exist_are_counted_while_they_do():
    call = tight()
    cleared(call)
    alone = call.plan
    back(call)
    assert is_as(call.plan, alone)
    back(call)
    assert beside(call.plan) == gradient_bytes(call)
    assert recomputes(call)
    with_gradients = call.plan
    call.zero_grad()
    back(call)
    assert is_as(call.plan, alone)
    back(call)
    assert is_as(call.plan, with_gradients)
    for p in list(call.parameters())[2:]:
        p.grad = None
    call(batch())
    assert beside(call.plan) == sum(p.nbytes for p in list(call.parameters())[:2])


def test_how_fast_a_step_could_be_is_found_when_somebody_looks(monkeypatch: pytest.MonkeyPatch):
    """Linear programs would be solved in the step else."""
    asked: list[int] = []
    least_s = Relaxation.least_s
    monkeypatch.setattr(Relaxation, "least_s", lambda x, n: asked.append(n) or least_s(x, n))
    call = tight(0.99)
    cleared(call)
    asked.clear()
    for _ in range(2):
        back(call)
    assert not asked
    plan = call.plan
    assert asked == [plan.budget_bytes]
    assert plan.baseline_s < plan.lower_bound_s <= plan.predicted_s
    assert plan.memory.count
    assert is_as(call.plan, plan)
    assert len(asked) == 1


def test_gradients_that_are_added_to_need_no_second_set():
    """Else the end of the backward would hold both."""
    call = wide("16 MiB")
    largest = max(p.nbytes for p in call.parameters())
    for _ in range(3):
        call.zero_grad()
        call(wide_batch()).sum().backward()
    assert len(call.plans) == 1
    alone = call.plan
    for _ in range(2):
        call(wide_batch()).sum().backward()
    more = call.plan.predicted_peak_bytes - alone.predicted_peak_bytes
    assert beside(call.plan) == gradient_bytes(call)
    assert more < 2 * largest < gradient_bytes(call)


def test_who_will_accumulate_has_them_counted_from_the_start():
    call = tight(accumulate=True)
    assert beside(call.plan) == gradient_bytes(call)
    cleared(call)
    assert beside(call.plan) == gradient_bytes(call)


def test_steps_that_wait_are_counted_until_their_backward():
    call = tight(1.5)
    cleared(call)
    alone = call.plan
    first = loss_of(call(batch(1)))
    assert is_as(call.plan, alone)
    second = loss_of(call(batch(2)))
    one_waits = call.plan
    assert recomputes(call)
    assert beside(one_waits) >= alone.waiting_bytes > OUTPUT_BYTES
    del second
    again = loss_of(call(batch(2)))
    assert is_as(call.plan, one_waits)
    (first + again).backward()
    call.zero_grad()
    back(call)
    assert call.plan.schedule == alone.schedule
    first = loss_of(call(batch(1)))
    first.backward(retain_graph=True)  # it may go back again, and holds all
    call.zero_grad()
    call(batch(2))
    assert beside(call.plan) >= alone.waiting_bytes


def test_results_that_are_held_are_counted_until_they_are_dropped():
    call = tight()
    cleared(call)
    alone = call.plan
    y = call(batch())
    loss_of(y).backward()
    call.zero_grad()
    call(batch())
    assert beside(call.plan) == OUTPUT_BYTES
    assert recomputes(call)
    view = y[3:5]
    del y
    call(batch())
    assert beside(call.plan) == OUTPUT_BYTES
    del view
    call(batch())
    assert is_as(call.plan, alone)


def test_gradients_that_were_asked_for_are_counted_while_they_are_held():
    call = tight()
    cleared(call)
    alone = call.plan
    kept = torch.autograd.grad(loss_of(call(batch())), list(call.parameters()))
    call(batch())
    assert beside(call.plan) == gradient_bytes(call)
    del kept
    call(batch())
    assert is_as(call.plan, alone)


LOOPS: dict[str, Callable[[CompiledModule, int], None]] = {}


def loop(run: Callable[[CompiledModule, int], None]) -> Callable[[CompiledModule, int], None]:
    LOOPS[run.__name__] = run
    return run


@loop
def plain(call: CompiledModule, seed: int) -> None:
    call.zero_grad()
    back(call, seed)


@loop
def tutorial(call: CompiledModule, seed: int) -> None:
    loss = loss_of(call(batch(seed)))
    call.zero_grad()
    loss.backward()


@loop
def set_to_zero(call: CompiledModule, seed: int) -> None:
    call.zero_grad(set_to_none=False)
    back(call, seed)


@loop
def accumulated(call: CompiledModule, seed: int) -> None:
    call.zero_grad()
    for part in range(3):
        back(call, 3 * seed + part)


@loop
def two_forwards(call: CompiledModule, seed: int) -> None:
    call.zero_grad()
    one, other = call(batch(seed)), call(batch(seed + 9))
    loss_of(one - other).backward()


@loop
def one_kept(call: CompiledModule, seed: int) -> None:
    call.zero_grad()
    y = call(batch(seed))
    loss_of(y).backward()
    call.kept = y.detach()


@pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)
def test_what_was_met_before_is_not_planned_again(
    run: Callable[[CompiledModule, int], None], caplog: pytest.LogCaptureFixture
):
    call = tight(1.5 if run is two_forwards else 1.0)
    for seed in range(4):
        run(call, seed)
    count = len(call.plans)
    with caplog.at_level(logging.INFO, "fxremat"):
        for seed in range(4, 10):
            run(call, seed)
    assert len(call.plans) == count
    assert not any("new plan" in message for message in caplog.messages)


def test_there_are_only_so_many_plans(monkeypatch: pytest.MonkeyPatch):
    """Those that are used stay; which was used longest ago goes."""
    monkeypatch.setattr(calls, "MOST_PLANS", 4)
    call = tight()
    cleared(call)
    alone = call.plan
    leaves = list(call.parameters())
    seen = []
    for count in range(1, 9):
        for p in leaves[:count]:  # other gradients exist each time
            p.grad = torch.zeros_like(p)
        call(batch())
        seen.append(call.plan)
        call.zero_grad()
        call(batch())
        assert is_as(call.plan, alone)
        assert len(call.plans) <= 4
    assert len(set(map(id, seen))) == 8
    assert {*map(id, call.plans)} == {*map(id, [alone, *seen[-3:]])}


def test_every_new_plan_is_told_of_in_one_line(caplog: pytest.LogCaptureFixture):
    call = tight()
    cleared(call)
    before = len(call.plans)

    def lines() -> list[str]:
        told = (record.getMessage() for record in caplog.records if record.name == "fxremat")
        return [line for line in told if "plan:" in line]

    with caplog.at_level(logging.INFO, logger="fxremat"):
        back(call)
        assert not lines()
        back(call)
        back(call)
    new, told = len(call.plans) - before, lines()
    assert new >= 1
    assert len(told) == new
    assert all("\n" not in line for line in told)
    assert any("gradients that exist" in line for line in told)


# Budgets that not everything fits into.


@contextmanager
def budget_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[warnings.WarningMessage] = []
        yield found
    found += [w for w in caught if issubclass(w.category, BudgetWarning)]


def wide(budget: int | str, **options: object) -> CompiledModule:
    """Gradients weigh more than activations."""
    with seeded(0):
        x = torch.randn(4, 128)
    return fxremat.compile(model(width=128, layers=4), x, budget, loss=torch.sum, **options)


def wide_batch() -> Tensor:
    return torch.ones(4, 128)


def nearly_least() -> int:
    """Not enough for a gradient beside those that exist."""
    found = wide("min").plan.budget_bytes + 32 * 1024
    torch._dynamo.reset()
    return found


def test_gradients_that_will_be_gone_need_not_fit():
    """As in torch's own tutorial: they are cleared between forward and backward."""
    call = wide(nearly_least())
    with budget_warnings() as told:
        for _ in range(4):
            loss = call(wide_batch()).sum()
            call.zero_grad()
            loss.backward()
    assert not told


def test_those_that_stay_are_warned_of_and_then_must_fit():
    budget = nearly_least()
    call = wide(budget, strict=True)
    call(wide_batch()).sum().backward()
    with budget_warnings() as told:
        call(wide_batch()).sum().backward()
    assert told
    with pytest.raises(BudgetError) as caught:
        for _ in range(2):
            call(wide_batch())
    least = caught.value.least_budget_bytes
    assert least is not None
    assert least > budget
    call.zero_grad()
    call(wide_batch()).sum().backward()
    torch._dynamo.reset()
    call = wide(least)
    with budget_warnings() as told:
        for _ in range(5):
            call(wide_batch()).sum().backward()
    assert not told


def steps_at_once(call: CompiledModule, most: int) -> list[Tensor]:
    """Losses of so many forwards, or of those before one is refused."""
    losses: list[Tensor] = []
    for seed in range(most):
        try:
            losses.append(loss_of(call(batch(seed))))
        except BudgetError as error:
            assert error.least_budget_bytes is not None
            assert error.least_budget_bytes > call.plans[0].budget_bytes
            break
    return losses


def state_of(own: nn.Module) -> tuple[object, ...]:
    """Statistics, gradients and where the generator is."""
    gradients = [p.grad for p in own.parameters()]
    return copy.deepcopy((own.state_dict(), gradients, torch.get_rng_state()))


def backs(losses: list[Tensor]) -> None:
    while losses:
        losses.pop(0).backward()


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
def test_a_refusal_comes_before_anything_runs_and_leaves_nothing_behind():
    """What waits goes back as if nothing had been asked for; statistics and draws stay."""
    own = model(norms=True)
    call = fxremat.compile(own, batch(), 1.0, loss=loss_of, strict=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        losses = steps_at_once(call, 100)
        count = len(losses)
        assert 1 <= count < 100
        backs(losses)
        found = state_of(own)
    call.zero_grad()
    back(call)
    torch._dynamo.reset()
    own = model(norms=True)
    plain = torch.compile(own, backend="aot_eager", fullgraph=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backs([loss_of(plain(batch(seed))) for seed in range(count)])
        expected = state_of(own)
    assert_bitwise_equal(found, expected)


def test_room_for_others_never_forbids_a_step_alone():
    call = fxremat.compile(model(), batch(), 1.0, loss=loss_of, strict=True)
    for _ in range(3):
        with budget_warnings():
            backs(steps_at_once(call, 100))
        call.zero_grad()
        back(call)
        call.zero_grad()


@pytest.mark.filterwarnings("ignore::fxremat.BudgetWarning")
def test_who_waits_leaves_room_once_it_is_known_that_others_follow():
    """The first time nobody knew; then the first step takes less, so that both fit."""
    least = fxremat.plan(model(), batch(), "min", loss=loss_of).budget_bytes
    torch._dynamo.reset()
    call = fxremat.compile(model(), batch(), int(1.6 * least), loss=loss_of)
    plans = []
    for _ in range(4):
        call.zero_grad()
        first = loss_of(call(batch(1)))
        plans.append(call.plan)
        second = loss_of(call(batch(2)))
        plans.append(call.plan)
        (first + second).backward()
    assert plans[-2] is plans[-4]
    assert plans[-1] is plans[-3]
    for plan in plans[-2:]:
        assert plan.counted_bytes <= call.plans[0].budget_bytes
    assert plans[-2].waiting_bytes <= plans[0].waiting_bytes


def test_the_budget_stays_that_of_the_first_plan():
    """A share, or the least, is taken of the first step; later plans keep to its bytes."""
    call = fxremat.compile(model(), batch(), 1.0)
    budget = call.plan.budget_bytes
    for _ in range(3):
        back(call)
    assert {plan.budget_bytes for plan in call.plans} == {budget}
    assert all(plan.counted_bytes <= budget for plan in call.plans)


def test_the_least_is_what_a_later_call_needs_at_the_least():
    call = fxremat.compile(model(), batch(), "min", loss=loss_of)
    first = call.plan.budget_bytes
    kept = [call(batch(seed)) for seed in range(3)]
    more = call.plan.budget_bytes
    assert first < more == call.plan.counted_bytes
    for outputs in kept:
        loss_of(outputs).backward()
    call.zero_grad()
    back(call)
    assert call.plan.budget_bytes <= more


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_ten_thousand_steps_leave_nothing_behind():
    """Of ten sizes in random order; some are dropped, some raise, some are held for a while."""
    call, draw = roomy(), random.Random(0)
    optimizer = torch.optim.SGD(call.parameters(), 1e-3)
    held: list[Tensor] = []
    found: list[tuple[int, int]] = []
    for number in range(10_000):
        rows = draw.choice([64, 32, 48, 17, 5, 60, 33, 2, 63, 50])
        outputs = call(torch.randn(rows, WIDTH))
        chance = draw.random()
        if chance < 0.05:
            held = [outputs, *held[:1]]
        if chance < 0.2:
            continue
        optimizer.zero_grad(set_to_none=chance < 0.8)
        loss_of(outputs).backward()
        optimizer.step()
        if number % 1000 == 999:
            gc.collect()
            found.append((resident_bytes(), len(call.plans)))
    assert found[-1][0] - found[1][0] < 4 << 20
    assert found[-1][1] <= 2 * found[1][1]
    del outputs
    held.clear()
    gc.collect()
    assert not any(call._training.loop.in_flight)


def test_what_is_found_is_explained():
    call = tight()
    cleared(call)
    back(call)
    back(call)
    assert "gradients that exist" in call.plan.explain()


def test_a_plan_from_before_a_correction_gives_up_its_host_memory():
    layers = [nn.Linear(*sizes) for _ in range(4) for sizes in ((64, 256), (256, 64))]
    own = nn.Sequential(*layers)
    x = torch.randn(512, 64)
    call = fxremat.compile(own, x, "min", loss=torch.sum, offload="only", effort=WHOLE)
    for _ in range(4):
        call(x).sum().backward()
        call.zero_grad()
    plans, limit = call.plans, call._training.options.host.limit
    assert sum(plan.host_bytes > 0 for plan in plans) > 1, "it was not planned again"
    assert limit.allocated_bytes == plans[-1].host_bytes


@pytest.mark.parametrize("forwards", [1, 2])
def test_steps_like_the_ones_before_add_up_no_gradients(forwards: int):
    call = roomy()

    def step() -> None:
        # Gradients exist when a forward begins, or come before its backward.
        call.zero_grad(set_to_none=forwards == 2)
        for loss in [loss_of(call(batch(seed))) for seed in range(forwards)]:
            loss.backward()

    for _ in range(6):
        step()
    with (
        mock.patch.object(Graph, "held") as held,
        mock.patch.object(Graph, "gradient_bytes") as gradient_bytes,
    ):
        for _ in range(3):
            step()
    assert not held.called
    assert not gradient_bytes.called


def test_plans_of_many_sizes_share_host_memory():
    """At most twice what the largest needs; forwards before backwards have memory of their own."""
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes) for _ in range(2) for sizes in ((16, 64), (64, 16))]
    own = nn.Sequential(*layers)
    plain = copy.deepcopy(own)
    call = fxremat.compile(own, torch.randn(64, 16), "min", offload="only", effort=WHOLE)
    limit, rows = call._training.options.host.limit, [40, 88, 48, 80, 56, 72, 64]

    def gradients(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        for loss in [model(batch).square().sum() for batch in batches]:
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def same(batches: list[Tensor]) -> bool:
        return all(map(torch.equal, gradients(call, batches), gradients(plain, batches)))

    for number in rows:
        assert same([torch.randn(number, 16)])
    assert len([plan for plan in call.plans if plan.host_bytes]) > 3
    assert limit.allocated_bytes <= 2 * max(plan.host_bytes for plan in call.plans)
    for pair in itertools.pairwise(rows):
        assert same([torch.randn(number, 16) for number in pair])
    assert limit.allocated_bytes <= 4 * max(plan.host_bytes for plan in call.plans)

    def fails(gradient: Tensor) -> None:
        raise ZeroDivisionError

    loss = call(torch.randn(40, 16))
    loss.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        loss.sum().backward()
    del loss
    assert limit.lent_bytes == 0
    assert same([torch.randn(88, 16)])
