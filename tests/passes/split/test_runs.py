"""Runs of operations that are computed in parts, as they are found in whole steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import networkx as nx
import pytest
import torch

from fxremat.effort import USUAL
from fxremat.passes.joint.graph import JointGraph, operation_of
from fxremat.passes.split.run import Looks, Run
from fxremat.passes.split.runs import Large, runs_of
from fxremat.passes.split.ways import Ways
from tests.harness import capture, captured
from tests.models.recurrent import UnrolledGRU

ARGUMENTS: dict[str, Any] = {
    "exact": False,
    "refused": frozenset(),
    "most_operations": USUAL.run_operations,
}
"""Arguments of a search that are the same everywhere here."""


def found(joint: JointGraph, share: int) -> list[Run]:
    """With values above so much of the largest storage in parts."""
    most_bytes = max(joint.storages.nbytes) // share
    return runs_of(joint, Large(most_bytes), **ARGUMENTS, cache=Ways())


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "gru", "unet", "tied"])
@pytest.mark.parametrize("share", [2, 8, 32])
def test_no_run_takes_what_depends_on_it(name: str, share: int):
    joint = captured(name).line.joint
    runs = found(joint, share)
    run_of = {target: run for run in runs for target in run.targets}
    after = nx.DiGraph()
    for node in (*joint.forward, *joint.backward):
        item = run_of.get(operation_of(node), operation_of(node))
        reads = item.sources if isinstance(item, Run) else item.all_input_nodes
        after.add_edges_from(
            (run_of.get(operation_of(n), operation_of(n)), item)
            for n in reads
            if operation_of(n) is not item
        )
    assert nx.is_directed_acyclic_graph(after)


def test_what_is_looked_at_moment_by_moment_is_not_computed_for_each():
    steps = USUAL.run_operations + 1
    line = capture(UnrolledGRU(steps=steps), (torch.randn(4, steps, 16),)).line
    times = Counter(n for run in found(line.joint, 2) for n in run.ways)
    assert max(times.values(), default=0) <= 2  # a forward's, once more in a backward


def test_looks_are_linear_in_a_loop_that_is_unrolled():
    def looks(steps: int) -> int:
        made = Looks()
        joint = capture(UnrolledGRU(steps=steps), (torch.randn(4, steps, 16),)).line.joint
        large = Large(min(joint.storages.nbytes))
        runs_of(joint, large, **ARGUMENTS, cache=Ways(), looks=made)
        return made.count

    few, many = looks(12), looks(24)
    assert few > 1000  # it does look
    assert many < 2.5 * few


def test_a_search_ends_where_it_is_out_of_looks():
    joint = captured("gpt").line.joint
    most_bytes = max(joint.storages.nbytes) // 32
    all_of_them, some = Looks(), Looks(10)
    for looks in (all_of_them, some):
        runs_of(joint, Large(most_bytes), **ARGUMENTS, cache=Ways(), looks=looks)
    assert not all_of_them.are_out
    assert some.are_out
    assert some.count < all_of_them.count
