"""Operations computed for some rows at a time are what they are for all."""

from __future__ import annotations

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import tests.passes.split.layers  # noqa: F401
from fxremat.passes.split.families import EXACT, RULES
from fxremat.passes.split.rules import VIEWS, ways
from tests.passes.split.cases import CASES, Draws, drawn, operator_of
from tests.passes.split.parts import differences

KNOWN = [name for name in CASES if operator_of(name) is not None]


@pytest.mark.parametrize("name", KNOWN)
@given(data=st.data())
def test_parts_are_the_whole(name: str, data: st.DataObject) -> None:
    d = Draws.of(data)
    op = drawn(name, d)
    for count in op.counts():
        for way in ways(op.node, count):
            sizes = d.parts(count)
            note(f"{op.node.format_node()} {[t.shape for t in op.tensors]} {way} {sizes}")
            assert not differences(op, way, sizes)


def test_each_rule_has_a_case() -> None:
    assert not {*RULES, *VIEWS} - {*CASES} - {"empty_like.default"}  # which has no numbers
    assert not EXACT - {name.partition(".")[0] for name in CASES}
