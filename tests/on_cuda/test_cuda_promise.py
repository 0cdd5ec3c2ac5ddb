"""The promise on CUDA: cells of the matrix of ``benchmarks.cuda_matrix``, each as it promises."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from benchmarks.cuda_matrix import (
    COUNTED,
    EXECUTORS,
    NETWORKS,
    ORDERS,
    TINY,
    Cell,
    Executor,
    Locked,
    cells,
    holds,
    host_memory,
    run,
)
from benchmarks.devices import ALLOCATORS
from benchmarks.rows import Row
from fxremat.runtime.arena import Arena
from tests.cuda import CUDA, needs_cuda

FAST = {
    "default": [
        Cell("gpt", "reserved", "no", "min"),  # a dropout asks for its mask before its output
        Cell("mlp", "allocated", "only", 0.6),
        Cell("mlp", "allocated", "auto", "min"),
        Cell("gpt", "reserved", "auto", "min", "inductor"),
        Cell("tiny_gpt", "allocated", "no", "min", "interpreted"),
    ],
    "expandable": [
        Cell("mlp", "reserved", "auto", 0.6),
        Cell("gpt_bf16", "allocated", "no", 0.4),
        Cell("llama", "allocated", "only", "min", "inductor"),
        Cell("tiny_mlp", "allocated", "only", "min", "interpreted"),
    ],
}
"""Each allocator and way, and what is counted, in a cell or more; one is below the least."""

FEW_ORDERS = ("late", "random:1")
"""Of streams: the matrix has all."""


def on_cuda(test):
    for mark in needs_cuda:
        test = mark(test)
    return test


def check(chosen: Sequence[Cell], allocator: str, orders: Sequence[str] = ORDERS) -> None:
    """Measure cells, and hold each to its promise; search less long for few orders."""
    rows: list[Row] = []
    why = run(chosen, allocator, add=rows.append, orders=orders, quick=len(orders) < len(ORDERS))
    assert why is None
    assert len(rows) == len(chosen)
    broken = [row for row in rows if not holds(row)]
    assert not broken, json.dumps(broken, indent=1)


@on_cuda
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_bytes_bits_and_host_memory_are_as_promised(allocator: str):
    interpreted = [cell for cell in FAST[allocator] if cell.executor == "interpreted"]
    check([cell for cell in FAST[allocator] if cell not in interpreted], allocator, FEW_ORDERS)
    check(interpreted, allocator, FEW_ORDERS[1:])


@on_cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "network"),
    [
        (executor, network)
        for executor in EXECUTORS
        for network in (TINY if executor == "interpreted" else NETWORKS)
    ],
)
@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_so_they_are_in_the_whole_matrix(
    allocator: str, counted: str, executor: Executor, network: str
):
    check([cell for cell in cells([network], executor) if cell.counted == counted], allocator)


@on_cuda
def test_an_arena_locks_what_it_says_where_torch_locks_a_power_of_two():
    nbytes = (33 << 20) + 4096
    with host_memory() as told:
        arena = Arena(nbytes, device=CUDA)
        ours = told()
    if ours is None:
        pytest.skip("a GPU does not tell of host memory")
    assert ours == Locked(nbytes, nbytes)
    assert arena.allocated_bytes == nbytes
    with host_memory() as told:
        kept = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        theirs = told()
    assert theirs == Locked(64 << 20, 64 << 20)
    del kept


KEPT: Row = {
    "over": [], "other_bits": [], "faults": [], "budget_bytes": 10, "host_bytes": 4,
    "locked_bytes": 4, "most_locked_bytes": 6, "host_limit_bytes": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    [
        {"over": ["late, step 1: 512"]},
        {"other_bits": ["early: gradient"]},
        {"faults": ["a read of memory that was given back"]},
        {"told_least_bytes": 9},
        {"locked_bytes": 5},
        {"most_locked_bytes": 7},
        {"host_limit_bytes": None},
        {"failed": "BudgetError"},
    ],
)
def test_what_a_row_may_not_have(broken: Row):
    assert holds(KEPT)
    assert holds({**KEPT, "told_least_bytes": 10})
    assert not holds({**KEPT, **broken})


def test_what_is_locked_is_read_of_a_log():
    log = [
        '{"n": 0, "call": "cudaHostRegister", "at": 1, "bytes": 5}',
        '{"n": 1, "call": "kernel", "stream": 0}',
        '{"n": 2, "call": "cudaHostAlloc", "at": 2, "bytes": 8}',
        '{"n": 3, "call": "cudaHostUnregister", "at": 1}',
        '{"n": 4, "call": "cudaHostRegister", "at": 1, "bytes": 3}',
    ]
    assert Locked.of(log) == Locked(11, 13)
