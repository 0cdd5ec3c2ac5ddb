"""Bytes and multiply-adds of operations at any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fxremat.costs.measured.work import Works, ratio
from tests.harness import run_traced
from tests.sized import at_size

SIZES = [
    ("gpt", (3, 24), (5, 17)),
    pytest.param("unet", (3, 32, 64), (2, 64, 32), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "hints", "sizes"), SIZES)
def test_multiply_adds_are_those_that_torch_counts_at_that_size(name, hints, sizes):
    at = at_size(name, hints, sizes)
    with FlopCounterMode(display=False) as counter:
        run_traced(at.static, seed=len(sizes))  # no other test has
    found = Works(at.step.joint).at(at.values)
    assert found.flops.sum() == counter.get_total_flops()


@pytest.mark.parametrize(("name", "hints", "sizes"), SIZES)
def test_work_is_that_of_the_line_at_that_size(name, hints, sizes):
    at = at_size(name, hints, sizes)
    followed = Works(at.step.joint).at(at.values)
    there = Works(at.line.joint).at(at.values)
    assert np.array_equal(followed.nbytes, there.nbytes)
    assert np.array_equal(followed.flops, there.flops)


def test_bytes_are_those_read_and_made_and_none_of_views():
    at = at_size("gpt", (3, 24), (5, 17))
    work = Works(at.step.joint).at(at.values)
    nodes = list(at.line.joint.module.graph.nodes)
    for index, node in enumerate(nodes):
        if node.target is torch.ops.aten.t.default or node.op == "placeholder":
            assert work.nbytes[index] == work.flops[index] == 0
        if node.target is torch.ops.aten.addmm.default:
            values = [n.meta["val"] for n in (*node.all_input_nodes, node)]
            assert work.nbytes[index] == sum(v.numel() * v.element_size() for v in values)


def test_growth_is_that_of_the_tensor_that_has_grown_most():
    at = at_size("gpt", (3, 24), (5, 17))
    works = Works(at.step.joint)
    one, two = works.at((3, 24, 3, 24)), works.at((6, 24, 6, 24))
    growth = works.growth(two, one)
    assert set(growth.tolist()) == {1.0, 2.0}
    assert np.all(works.growth(one, two) == 1.0)
    assert ratio(np.array([3.0, 1.0]), np.array([2.0, 0.0])).tolist() == [1.5, 1.0]
