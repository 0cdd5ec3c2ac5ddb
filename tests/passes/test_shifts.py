"""Collectives that another call runs: the same operations, and none reads what is not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch import fx

from fxremat import torch_compat
from fxremat.ir import Shift
from fxremat.passes.emit.program import Program, blocks_of, keep_all, shifted
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from tests.harness import Captured, periodic, run_emitted, run_traced
from tests.models.bits import assert_bitwise_equal
from tests.spread import gathering, group_of_one


@pytest.fixture(scope="module")
def step() -> Iterator[Captured]:
    with group_of_one(with_values=True):
        yield gathering()


def programs(step: Captured) -> dict[str, Program]:
    count = len(step.line.stages)
    return {"kept": step.program(keep_all(count)), "again": step.program(periodic(count, 3))}


def possible(program: Program) -> list[Shift]:
    """Every shift by one call or none that some call allows, each alone."""
    found, order = [], program.line.order
    for index, call in enumerate(program.calls):
        for node in call.block.nodes:
            away = 1 if torch_compat.is_wait(node) else -1
            if torch_compat.is_collective(node):
                first = program.turn if index >= program.turn else 0
                last = len(program.calls) if index >= program.turn else program.turn
                targets = {index, *(i for i in (index + away,) if first <= i < last)}
                shifts = [Shift(order[node], index, target) for target in targets]
                found.extend(s for s in shifts if blocks_of(program.calls, program.line, s))
    return found


def moved(program: Program, *shifts: Shift) -> Program:
    return replace(program, calls=shifted(program.calls, program.line, shifts))


@pytest.mark.parametrize("name", ["kept", "again"])
def test_each_shift_gives_the_same_bits(step: Captured, name: str) -> None:
    program = programs(step)[name]
    found = possible(program)
    assert {s.target - s.source for s in found} == {-1, 0, 1}
    for shift in found:
        assert_bitwise_equal(run_emitted(step, moved(program, shift)), run_traced(step))


@pytest.mark.parametrize("name", ["kept", "again"])
def test_no_operation_is_added_or_left_out(step: Captured, name: str) -> None:
    program = programs(step)[name]

    def operations(own: Program) -> list[fx.Node]:
        nodes = (n for call in own.calls for n in call.block.nodes if n not in own.line.views)
        return sorted(nodes, key=own.line.order.__getitem__)

    for shift in possible(program):
        assert operations(moved(program, shift)) == operations(program)


def test_a_start_goes_as_far_as_its_inputs_are_there(step: Captured) -> None:
    program = programs(step)["kept"]
    index, node = next(
        (i, n)
        for i, call in enumerate(program.calls[: program.turn])
        for n in call.block.nodes
        if i > 2 and torch_compat.group_of(n)
    )
    shifts = [Shift(program.line.order[node], i, i - 1) for i in range(index, 0, -1)]
    there = moved(program, *shifts)
    assert node in there.calls[0].block.nodes  # it reads a parameter alone
    assert_bitwise_equal(run_emitted(step, there), run_traced(step))


def test_what_is_sent_waits_for_what_makes_it(step: Captured) -> None:
    program = programs(step)["kept"]
    for index in range(program.turn, len(program.calls)):
        for node in program.calls[index].block.nodes:
            if "reduce_scatter" in str(node.target):
                shift = Shift(program.line.order[node], index, index - 1)
                assert not blocks_of(program.calls, program.line, shift)


def test_a_shift_of_another_program_is_refused(step: Captured) -> None:
    program = programs(step)["kept"]
    shift = next(s for s in possible(program) if s.source != s.target)
    with pytest.raises(
        LookupError, match=f"{program.line.nodes[shift.node].name} cannot go from call"
    ):
        moved(program, shift, shift)


def test_the_code_says_what_is_started_and_awaited(step: Captured) -> None:
    program = programs(step)["kept"]
    found = [s for s in possible(program) if s.source < program.turn and s.target < s.source]
    there = moved(program, found[0])
    forward, _ = rewrite(there, [0] * len(there.calls), BlockModules())
    assert "starts 1 of a later call's collectives" in forward.code
