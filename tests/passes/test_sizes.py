"""Numbers that follow the sizes of a step."""

from __future__ import annotations

import copy
import pickle

import torch

from fxremat.passes.joint.sizes import (
    Scale,
    Size,
    Sizes,
    evaluated,
    names_in,
    number_at,
    product,
)


def test_sizes_are_equal_if_their_expressions_are():
    names = {"SIZE0": 4, "SIZE1": 4}
    one, other = Size.named("SIZE0", 4), Size.named("SIZE1", 4)
    assert one != other
    assert one == Size.named("SIZE0", 5)
    assert len({one, other, Size.named("SIZE0", 4)}) == 2
    assert one != 4
    assert one + 0 == 4
    both = product((one, other, 3))
    assert (int(both), repr(both)) == (48, str(both))
    assert number_at(both, {"SIZE0": 2, "SIZE1": 5}) == 30
    assert number_at(7, names) == 7
    assert product((2, 3)) == 6
    assert not isinstance(product((2, 3)), Size)
    for copied in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert copied == both
        assert int(copied) == 48


def test_a_scale_is_computed_in_its_order():
    names = {"SIZE0": 3}
    one = Scale(0.1 / 3 * 7, "((0.1 / SIZE0) * 7)", names)
    assert evaluated(one, {"SIZE0": 11}) == 0.1 / 11 * 7
    assert names_in([one]) == names
    assert one != Scale(0.1 / 3 * 7, "(0.1 / (SIZE0 / 7))", names)
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (copied, float(copied), copied.names) == (one, float(one), names)


def test_formulas_evaluate_each_number_where_it_stands():
    names = ("SIZE0", "SIZE1")
    one, other = Size.named("SIZE0", 4), Size.named("SIZE1", 6)
    sizes = Sizes(names, (4, 6), ((0, 0), (0, 1)))
    found = sizes.formulas([one, 3, product((one, other)), one, other])
    assert found((2, 5)).tolist() == [2, 3, 10, 2, 5]
    assert found((4, 6)).tolist() == [4, 3, 24, 4, 6]
    assert sizes.values([torch.ones(8, 9)]) == (8, 9)
    assert Sizes().formulas([1, 2])(()).tolist() == [1, 2]
