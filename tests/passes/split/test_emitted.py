"""What is emitted in parts has the bits of the operations at once, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import tests.passes.split.layers  # noqa: F401
from fxremat.passes.parts.parts import Parts
from tests.examples import examples
from tests.passes.split.cases import CASES, STAND_INS, Draws, drawn, operator_of
from tests.passes.split.emitted import BEFORE, in_parts, other_bits, step_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

LEFT_OUT = (
    "_fused_rms_norm.default",  # decomposed where a step is traced
    "binary_cross_entropy.default",  # these refuse numbers outside of 0 to 1
    "binary_cross_entropy_backward.default",
)

NAMES = [
    name
    for name in CASES
    if operator_of(name) is not None and name not in STAND_INS and name not in LEFT_OUT
]


@pytest.mark.parametrize("name", NAMES)
@examples(0.05)
@given(data=st.data())
def test_emitted_parts_have_the_bits_of_the_whole(name: str, data: st.DataObject) -> None:
    d = Draws.of(data)
    d.dtype, d.largest = d.one_of(*DTYPES), d.one_of(5, 5, 12)
    op = drawn(name, d)
    before = d.one_of(*BEFORE)
    joint, tensors = step_of(op, before)
    split_graph = in_parts(joint)
    if split_graph is None:
        return
    parts = [n.target for n in split_graph.graph.nodes if isinstance(n.target, Parts)]
    note(f"{before} {op.node.format_node()} {[(t.shape, t.stride(), t.dtype) for t in tensors]}")
    note("\n".join(own.code for own in parts))
    assert not other_bits(joint, split_graph, tensors, seed=d.draw(st.integers(0, 2**31)))
