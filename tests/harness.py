"""What tests of passes share: captured steps, schedules, and the joint graph run as it is.

No solver takes part: schedules are written by hand or drawn at random, and the emitted
graphs are run directly and held against the joint graph that AOTAutograd traced.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.cost import Measured, stage_blocks
from fxremat.costs.measured.stages import measure_line
from fxremat.effort import USUAL, Effort
from fxremat.ir import Backward, Decision, Forward, Keep, Schedule, StageSeconds, Tensors
from fxremat.passes.contract import PassConfig
from fxremat.passes.emit.code import Emitted
from fxremat.passes.emit.program import Program, keep_all
from fxremat.passes.emit.rewrite import BlockModules, rewrite
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.pipeline import run_passes
from fxremat.passes.stages.block import BlockCache
from fxremat.passes.stages.linearize import Line
from fxremat.passes.step_graph import StepGraph
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.allocator.footprints import Footprints
from fxremat.planner.context.context_bytes import Caller, ContextBytes, context_bytes_of
from fxremat.planner.decision.save_options import Options, find_options
from fxremat.planner.search.evaluator import Evaluator, carried_out
from fxremat.planner.search.generators import Generator
from fxremat.planner.search.search import Search
from fxremat.progress import silent
from tests.efforts import QUICK, plan_with
from tests.models import ZOO, ZooModel
from tests.models.reference import call_without_trace
from tests.reference.plain_sweep import Sweep, sweep

COSTS = CostCache()
SEED = 7

on_release = pytest.mark.skipif(
    not torch_compat.releases_tangents(), reason="autograd holds tangents to the end"
)
"""Tests of what is so where the backward releases gradients of outputs."""

NOTHING_ELSE = Caller(loss_bytes=0)
"""A caller who holds nothing and computes no loss."""


@dataclass
class Captured:
    """One training step as AOTAutograd traced it, with real values to run it on.

    ``traced`` is the joint graph before any pass of ours; ``ran`` is what it computes, by seed.
    """

    traced: fx.GraphModule
    output_count: int
    mutated: list[int]
    primals: list[Tensor]
    real: dict[int, Tensor]
    joint: JointGraph
    tangents: list[Tensor] = field(default_factory=list)
    ran: dict[int, Ran] = field(default_factory=dict)

    @functools.cached_property
    def line(self) -> Line:
        joint = self.joint
        graph = StepGraph(joint.module, self.output_count, (*self.mutated,), joint.sizes, joint)
        return run_passes(graph, config=PassConfig(), first="linearize").line

    @functools.cached_property
    def measured(self) -> Measured:
        """The line with its measured storage sizes, and its workspaces."""
        return measure_line(
            self.line,
            self.blocks,
            real={self.joint.primals[i]: t for i, t in self.real.items()},
            cache=COSTS,
            progress=silent,
        )

    @functools.cached_property
    def blocks(self) -> BlockCache:
        return BlockCache(self.line)

    @functools.cached_property
    def footprints(self) -> Footprints:
        return Footprints(self.measured.line, self.measured.workspace_bytes, self.measured.asked)

    @functools.cached_property
    def estimated(self) -> Measured:
        """The same with seconds that no clock has a part in.

        Each operation is charged for the bytes that it reads and makes, products more.
        """
        line, costs = self.measured.line, self.measured.costs
        nodes, table = tuple(line.joint.module.graph.nodes), line.joint.storages

        def estimate(node: fx.Node) -> float:
            made = table.of((node,)) - table.of(node.all_input_nodes)
            if not made:
                return 0.0
            nbytes = table.total(table.of((node, *node.all_input_nodes)))
            dear = any(word in str(node.target) for word in ("mm", "convolution", "attention"))
            return 1e-6 + nbytes / (1e9 if dear else 1e10)

        stages = []
        for index in range(len(line.stages)):
            blocks = stage_blocks(line, self.blocks, index)
            forward_s, again_s, backward_s = (sum(map(estimate, b.nodes)) for b in blocks)
            stages.append(StageSeconds(forward_s, 0.9 * again_s, backward_s))
        again = tuple((i, estimate(nodes[i])) for i, _ in costs.again_s)
        return Measured.of(line, replace(costs, stages=tuple(stages), again_s=again))

    @functools.cached_property
    def options(self) -> Options:
        return find_options(self.estimated, self.blocks, USUAL)

    @property
    def context_bytes(self) -> ContextBytes:
        """As of a caller who holds nothing and computes no loss."""
        return self.around(NOTHING_ELSE)

    def around(self, caller: Caller) -> ContextBytes:
        """What is held around the graphs."""
        real = {self.joint.primals[i]: t for i, t in self.real.items()}
        return context_bytes_of(self.measured.line.joint, real, caller)

    def evaluator(self, around: ContextBytes | None = None) -> Evaluator:
        """Of decisions, with tangents and nothing else around them if not told otherwise."""
        around = around or bare(self.joint)
        return Evaluator.of(self.estimated, self.blocks, self.options, around)

    def program(
        self,
        schedule: Schedule,
        *,
        missing: dict[int, frozenset[fx.Node]] | None = None,
        held: dict[int, frozenset[fx.Node]] | None = None,
    ) -> Program:
        line = self.measured.line
        decision = Decision(numbered(line, missing or {}), numbered(line, held or {}))
        return carried_out(line, self.blocks, schedule, decision)

    def sweep(self, program: Program) -> Sweep:
        return sweep(program, self.footprints, bare(self.joint))


def bare(joint: JointGraph) -> ContextBytes:
    """Tangents and nothing else: parameters and inputs are not counted."""
    tangent_bytes = joint.storages.total(joint.storages.of(joint.tangents))
    return ContextBytes(given_bytes=0, loss_point_bytes=tangent_bytes, tangent_bytes=tangent_bytes)


class _EnoughError(Exception):
    """The joint graph is there: no more compiling."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backend_sees: Callable[[fx.GraphModule], None] = lambda _module: None,
    dynamic: bool | None = False,
    apart: bool = False,
) -> Captured:
    """The step of ``model`` on these arguments, captured and not run.

    With ``dynamic=None`` dimensions that were marked as such are symbols; with ``apart``
    operations are taken apart as for units.
    """
    found: list[Captured] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_options: Any) -> Any:
        backend_sees(module)

        def partition(
            traced: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
        ) -> Any:
            found.append(_keep(traced, num_fwd_outputs, _values(traced, inputs)))
            raise _EnoughError

        compilers = dict.fromkeys(
            ("forward_compiler", "backward_compiler", "inference_compiler"), lambda graph, _: graph
        )
        aot = torch_compat.aot_autograd_backend(
            partition=partition,
            decompositions=torch_compat.decompositions() if apart else None,
            **compilers,
        )
        return aot(module, inputs)

    torch._dynamo.reset()
    try:
        with torch_compat.capture_settings():
            compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
            compiled(*args, **kwargs or {})
    except torch_compat.capture_failures() as error:
        if not isinstance(torch_compat.failure_cause(error), _EnoughError):
            raise
    finally:
        torch._dynamo.reset()
    (captured,) = found
    captured.tangents = [_like(n.meta["val"], i) for i, n in enumerate(captured.joint.tangents)]
    return captured


