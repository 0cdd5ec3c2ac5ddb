"""What a call of a stage takes beside the stage: lists, names that are dropped, the line itself."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.emit.code import ScheduleModule, compile_graph

_CALLS = 64
_TENSORS = 4
"""Arguments and results of a call, as many as stages have on average."""

_RUNS = 7


@functools.cache
def call_s() -> float:
    """Seconds of a call in emitted code beyond those of what it calls; once a process.

    A stage is timed on its own. Its line in emitted code makes lists and drops names as well.
    """
    stage = _passing_on()
    with torch_compat.real_execution():
        tensors = [torch.zeros(1) for _ in range(_TENSORS)]
    emitted = _chain_of(stage)

    def alone() -> None:
        for _ in range(_CALLS):
            stage.forward(list(tensors))

    with torch_compat.real_execution():
        calls_s, alone_s = _least_s(lambda: emitted.forward(list(tensors))), _least_s(alone)
    return max(0.0, calls_s - alone_s) / _CALLS


def _passing_on() -> fx.GraphModule:
    """A stage that returns what it is given."""
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(f"in{i}") for i in range(_TENSORS)))
    return compile_graph(graph)


def _chain_of(stage: fx.GraphModule) -> ScheduleModule:
    """A graph that calls it again and again."""
    root = torch.nn.Module()
    root.add_module("stage", stage)
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(_TENSORS)]
    for _ in range(_CALLS):
        made = graph.call_module("stage", tuple(values))
        values = [graph.call_function(operator.getitem, (made, i)) for i in range(_TENSORS)]
    graph.output(tuple(values))
    return ScheduleModule(root, graph, "FxrematCalls")


def _least_s(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
