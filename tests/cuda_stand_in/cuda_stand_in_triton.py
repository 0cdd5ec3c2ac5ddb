"""Values of Triton's kernels: with ``TRITON_INTERPRET=1`` numpy computes them on their stream.

Triton's interpreter copies a kernel's tensors to the host, runs it there and copies them back, all
at the launch. Here a launch is queued like any other item, and runs over the device's memory
itself. So it reads what its stream has computed by then, and what other streams write meanwhile.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cuda_stand_in import _runtime


def load() -> None:
    """Queue what Triton's interpreter runs, and give it the functions of ``libdevice``.

    It no longer computes whether integers overflow: it discards the answer unless it debugs, and
    takes a quarter of its time for it.
    """
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def queued(kernel: Any, *args: Any, **kwargs: Any) -> None:
        spans: list[tuple[int, int]] = []
        there = [_on_the_host(arg, spans) for arg in args]
        named = {name: _on_the_host(arg, spans) for name, arg in kwargs.items()}
        name = kernel.fn.__name__

        def run_now() -> None:
            for at, nbytes in spans:
                if not _runtime().standin_is_live(ctypes.c_void_p(at), ctypes.c_size_t(nbytes)):
                    raise RuntimeError(f"{name} touches memory that was given back")
            with torch.no_grad():
                run(kernel, *there, **named)

        _enqueue(name, run_now)

    interpreter.GridExecutor.__call__ = queued
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter.InterpreterBuilder.create_extern_elementwise = _elementwise
    _interpret_libdevice(interpreter.interpreter_semantic)


class _Patched:
    """What a kernel has patched of Triton's language; its helpers patch the same modules again."""

    def __init__(self, scope: Any, modules: set[frozenset[int]]) -> None:
        self._scope, self._modules = scope, modules

    def restore(self) -> None:
        self._modules.clear()
        self._scope.restore()


def _patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``patch``, once for each set of modules while a kernel runs: it is slow."""
    from triton import language

    patched: set[frozenset[int]] = set()

    def once(function: Any) -> Any:
        used = function.__globals__.values()
        modules = frozenset(id(m) for m in used if m is language or m is language.core)
        if modules in patched:
            return None  # for a helper, whose scope nobody restores
        patched.add(modules)
        return _Patched(patch(function), patched)

    return once


def _on_the_host(arg: Any, spans: list[tuple[int, int]]) -> Any:
    """``arg``; a tensor of the device as one of the host, over the same memory."""
    if isinstance(arg, tuple):
        return tuple(_on_the_host(each, spans) for each in arg)
    if not isinstance(arg, torch.Tensor) or not arg.is_cuda:
        return arg
    storage = arg.untyped_storage()
    nbytes = storage.nbytes()
    if not nbytes:
        return torch.empty(arg.shape, dtype=arg.dtype)
    spans.append((storage.data_ptr(), nbytes))
    memory = (ctypes.c_char * nbytes).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=arg.dtype)
    return made.set_(whole, arg.storage_offset(), arg.shape, arg.stride())


# ---- the queue ---------------------------------------------------------------------------------

_waiting: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_names: dict[str, bytes] = {}  # for as long as the process lives: items have their addresses


@ctypes.CFUNCTYPE(None, ctypes.c_uint64)
def _run(which: int) -> None:
    try:
        _waiting.pop(which)()
    except Exception as error:
        _runtime().standin_fault(f"{type(error).__name__}: {error}".encode())


def _enqueue(name: str, run: Callable[[], None]) -> None:
    """Have the current stream run a function of Python's."""
    which = next(_numbers)
    _waiting[which] = run
    stream = torch.cuda.current_stream().cuda_stream
    _runtime().standin_enqueue_python(
        ctypes.c_void_p(stream),
        _names.setdefault(name, name.encode()),
        _run,
        ctypes.c_uint64(which),
    )


# ---- libdevice ---------------------------------------------------------------------------------


def _interpret_libdevice(semantic: Any) -> None:
    """Have its functions reach :func:`_elementwise`.

    Triton chooses those of a device by its target, and the interpreter has none.
    """
    from triton.language import core
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as of_cuda

    def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, _semantic=None: function(*args, _semantic=semantic)

    for name, function in vars(of_cuda).items():
        if core.is_builtin(function):
            setattr(libdevice, name, interpreted(function))


def _by_torch(name: str) -> Callable[..., np.ndarray]:
    function = getattr(torch, name)
    return lambda *args: function(*map(torch.from_numpy, map(np.ascontiguousarray, args))).numpy()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _by_torch(name)
        for name in (
            "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign",
            "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "fmod",
            "hypot", "lgamma", "log", "log10", "log1p", "log2", "nextafter", "pow", "rsqrt",
            "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
        )
    },
    "fabs": np.abs,
    "fast_tanh": _by_torch("tanh"),
    "isinf": np.isinf,
    "isnan": np.isnan,
    "isfinited": np.isfinite,
    "finite": np.isfinite,
    "ilogb": lambda x: np.frexp(x)[1] - 1,
    "ldexp": np.ldexp,
    "llrint": np.rint,
    "nearbyint": np.rint,
    "rint": np.rint,
    "dsqrt_rn": np.sqrt,
    "fsqrt_rn": np.sqrt,
}  # fmt: skip


def _elementwise(
    _builder: Any, _library: str, _path: str, symbol: str, args: Any, kind: Any, _pure: bool
) -> Any:
    from triton.runtime import interpreter

    name = symbol.removeprefix("__nv_")
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"the stand-in has no {symbol}")
    with np.errstate(all="ignore"):
        made = np.asarray(function(*(arg.data for arg in args)))
    scalar = kind.scalar
    return interpreter.TensorHandle(made.astype(interpreter._get_np_dtype(scalar)), scalar)
