"""Inductor: what it decomposes, and how a graph of pointwise operations becomes kernels."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import fx

from fxremat.torch_compat.graphs import BoxedCallable
from fxremat.torch_compat.symbols import python_text

aten = torch.ops.aten

_WHOLE = (
    aten.embedding_dense_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.native_dropout.default,
)
"""Not decomposed: a sum in any order, pools, which are slow in parts, and a draw that would differ
from eager's."""

_REDUCTIONS = {"sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax"}


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return Inductor's decompositions by operation, except for operations that must stay whole."""
    from torch._inductor import config  # noqa: PLC0415
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    with config.patch(fallback_random=True):
        table = dict(select_decomp_table())

    def stays(op: Any) -> bool:
        tags = getattr(op, "tags", ())
        return op in _WHOLE or torch.Tag.nondeterministic_seeded in tags

    return {op: how for op, how in table.items() if not stays(op)}


def is_reduction(target: torch._ops.OpOverload) -> bool:
    """Return whether ``target`` reduces over elements, and Inductor makes a loop of it."""
    return target.namespace == "aten" and target.overloadpacket.__name__ in _REDUCTIONS


def prefers_channels_last(module: fx.GraphModule) -> bool:
    """Return whether Inductor would run the convolutions of a graph with channels last."""
    from torch._inductor.graph import GraphLowering  # noqa: PLC0415

    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def missing_compiler(device: torch.device) -> str | None:
    """Describe the compiler that Inductor needs for ``device`` but does not find; else ``None``."""
    if device.type != "cpu":
        from torch.utils._triton import has_triton  # noqa: PLC0415

        return None if has_triton() else "there is no working Triton"
    if cpp_compiler() is None:
        return "there is no C++ compiler (g++, clang, or the one that CXX names)"
    return None


def cpp_compiler() -> str | None:
    """Return the path or name of the C++ compiler that Inductor uses, or ``None`` without one."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        return str(get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return None


Described = tuple[fx.Graph, list[tuple[tuple[tuple[int, ...], tuple[int, ...]], torch.dtype]]]
"""A graph of pointwise operations and reductions, and for each input its shape and strides, and its
dtype."""

Symbols = Mapping[str, Any]


def compile_kernels(
    described: Callable[[Symbols], Described], device: torch.device, *, benchmarked: bool = True
) -> BoxedCallable:
    """Return a function of a list of tensors that runs kernels which Inductor generates.

    Args:
        described: called without symbols; returns the operations and the layouts of their inputs.
        device: device of all tensors.
        benchmarked: whether the first call may time several kernels and choose the fastest, which
            allocates memory on the device. Otherwise there is one kernel, chosen by rules.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    return _compile_described(described, device, FakeTensorMode(), {}, benchmarked=benchmarked)


def compile_for_sizes(
    described: Callable[[Symbols], Described],
    device: torch.device,
    hints: Mapping[str, int],
    *,
    benchmarked: bool = True,
) -> tuple[BoxedCallable, Callable[..., bool]]:
    """Return a function of a list, of tensors and then sizes, and a test for valid sizes.

    Inductor generates the kernels that the function runs. The test takes the sizes in the order of
    ``hints``, and returns whether the kernels are valid for them.

    Args:
        described: called with symbols for the sizes.
        device: device of all tensors.
        hints: example values of the sizes, by name.
        benchmarked: as for :func:`compile_kernels`.
    """
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv  # noqa: PLC0415

    environment = ShapeEnv()
    symbols: dict[str, Any] = {}
    names: dict[Any, str] = {}
    for name, hint in hints.items():
        source = ConstantSource(name)
        symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols[name] = environment.create_symintnode(symbol, hint=hint, source=source)
        names[symbol] = name
    mode = FakeTensorMode(shape_env=environment)
    run = _compile_described(described, device, mode, symbols, benchmarked=benchmarked)
    texts = [f"0 < {name}" for name in hints]
    for guard in environment.guards:
        named = {symbol: sympy.Symbol(name, integer=True) for symbol, name in names.items()}
        texts.append(f"({python_text(guard.expr.xreplace(named))})")
    for symbol, name in names.items():
        bounds = environment.var_to_range.get(symbol)
        if bounds is not None and bounds.lower.is_Integer:
            texts.append(f"{int(bounds.lower)} <= {name}")
        if bounds is not None and bounds.upper.is_Integer:
            texts.append(f"{name} <= {int(bounds.upper)}")
    text = f"lambda {', '.join(hints)}: {' and '.join(texts)}"
    holds: Callable[..., bool] = eval(text, {"math": math, "torch": torch})
    return run, holds


@contextmanager
def compilers_side_by_side() -> Iterator[None]:
    """Run the compilers of all kernels that this thread asks for inside at the same time.

    No kernel may be called before the end, where all compilers are awaited and their errors are
    raised. Inductor itself would wait for the kernels of each graph. Checked with torch 2.11 and
    2.13.
    """
    from torch._inductor.async_compile import AsyncCompile  # noqa: PLC0415

    waiting: list[tuple[Any, dict[str, Any]]] = []
    thread = threading.get_ident()
    with _one_thread:
        original: Any = AsyncCompile.wait

        def later(compiler: Any, scope: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                waiting.append((compiler, scope))
            else:
                original(compiler, scope)

        AsyncCompile.wait = later  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            AsyncCompile.wait = original  # type: ignore[method-assign]
    for compiler, scope in waiting:
        original(compiler, scope)


_one_thread = threading.Lock()
"""Held by the thread that runs compilers at the same time."""


def _compile_described(
    described: Callable[[Symbols], Described],
    device: torch.device,
    mode: Any,
    symbols: Symbols,
    *,
    benchmarked: bool,
) -> BoxedCallable:
    from torch._guards import TracingContext, tracing  # noqa: PLC0415
    from torch._inductor import config  # noqa: PLC0415
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    context = tracing(TracingContext(mode))  # replaces that of an active capture
    by_rules = not benchmarked and device.type != "cpu"  # on a CPU nothing is timed
    settings = _SETTINGS | _BY_RULES if by_rules else _SETTINGS
    with _disable_current_modes(), torch.no_grad(), context, config.patch(settings):
        graph, inputs = described(symbols)
        with mode:
            examples: list[Any] = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for (shape, stride), dtype in inputs
            ]
            examples += symbols.values()
            run = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run
            traced = make_fx(
                lambda *args: run(*args[: len(inputs)]),
                decomposition_table=dict(decompositions()),
                tracing_mode="symbolic" if symbols else "real",
            )(*examples)
        traced.graph.eliminate_dead_code()
        output = traced.graph.output_node()
        results: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        traced.recompile()
        made: Any = compile_fx_inner(traced, examples, is_inference=True)
    run_kernels: BoxedCallable = getattr(made, "current_callable", None) or made
    return run_kernels


_SETTINGS: dict[str, Any] = {
    "fallback_random": True,
    "comprehensive_padding": False,
    "size_asserts": False,
    "alignment_asserts": False,
}
"""Results are as large as those of the operations; what has been checked is not checked again."""

_BY_RULES: dict[str, Any] = {
    "deterministic": True,  # one kernel per reduction, whatever registers it takes
    "triton.autotune_pointwise": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "combo_kernels": False,
    "benchmark_fusion": False,
    "triton.multi_kernel": 0,
}
"""One version of each kernel, so that nothing is timed on the device."""
