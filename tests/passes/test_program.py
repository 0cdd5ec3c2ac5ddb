"""Programs compute what the traced graph does, whatever the schedule, and hold no more than it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import pytest
from torch import fx

from fxremat.errors import ScheduleError
from fxremat.ir import Backward, Compute, Forward, Keep, Schedule
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.emit.rewrite import BlockModules
from fxremat.passes.stages.block import Mode
from tests.harness import Captured, captured, periodic, random_schedule, run_emitted, run_traced
from tests.models import ZOO
from tests.models.bits import assert_bitwise_equal, bitwise_equal

every_model = pytest.mark.parametrize("name", ZOO)
some_models = pytest.mark.parametrize("name", ["gpt", "buffers", "outputs", "wavenet", "siamese"])


def schedules(count: int) -> dict[str, Schedule]:
    """Everything kept, nearly nothing kept, and in between."""
    return {
        "keep_all": keep_all(count),
        "periodic1": periodic(count, 1),
        "periodic4": periodic(count, 4),
        **{f"random{seed}": random_schedule(count, seed) for seed in range(3)},
    }


@every_model
def test_any_schedule_gives_the_same_bits(name: str):
    step = captured(name)
    truth = run_traced(step)
    modules = BlockModules()
    for label, schedule in schedules(len(step.line.stages)).items():
        ran = run_emitted(step, step.program(schedule), modules=modules)
        assert bitwise_equal(ran, truth), label
        assert_bitwise_equal(ran, truth)


@pytest.mark.parametrize("name", [n for n, entry in ZOO.items() if entry.draws])
def test_another_seed_gives_other_bits(name: str):
    step = captured(name)
    program = step.program(periodic(len(step.line.stages), 3))
    first, second = (run_emitted(step, program, seed=seed) for seed in (1, 2))
    assert not bitwise_equal(first.gradients, second.gradients)
    assert_bitwise_equal(second, run_traced(step, seed=2))


def test_recomputing_more_than_needed_changes_nothing():
    step = captured("gpt")
    count = len(step.line.stages)
    again = [Forward(i, Keep.NONE) for i in range(count)]
    program = step.program(Schedule((*again, *again, *keep_all(count))))
    assert_bitwise_equal(run_emitted(step, program), run_traced(step))
    # Only the last run of a stage gives anything that is read: the others are not emitted,
    # but for the first, which draws.
    assert all(call.op.stage < count for call in program.calls)
    assert len(program.calls) <= 3 * count


@some_models
def test_every_output_is_read_later_and_every_input_was_given(name: str):
    step = captured(name)
    for schedule in schedules(len(step.line.stages)).values():
        program = step.program(schedule)
        uses = Uses(program)
        available = {*step.joint.given, *step.joint.tangents}
        for index, call in enumerate(program.calls):
            assert available.issuperset(call.block.inputs), call.op
            for node in call.block.outputs:
                assert uses.read_later(index, node), f"{node} of call {index} ({call.op})"
            available.update(call.block.outputs)
        assert available.issuperset(results_of(program))


@some_models
def test_kept_storages_are_those_read_later(name: str):
    step = captured(name)
    table = step.joint.storages
    always = table.of((*step.joint.given, *step.joint.tangents)) - step.joint.released
    for schedule in schedules(len(step.line.stages)).values():
        program = step.program(schedule)
        uses = Uses(program)
        alive = {*step.joint.given, *step.joint.tangents}
        for index, call in enumerate(program.calls):
            alive = {n for n in (*alive, *call.block.inputs) if uses.outlives(index, n)}
            held = table.of(alive) | always
            assert call.kept == table.of(call.block.inputs) & held, f"call {index} ({call.op})"
            alive.update(call.block.outputs)


@some_models
def test_the_turn_is_where_the_backward_begins(name: str):
    step = captured(name)
    last = len(step.line.stages) - 1
    for schedule in schedules(last + 1).values():
        program = step.program(schedule)
        before, after = program.calls[: program.loss_point], program.calls[program.loss_point :]
        assert all(isinstance(call.op, Forward) for call in before)
        ops = schedule.computations
        loss_point = ops.index(Backward(last))
        assert _is_part([call.op for call in before], ops[:loss_point])
        assert _is_part([call.op for call in after], ops[loss_point:])
        if not step.line.ends_at_loss_point:
            assert after[0].op == Backward(last)
        backwards = [call.op.stage for call in after if isinstance(call.op, Backward)]
        # A stage without gradients, or whose gradients nobody reads, has no backward to call.
        assert backwards == sorted(set(backwards), reverse=True)
        idle = set(range(last + 1)) - set(backwards)
        assert not any(n in results_of(program) for i in idle for n in step.line.stages[i].backward)
        read = {n for call in after for n in call.block.inputs}
        made = {n for call in before for n in call.block.outputs}
        assert set(program.saved) <= read | results_of(program)
        assert set(program.saved) <= made | set(step.joint.primals)
        assert len(set(program.saved)) == len(program.saved)


def _is_part(found: Iterable[Compute], ops: Iterable[Compute]) -> bool:
    """Whether all of ``found`` are among ``ops``, in the same order."""
    waiting = iter(ops)
    return all(op in waiting for op in found)


def test_a_loss_outside_finds_nothing_that_can_be_rebuilt():
    """Every stage may run again after the loss point, the last one with operations too."""
    step = captured("inplace")
    count = len(step.line.stages)
    assert step.line.ends_at_loss_point
    forwards = [Forward(0, Keep.INPUT), *(Forward(i, Keep.NONE) for i in range(1, count - 1))]
    loss_point = [Forward(count - 1, Keep.ALL), Backward(count - 1)]
    program = step.program(Schedule((*forwards, *loss_point, *keep_all(count - 1))))
    assert_bitwise_equal(run_emitted(step, program), run_traced(step))
    assert {*program.saved} <= {*step.joint.given, *step.line.pinned}
    again = [c.op.stage for c in program.calls[program.loss_point :] if isinstance(c.op, Forward)]
    assert max(again) == count - 2


def test_a_stage_draws_and_counts_once():
    """Statistics and generators move in the first forward, whatever comes after."""
    step = captured("gpt")
    program = step.program(periodic(len(step.line.stages), 3))
    seen: set[int] = set()
    for call in program.calls:
        if isinstance(call.op, Forward):
            first = call.op.stage not in seen
            assert call.block.mode is (Mode.FIRST if first else Mode.AGAIN)
            seen.add(call.op.stage)


def test_rebuilds_are_followed_by_their_backward():
    step = captured("hf_llama")
    program = step.program(random_schedule(len(step.line.stages), 5))
    pairs = list(pairwise(program.calls))
    assert any(call.rebuilds for call in program.calls)
    for call, following in pairs:
        expected = call.block.mode is Mode.AGAIN and following.op == Backward(call.op.stage)
        assert call.rebuilds == expected


def test_keep_all_recomputes_nothing():
    step = captured("hf_llama")
    count = len(step.line.stages)
    program = step.program(keep_all(count))
    ran = [str(call.op) for call in program.calls]
    assert ran == [str(op) for op in keep_all(count) if str(op) in ran]
    assert len(ran) > 1.5 * count
    assert not any(call.block.mode is Mode.AGAIN for call in program.calls)


def test_a_schedule_without_a_forward_is_refused():
    step = captured("gpt")
    count = len(step.line.stages)
    ops = tuple(op for op in keep_all(count) if op != Forward(3, Keep.ALL))
    with pytest.raises(ScheduleError, match="is read but no operation computes it"):
        step.program(Schedule(ops))


class Uses:
    """For each tensor the calls that read it or give it anew, in order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._results = results_of(program)
        self._uses: dict[fx.Node, list[tuple[int, bool]]] = defaultdict(list)
        for index, call in enumerate(program.calls):
            for node in call.block.inputs:
                self._uses[node].append((index, True))
            for node in call.block.outputs:
                self._uses[node].append((index, False))

    def read_later(self, index: int, node: fx.Node) -> bool:
        """Whether the value that ``node`` has after call ``index`` is read by a later one."""
        return next((reads for i, reads in self._uses[node] if i > index), node in self._results)

    def outlives(self, index: int, node: fx.Node) -> bool:
        """Whether the value that ``node`` has before call ``index`` is needed after it."""
        return node not in self._program.calls[index].block.outputs and self.read_later(index, node)


def results_of(program: Program) -> set[fx.Node]:
    joint = program.line.joint
    results = (*joint.forward_outputs, *joint.backward_outputs)
    return {n for n in results if isinstance(n, fx.Node)}


def test_helpers_know_the_graph():
    """The checks above would pass on an empty program: this step has what they look at."""
    step: Captured = captured("gpt")
    program = step.program(periodic(len(step.line.stages), 4))
    assert sum(len(call.kept) for call in program.calls) > 50
    assert any(call.kept < step.joint.storages.of(call.block.inputs) for call in program.calls)
