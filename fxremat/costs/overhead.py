"""What emitted graphs take beside the stages that they call.

A line of emitted code makes lists and drops names (:func:`call_s`). A step has a way into its
graphs and out of them, and cold caches (:class:`Rehearsal`): that is nearly the same for all plans
of a step, and a good part of a step of small operations.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.costs.measure import cpu_clock, on_cpu_s
from fxremat.passes.emit.body import RETURN, Body, Statement, Variable
from fxremat.passes.emit.code import compile_graph, emitted

_CALLS, _CALL_RUNS = 64, 7
_TENSORS = 4
"""Arguments and results of a call, as many as stages have on average."""

SMALL_S = 0.05
"""Steps up to that long are rehearsed; of longer ones what is beside the calls is nothing."""

_LEAST_RUNS, _MOST_RUNS, _ENOUGH_S = 3, 25, 0.15

Boxed = Callable[[list[Any]], Sequence[Any]]


@functools.cache
def call_s() -> float:
    """Seconds of a call in emitted code beyond those of what it calls; once a process."""
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(f"in{i}") for i in range(_TENSORS)))
    stage = compile_graph(graph)
    body = Body()
    body.takes += (Variable(f"x{i}") for i in range(_TENSORS))
    variables = body.takes
    for _ in range(_CALLS):
        made = [Variable(f"x{i}") for i in range(_TENSORS)]
        body.statements.append(Statement(body.stage("stage", stage), variables, made))
        variables = made
    body.statements.append(Statement(RETURN, variables))
    chain = emitted(body)

    def alone() -> None:
        for _ in range(_CALLS):
            stage.forward(list(tensors))

    with torch_compat.real_execution():
        tensors = [torch.zeros(1) for _ in range(_TENSORS)]
        calls_s, alone_s = (
            min(on_cpu_s(run) for _ in range(_CALL_RUNS))
            for run in (lambda: chain.forward(list(tensors)), alone)
        )
    return max(0.0, calls_s - alone_s) / _CALLS


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A step that is run as autograd would run it, on made-up values, and changes nothing.

    Attributes:
        device: of the step.
        alike: equal for steps that take as long beside their calls: what goes in and out, and
            what is computed.
        gradients: how many the backward returns.
        forward, backward: its graphs.
        outputs: how many results of the forward are not for the backward.
        primals, tangents: what they take.
        calls_s: what their calls are predicted to take.
    """

    device: torch.device
    alike: Hashable
    gradients: int
    forward: Boxed
    backward: Boxed
    outputs: int
    primals: tuple[Tensor, ...]
    tangents: tuple[Tensor, ...]
    calls_s: float

    def overhead_s(self, way_in: Callable[[], object]) -> float:
        """Seconds of a step beside its calls, measured once a process; 0 on a GPU.

        Below 0 where the calls take less, one after the other, than each did alone.

        Args:
            way_in: leads to the forward graph and returns before it runs.
        """
        if self.device.type != "cpu":
            return 0.0  # the host runs ahead
        if self.alike not in _known_s:
            _known_s[self.alike] = self._measured_s(way_in)
        return _known_s[self.alike]

    def _measured_s(self, way_in: Callable[[], object]) -> float:
        leaves = [torch.zeros(1, requires_grad=True) for _ in range(max(self.gradients, 1))]
        graphs = self if self.calls_s <= SMALL_S else None

        clock = cpu_clock()

        def run() -> float:
            handed_over = tuple(torch.zeros(1) for _ in leaves)
            for leaf in leaves:
                leaf.grad = None
            begin = clock()
            way_in()
            with torch_compat.real_execution(), torch.enable_grad():
                result = _Step.apply(graphs, handed_over, *leaves)  # type: ignore[no-untyped-call]
                torch.autograd.backward(result)
            return clock() - begin

        with torch.random.fork_rng(devices=[]), torch_compat.without_autotuning():
            seconds = [run()]  # warm
            while len(seconds) <= _LEAST_RUNS or (
                sum(seconds) < _ENOUGH_S and len(seconds) <= _MOST_RUNS
            ):
                seconds.append(run())
        return statistics.median(seconds[1:]) - (self.calls_s if graphs else 0.0)


_known_s: dict[Hashable, float] = {}
"""Measured once, so that plans of one step for several budgets rest on the same figures."""


class _Step(torch.autograd.Function):
    """The graphs of a rehearsal between a forward and a backward of autograd; or nothing."""

    @staticmethod
    def forward(
        ctx: Any, graphs: Rehearsal | None, handed_over: tuple[Tensor, ...], *_leaves: Tensor
    ) -> Tensor:
        ctx.graphs, ctx.handed_over = graphs, handed_over
        if graphs is not None:
            results = list(graphs.forward([*graphs.primals]))
            ctx.outputs = results[: graphs.outputs]  # their caller holds them
            saved = results[graphs.outputs :]
            del results
            ctx.save_for_backward(*(x.detach() if x._is_view() else x for x in saved))
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        if ctx.graphs is not None:
            saved = [*ctx.saved_tensors, *ctx.graphs.tangents]
            torch_compat.free_saved(ctx)  # the graph drops them as it goes
            saved.append(SimpleNamespace(give=lambda _made: None))  # no gradient is kept
            ctx.graphs.backward(saved)
        return (None, None, *ctx.handed_over)
