"""Joint graphs with units in place of operations, and what they compute without a compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fxremat.passes.fuse.rewrite import fuse
from fxremat.passes.fuse.unit import Unit
from fxremat.passes.fuse.units import Units
from tests.harness import SEED, Captured, Ran, capture, flatten


def taken_apart(model: nn.Module, *args: Any, **options: Any) -> Captured:
    """The step of ``model``, with operations taken apart as for units."""
    return capture(model, args, apart=True, **options)


def fused(step: Captured, units: Units | None = None) -> fx.GraphModule:
    """The graph of ``step`` with units."""
    return fuse(step.line, Units() if units is None else units)


def units_in(module: fx.GraphModule) -> list[fx.Node]:
    """Calls of units, in order."""
    return [n for n in module.graph.nodes if isinstance(n.target, Unit)]


class ByOperations(fx.Interpreter):
    """Runs each unit operation by operation: nothing is compiled."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, Unit):
            return super().call_function(target, args, kwargs)
        results = run_operations(target, args[: len(target.inputs)])
        return results[0] if len(results) == 1 else results


def run_operations(unit: Unit, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the operations of a unit return."""
    return fx.Interpreter(fx.GraphModule(nn.Module(), unit.graph)).run(*args)


def run_fused(step: Captured, module: fx.GraphModule, *, seed: int = SEED) -> Ran:
    """A graph of ``step`` with units, run without a compiler."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        run = ByOperations(module).run
        flat = flatten(run(*step.primals, *step.tangents, enable_io_processing=False))
        return Ran(flat[: step.output_count], flat[step.output_count :], torch.get_rng_state())