def _keep(traced: fx.GraphModule, output_count: int, real: dict[int, Tensor]) -> Captured:
    graph = StepGraph.captured(traced, forward_output_count=output_count)
    graph = run_passes(graph, config=PassConfig(), before="split")
    primals = [real.get(i, n.meta["val"]) for i, n in enumerate(graph.joint.primals)]
    return Captured(traced, output_count, [*graph.mutated_primals], primals, real, graph.joint)


def _values(traced: fx.GraphModule, inputs: Sequence[Any]) -> dict[int, Tensor]:
    found = enumerate(torch_compat.primal_values(traced, inputs))
    return {i: value for i, value in found if isinstance(value, Tensor)}


def _like(traced: Tensor, seed: int) -> Tensor:
    """A tangent: random numbers with the traced strides."""
    made = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype)
    generator = torch.Generator().manual_seed(seed)
    return made.copy_(torch.randn(traced.shape, generator=generator))


def captured(name: str, *, input_gradients: bool = True) -> Captured:
    """The step of a zoo model; captured once a process."""
    return _captured(name, input_gradients)


@functools.cache
def _captured(name: str, input_gradients: bool) -> Captured:
    entry = ZOO[name]
    model = entry.build()
    args, kwargs = entry.sample(0)
    if input_gradients:
        ask_input_gradients((args, kwargs))
    if entry.hooks_at_first_call:
        call_without_trace(entry, model)
    with entry.context():
        return capture(model, args, kwargs)


def ask_input_gradients(sample: object) -> None:
    """Have gradients of every floating-point tensor of a sample."""
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf.requires_grad_(True)


@dataclass
class Ran:
    """What a step returned, and where it left the random generator."""

    outputs: list[Any]
    gradients: list[Any]
    generator: Tensor


def run_traced(step: Captured, *, seed: int = SEED) -> Ran:
    """The joint graph as AOTAutograd traced it, node by node: the truth, found once a seed."""
    if seed not in step.ran:
        step.ran[seed] = _interpreted(step, seed)
    return step.ran[seed]


def _interpreted(step: Captured, seed: int) -> Ran:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        results = fx.Interpreter(step.traced).run(
            *step.primals, *step.tangents, enable_io_processing=False
        )
        flat = flatten(results)
        return Ran(flat[: step.output_count], flat[step.output_count :], torch.get_rng_state())


def flatten(results: Any) -> list[Any]:
    return tree_leaves(results, is_leaf=lambda x: x is None)


def run_emitted(
    step: Captured, program: Program, *, modules: BlockModules | None = None, seed: int = SEED
) -> Ran:
    """The emitted graphs of ``program``, as AOTAutograd calls them."""
    graphs = rewrite(program, step.sweep(program).peaks_bytes, modules or BlockModules())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return Ran(*_call(step, graphs), torch.get_rng_state())


def keep_all_ran(step: Captured) -> Ran:
    """The emitted graphs with nothing recomputed."""
    return run_emitted(step, step.program(keep_all(len(step.line.stages))))


