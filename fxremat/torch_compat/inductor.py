"""Inductor: what it takes apart, and how a graph of pointwise operations becomes kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.torch_compat.graphs import BoxedCallable

aten = torch.ops.aten

_WHOLE = (
    aten.embedding_dense_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.native_dropout.default,
)
"""Not taken apart: a sum in any order, pools, which are slow in parts, a draw that would not be
eager's."""

_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax"}


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """What Inductor takes operations apart into before it makes kernels; random draws stay."""
    from torch._inductor import config  # noqa: PLC0415
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    with config.patch(fallback_random=True):
        table = dict(select_decomp_table())

    def stays(op: Any) -> bool:
        tags = getattr(op, "tags", ())
        return op in _WHOLE or torch.Tag.nondeterministic_seeded in tags

    return {op: how for op, how in table.items() if not stays(op)}


def is_reduction(target: torch._ops.OpOverload) -> bool:
    """Whether ``target`` sums over elements, and Inductor makes a loop of it."""
    return target.namespace == "aten" and target.overloadpacket.__name__ in _REDUCTIONS


def compile_kernels(
    graph: fx.Graph, inputs: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype]],
    device: torch.device,
) -> BoxedCallable:
    """A function of one list, by Inductor.

    Args:
        graph: pointwise operations and reductions, all sizes numbers.
        inputs: shape, strides and dtype of each.
        device: of all.
    """
    from torch._guards import TracingContext, tracing  # noqa: PLC0415
    from torch._inductor import config  # noqa: PLC0415
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes(), torch.no_grad():
        mode = FakeTensorMode()
        with mode:
            fakes = [
                torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
                for shape, stride, dtype in inputs
            ]
            run = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run
            traced = make_fx(
                lambda *args: run(*args),
                decomposition_table=decompositions(),
                tracing_mode="real",
            )(*fakes)
        traced.graph.eliminate_dead_code()
        output = traced.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        traced.recompile()
        settings = {
            "fallback_random": True,
            "comprehensive_padding": False,
            "size_asserts": False,
            "alignment_asserts": False,
        }
        with tracing(TracingContext(mode)), config.patch(settings):
            made: Any = compile_fx_inner(traced, fakes, is_inference=True)
    run: BoxedCallable = getattr(made, "current_callable", None) or made
    return run
