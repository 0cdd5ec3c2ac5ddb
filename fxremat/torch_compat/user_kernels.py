"""User-written Triton kernels as operations of a graph.

Dynamo and ``torch.library.wrap_triton`` put a higher-order operator into the graph for each launch.
Its node refers to the kernel, and to arguments that no graph can hold, by places in a table of the
process.

Private names, checked with torch 2.13: ``triton_kernel_wrap`` with its operators, their keyword
arguments, its ``kernel_side_table`` and ``generate_ttir``; of Triton 3.7 ``JITFunction.cache_key``,
attributes of ``Autotuner``, and its ``_bench``, which runs one configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx

from fxremat.torch_compat.fakes import is_fake


@dataclass(frozen=True, slots=True)
class UserLaunch:
    """A node's launch of a Triton kernel that the user has written.

    Attributes:
        kernel: the result of Triton's decorators.
        constants: arguments that no graph can hold, by name.
        grid: how many programs run, for each configuration of the kernel.
        descriptors: how descriptors of tensors are made that the kernel reads.
        arguments: arguments by name, in order; some are nodes.
        written: names of the tensors that the kernel writes to, in the order of the arguments.
    """

    kernel: Any
    constants: Mapping[str, Any]
    grid: Sequence[Any]
    descriptors: Mapping[str, Any]
    arguments: Mapping[str, Any]
    written: tuple[str, ...]


def user_launch(node: fx.Node) -> UserLaunch | None:
    """Return the launch that ``node`` is; ``None`` if it is none.

    The results of ``node`` are copies of the tensors that the kernel writes to.
    """
    if getattr(node.target, "__name__", None) != "triton_kernel_wrapper_functional":
        return None  # compared by name, because importing the operator takes time
    given: Any = node.kwargs
    table = _kernel_table()
    cloned = frozenset(given["tensors_to_clone"])
    return UserLaunch(
        table.get_kernel(given["kernel_idx"]),
        table.get_constant_args(given["constant_args_idx"]),
        given["grid"],
        given["tma_descriptor_metadata"],
        given["kwargs"],
        tuple(name for name in given["kwargs"] if name in cloned),
    )


def _kernel_table() -> Any:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table  # noqa: PLC0415

    return kernel_side_table


class KernelLauncher:
    """Launches a user's Triton kernel, which writes to the tensors that it is given.

    For the arguments see :class:`UserLaunch`.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self._kernel, self._constants = kernel, dict(constants)
        self._place = -1

    @property
    def has_choices(self) -> bool:
        """Whether Triton has cached a configuration that it has chosen for this kernel."""
        return any(getattr(kernel, "cache", ()) for kernel in _wrapped(self._kernel))

    def __call__(
        self, grid: Sequence[Any], descriptors: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        """Launch the kernel; nothing is launched for tensors without data."""
        from torch._higher_order_ops.triton_kernel_wrap import (  # noqa: PLC0415
            triton_kernel_wrapper_mutation,
        )

        table, place = _kernel_table(), self._place
        if table.constant_args.get(place) is not self._constants:  # a reset of Dynamo empties it
            place = self._place = table.add_constant_args(self._constants)
        triton_kernel_wrapper_mutation(
            kernel_idx=table.add_kernel(self._kernel),
            constant_args_idx=place,
            grid=list(grid),
            tma_descriptor_metadata=dict(descriptors),
            kwargs=dict(arguments),
        )


def kernel_name(kernel: Any) -> str:
    """Return the name of the user's function that Triton's decorators have made a kernel of."""
    *_, function = _wrapped(kernel)
    return str(getattr(function, "__name__", type(kernel).__name__))


def kernel_digest(kernel: Any, constants: Mapping[str, Any]) -> str:
    """Return a digest of a kernel and its constants that is equal in all processes.

    It covers the kernel's source, all that it calls and reads, and how it is compiled and tuned.
    """
    lines = [
        *_description_lines(kernel),
        *(f"{name} {_text(constants[name])}" for name in constants),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _description_lines(kernel: Any) -> list[str]:
    lines: list[str] = []
    for layer in _wrapped(kernel):
        if hasattr(layer, "cache_key"):
            options = [(p.name, p.is_constexpr, p.do_not_specialize) for p in layer.params]
            return [*lines, layer.cache_key, str(options)]
        lines += [f"{name} {_text(getattr(layer, name, None))}" for name in _OF_TUNING]
        for config in getattr(layer, "configs", ()):
            lines.append(f"{config} {_text(getattr(config, 'pre_hook', None))}")
    return [*lines, _text(layer)]


_OF_TUNING = (
    "keys", "reset_to_zero", "restore_value", "values", "configs_top_k", "early_config_prune",
    "perf_model",
)  # fmt: skip
"""Attributes of Triton's decorators for tuning and for heuristics."""


def _text(value: Any) -> str:
    """Return a value as text without addresses, which is equal in all processes."""
    if hasattr(value, "cache_key"):
        return str(value.cache_key)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_text(value[name])}' for name in value)}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__module__}.{value.__qualname__} {_code_text(code)} {_closure_text(value)}"
    return f"{type(value).__name__} {value}"


def _code_text(code: CodeType) -> str:
    """Return the code of a function as text, including functions inside it."""
    consts = [
        _code_text(const) if isinstance(const, CodeType) else _text(const)
        for const in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {consts}"


def _closure_text(function: Any) -> str:
    """Return the closure and the defaults of a function as text."""
    named = list[str]()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name without a value
            value = cell.cell_contents
            code = getattr(value, "__code__", None)  # not its closure, which may contain itself
            named.append(_text(value) if code is None else _code_text(code))
    return f"{named} {_text(function.__defaults__)} {_text(function.__kwdefaults__)}"


def _wrapped(kernel: Any) -> Iterator[Any]:
    """Yield a kernel and everything that its decorators wrap, down to the function."""
    yield kernel
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
        yield kernel


def is_tuned(kernel: Any) -> bool:
    """Return whether Triton tries several configurations of a kernel at its first launch."""
    return any(len(getattr(layer, "configs", ())) > 1 for layer in _wrapped(kernel))


def gives_same_bits(launch: UserLaunch) -> bool:
    """Return whether two launches with equal arguments compute equal bits in any order of programs.

    The parsed kernel shows it: floats that several programs add to one place are summed in any
    order, and what an atomic operation returns, exchanges or compares depends on which program came
    first. The result is also ``False`` if Triton cannot parse the kernel for the traced arguments.
    """
    from torch._higher_order_ops.triton_kernel_wrap import generate_ttir  # noqa: PLC0415

    values: dict[str, Any] = {
        name: value.meta["val"] if isinstance(value, fx.Node) else value
        for name, value in launch.arguments.items()
    }
    try:
        module, _names = generate_ttir(
            launch.kernel, {**values, **launch.constants}, dict(launch.descriptors)
        )
        text = str(module)
    except Exception:  # torch, too, treats any error as a "no" here
        return False
    return all(map(_is_ordered, re.split(r"^\s*tt\.func ", text, flags=re.MULTILINE)))


_ATOMIC = re.compile(r"(?:(%\S+) = )?\"?tt\.atomic_(rmw|cas|poll)\"?[ (](\w*)")

_ANY_ORDER = ("add", "and", "or", "xor", "max", "min", "umax", "umin")
"""Atomic operations with the same result in any order: on integers, or choosing one of their
operands."""


def _is_ordered(function: str) -> bool:
    """Return whether nothing that a kernel's function computes depends on the order of programs.

    ``function`` is its text in Triton's intermediate representation.
    """
    for result, kind, operation in _ATOMIC.findall(function):
        read = len(re.findall(rf"{re.escape(result)}(?![\w:#])", function)) > 1 if result else False
        if kind != "rmw" or operation not in _ANY_ORDER or read:
            return False
    return "pure = false" not in function


def clone_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in a new storage, with the strides and the offset of ``tensor``."""
    from torch import _prims_common  # noqa: PLC0415

    clone: Any = _prims_common.clone_preserve_strides
    made: torch.Tensor = clone(tensor)
    return made


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Make Triton launch no kernel inside for tensors without data, which would write to address 0.

    This affects launches by Triton itself. Launches with data, of any thread, run as usual.
    """
    if "triton" not in sys.modules:  # there are no kernels
        yield
        return
    with _lock:
        _Withheld.depth += 1
        if _Withheld.depth == 1:
            _Withheld.replace()
    try:
        yield
    finally:
        with _lock:
            _Withheld.depth -= 1
            if _Withheld.depth == 0:
                _Withheld.restore()


@contextlib.contextmanager
def tunings() -> Iterator[list[str]]:
    """Yield a list that gets the names of the kernels that Triton tunes inside, in any thread.

    If Triton is loaded inside, the list is ``["triton"]`` instead.
    """
    names: list[str] = []
    if "triton" not in sys.modules:
        yield names
        names += ["triton"] * ("triton" in sys.modules)
        return
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    with _tuning:
        run = tuner._bench

        def bench(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(kernel_name(kernel))
            return run(kernel, *args, **kwargs)

        tuner._bench = bench
        try:
            yield names
        finally:
            tuner._bench = run


_lock, _tuning = threading.Lock(), threading.RLock()


class _Withheld:
    """Replaces Triton's launches of kernels by others that do nothing for tensors without data."""

    depth = 0
    _originals: tuple[tuple[Any, Any], ...] = ()

    @classmethod
    def replace(cls) -> None:
        tuner: Any = importlib.import_module("triton.runtime.autotuner")
        compiler: Any = importlib.import_module("triton.runtime.jit")
        kinds = tuner.Autotuner, compiler.JITFunction
        cls._originals = tuple((kind, kind.run) for kind in kinds)
        for kind, run in cls._originals:
            kind.run = _unless_fake(run)

    @classmethod
    def restore(cls) -> None:
        for kind, run in cls._originals:
            kind.run = run


def _unless_fake(run: Callable[..., Any]) -> Callable[..., Any]:
    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_fake, (*args, *kwargs.values()))):
            return None
        return run(kernel, *args, **kwargs)

    return launched