@dataclass
class Made:
    """Takes gradients as they are made, and drops some at once."""

    gradients: list[Tensor | None]
    dropped: frozenset[int] = frozenset()

    def give(self, made: dict[int, Tensor]) -> None:
        for primal, gradient in made.items():
            if primal not in self.dropped:
                self.gradients[primal] = gradient


def _call(
    step: Captured,
    graphs: tuple[Emitted, Emitted],
    dropped: frozenset[int] = frozenset(),
    *,
    tangents_stay: bool = False,
) -> tuple[Any, Any]:
    forward, backward = graphs
    saved = forward([*step.primals])
    outputs = saved[: step.output_count]
    del saved[: step.output_count]
    tangents = [t.clone() for t in step.tangents]
    made = Made([None] * len(step.primals), dropped)
    saved.extend((*tangents, made))
    if torch_compat.releases_tangents() and not tangents_stay:
        tangents.clear()  # as autograd hands them over; before that it holds them to the end
    backward(saved)
    return outputs, made.gradients


def measured_peak_bytes(
    step: Captured,
    program: Program,
    *,
    dropped: frozenset[int] = frozenset(),
    tangents_stay: bool = False,
) -> int:
    """Most bytes that running the emitted graphs of ``program`` allocates, tangents included.

    Nobody keeps the gradients of the primals ``dropped``; ``tangents_stay``: somebody keeps the
    tangents to the end.
    """
    graphs = rewrite(program, step.sweep(program).peaks_bytes, BlockModules())
    with torch.random.fork_rng(), torch.no_grad():
        with torch_compat.AllocationLog() as log:
            results = _call(step, graphs, dropped, tangents_stay=tangents_stay)
        del results
    now = peak = 0
    for _mark, change in log.events:
        now += change
        peak = max(peak, now)
    return peak


def periodic(stage_count: int, length: int) -> Schedule:
    """Segments of ``length`` stages, each recomputed whole but the last."""
    segments = [range(i, min(i + length, stage_count)) for i in range(0, stage_count, length)]
    ops: list[Forward | Backward] = []
    for segment in segments[:-1]:
        ops += [Forward(i, Keep.INPUT if i == segment[0] else Keep.NONE) for i in segment]
    for number, segment in enumerate(reversed(segments)):
        assert number or segment is segments[-1]
        ops += [Forward(i, Keep.ALL) for i in segment]
        ops += [Backward(i) for i in reversed(segment)]
    return Schedule(tuple(ops))


def random_schedule(stage_count: int, seed: int) -> Schedule:
    """A valid persistent schedule, drawn at random."""
    draw = random.Random(seed)
    keep_share = draw.random()

    def between(first: int, last: int) -> list[Forward | Backward]:
        """From boundary ``first`` and the gradient after ``last`` to that before ``first``."""
        if first == last:
            again = [Forward(first, Keep.INPUT)] if draw.random() < 0.1 else []
            return [*again, Forward(first, Keep.ALL), Backward(first)]
        if draw.random() < keep_share:
            return [Forward(first, Keep.ALL), *between(first + 1, last), Backward(first)]
        cut = draw.randint(first + 1, last)
        skipped = [Forward(i, Keep.NONE) for i in range(first + 1, cut)]
        return [
            Forward(first, Keep.INPUT), *skipped, *between(cut, last), *between(first, cut - 1)
        ]  # fmt: skip

    return Schedule(tuple(between(0, stage_count - 1)))


def searched(
    step: Captured,
    *,
    caller: Caller = NOTHING_ELSE,
    effort: Effort = USUAL,
    generators: Sequence[Generator] | None = None,
    allocator: AllocatorSettings | None = None,
) -> Search:
    """All candidates of a step; seconds are estimated."""
    return Search.over(
        step.estimated,
        step.blocks,
        step.around(caller),
        progress=silent,
        effort=effort,
        generators=generators,
        allocator=allocator,
        budget_on=caller.budget_on,
    )


@functools.cache
def search_of(name: str) -> Search:
    """All candidates of a zoo model's step; found once a process."""
    return searched(captured(name))


def zoo(*names: str) -> list[ZooModel]:
    """Entries by name."""
    return [ZOO[name] for name in names]


def search_quickly(patch: pytest.MonkeyPatch) -> None:
    """Local search sets out from few candidates."""
    plan_with(patch, **QUICK)


Held = Mapping[int, frozenset[fx.Node]]
"""Tensors of the forward by the stage that makes them."""


def numbered(line: Line, tensors: Held) -> Tensors:
    """Tensors as a decision has them."""
    found = sorted(tensors.items())
    return tuple((i, tuple(sorted(line.order[n] for n in own))) for i, own in found)


def held_bits(evaluator: Evaluator, held: Held) -> bytes:
    """``held`` as a candidate has it: a bit for each node."""
    flags = np.zeros(evaluator.arrays.at.nodes, dtype=np.uint8)
    flags[[evaluator.arrays.number[node] for nodes in held.values() for node in nodes]] = 1
    return np.packbits(flags).tobytes()
