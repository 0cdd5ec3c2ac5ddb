"""Collectives in a graph are operations like others: planned to the byte, and right to the bit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fxremat import torch_compat
from fxremat.passes.emit.program import Program, keep_all
from tests.harness import measured_peak_bytes, periodic, run_emitted, run_traced
from tests.models.bits import assert_bitwise_equal
from tests.spread import gathering, group_of_one

every_schedule = pytest.mark.parametrize("kept", [True, False], ids=["kept", "again"])


def program_of(*, kept: bool) -> Program:
    step = gathering()
    count = len(step.line.stages)
    return step.program(keep_all(count) if kept else periodic(count, 3))


@every_schedule
def test_numbers_stay_what_they_are(kept: bool) -> None:
    with group_of_one(with_values=True):
        program = program_of(kept=kept)
        assert_bitwise_equal(run_emitted(gathering(), program), run_traced(gathering()))


@every_schedule
def test_bytes_are_those_of_a_run(kept: bool) -> None:
    with group_of_one():
        program = program_of(kept=kept)
        assert measured_peak_bytes(gathering(), program) == gathering().sweep(program).peak_bytes


@every_schedule
def test_a_collective_is_waited_for_where_the_trace_does(kept: bool) -> None:
    with group_of_one():
        program = program_of(kept=kept)
    count = 0
    for call in program.calls:
        for node, following in pairwise(call.block.nodes):
            if torch_compat.group_of(node) is not None:
                assert torch_compat.is_wait(following)
                assert torch_compat.awaited(following) is node
                count += 1
    assert count >= 24  # each of six layers gathers two parameters, and scatters two gradients
