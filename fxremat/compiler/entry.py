"""Calls captured code: the first sizes are numbers, and all others are symbols."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.compiler.compiler import compile_graph
from fxremat.errors import CaptureError, SizesError
from fxremat.graph.shortfall import user_line, warn
from fxremat.training.training import DryRunFinished, Training


class Backend:
    """The Dynamo backend of a :class:`Training`, which it does not keep alive.

    Dynamo keeps the backend, and what the backend returns for graphs, in caches of the user's
    functions and among their globals, for as long as these functions exist.
    """

    def __init__(self, training: Training) -> None:
        self.training = weakref.ref(training)

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_options: Any
    ) -> Callable[..., Any]:
        """Plan one graph captured by Dynamo, and return the callable that runs it as planned."""
        training = self.training()
        assert training is not None  # the training's owner makes the call
        return compile_graph(training, module, example_inputs)


class Entry:
    """A forward that Dynamo captures when it is called.

    One capture with symbols as tensor sizes serves all sizes. The sizes of the first call have a
    capture with numbers, which has fewer operations and whose plan stays exact when other sizes
    follow.

    Args:
        forward: the function to capture.
        backend: the backend of Dynamo.
        dynamic: ``True``: all captures have symbols as sizes; ``False``: none has; ``None``: those
            after the first size have symbols, if the operations allow it.
        whole: whether the forward must be captured as one graph.
        failures: returns the exceptions that mean that the capture failed before anything ran.
        on_failure: is called with such an exception and with the arguments, and returns the
            outputs; ``None``: the exception is raised.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backend: Callable[..., Any],
        *,
        dynamic: bool | None,
        whole: bool,
        failures: Callable[[], tuple[type[Exception], ...]] = torch_compat.capture_failures,
        on_failure: Callable[[Exception, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        forbid_silent_fallback()
        self._dynamic = dynamic
        self._first: list[object] | None = None
        self._forward, self._backend, self._whole = forward, backend, whole
        self._failures, self._on_failure = failures, on_failure
        own, others = (torch_compat.with_code_of_its_own(forward) for _ in range(2))
        self._run_first = torch_compat.compile_function(
            own, backend, whole=whole, dynamic=dynamic is not False
        )
        self._run_others = torch_compat.compile_function(others, backend, whole=whole, dynamic=True)
        self._are_dynamic = False  # other sizes were captured with symbols

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the forward; capture it first if no capture fits the call."""
        try:
            if self._dynamic is False:
                return self._run_first(*args, **kwargs)
            plain = not kwargs and all(type(x) is torch.Tensor for x in args)
            leaves = args if plain else tree_leaves((args, kwargs))
            tensors = args if plain else [x for x in leaves if isinstance(x, torch.Tensor)]
            sizes: list[object] = [t.shape for t in tensors]
            if not plain:
                sizes += [x for x in leaves if type(x) is int]
            if self._first is None:
                self._first = sizes
            if sizes == self._first and not self._dynamic:
                return self._run_first(*args, **kwargs)
            return self._call_other_sizes(tensors, args, kwargs)
        except Exception as error:
            if self._on_failure is None or not isinstance(error, self._failures()):
                raise
            failed = error
        try:
            return self._on_failure(failed, args, kwargs)
        finally:
            del failed  # this frame would be in a cycle with it

    def _call_other_sizes(
        self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # All sizes become symbols at once, not each one when it changes.
        vary = contextlib.nullcontext() if self._are_dynamic else torch_compat.sizes_vary(tensors)
        try:
            with vary:
                results = self._run_others(*args, **kwargs)
        except torch_compat.capture_failures() as error:
            cause = torch_compat.failure_cause(error)
            # In pieces something may have run already.
            if self._dynamic or not self._whole or not isinstance(cause, SizesError):
                raise
            self._fix_sizes()
            return self._run_first(*args, **kwargs)
        self._are_dynamic = True
        return results

    def _fix_sizes(self) -> None:
        """Capture each tensor size separately, with numbers instead of symbols, from now on."""
        own = torch_compat.with_code_of_its_own(self._forward)
        self._run_first = torch_compat.compile_function(
            own, self._backend, whole=self._whole, dynamic=False
        )
        self._dynamic = False


class SeparateCapture:
    """A context in which Dynamo captures modules although it does not capture their callers.

    The given modules are never part of their caller's graph. Torch's containers, which Dynamo skips
    when code calls them that it has left to Python, are captured.

    The context replaces the modules' forwards, and restores them when its last user leaves it.

    Args:
        model: the model whose containers are captured.
        modules: the modules of the model that are never part of their caller's graph.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module] = ()) -> None:
        self._forwards = {
            module: torch_compat.seen(module.forward)
            for module in model.modules()
            if module is not model and torch_compat.is_passed_by(module)
        }
        self._forwards |= {
            module: torch_compat.captured_separately(module.forward) for module in modules
        }
        self._before: dict[nn.Module, object] = {}
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._forwards:
            return
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for module, forward in self._forwards.items():
                if "forward" in vars(module):
                    self._before[module] = vars(module)["forward"]
                vars(module)["forward"] = forward

    def __exit__(self, *_exc_info: object) -> None:
        if not self._forwards:
            return
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for module in self._forwards:
                del vars(module)["forward"]
            for module, forward in self._before.items():
                vars(module)["forward"] = forward
            self._before.clear()


def trace_only(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic: bool | None,
) -> Exception | None:
    """Trace a call as one graph without running it; return the error, or ``None`` on success.

    Args:
        forward: the function to trace.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        dynamic: see :class:`Entry`.
    """

    def stop(*_args: Any) -> Any:
        raise DryRunFinished

    entry = Entry(forward, lambda *_given: stop, dynamic=dynamic, whole=True)
    try:
        entry(*args, **kwargs)
    except DryRunFinished:
        return None
    except Exception as error:
        return error
    return CaptureError(
        "the forward runs no operation that can be captured as a graph. Remove "
        "torch.compiler.disable from it, or compile the modules that it calls",
        code="FXR301",
    )


_NAMED_BACKEND = "fxremat.module.backend"


def _is_fxremat(backend: object) -> bool:
    """Return whether a Dynamo backend is a :class:`Backend` or that of ``backend="fxremat"``."""
    return isinstance(backend, Backend) or getattr(backend, "__module__", "") == _NAMED_BACKEND


def _training_of(backend: object) -> Training | None:
    return backend.training() if isinstance(backend, Backend) else None


def _recompile_limit_error(backend: object, setting: str, limit: int) -> BaseException:
    error = CaptureError(
        f"this model cannot be captured again: {setting} is {limit}, which counts all models that "
        "share its code, and torch would run it without a plan. Use one capture for values that "
        "change from call to call (dynamic=True or torch._dynamo.mark_dynamic for sizes, tensors "
        "for numbers), or raise the limit",
        code="FXR303",
    )
    training = _training_of(backend)
    return error if training is None else training.capture_error(error)


def _runs_unplanned(backend: object, code: CodeType) -> bool:
    training = _training_of(backend)
    return training is not None and training.runs_unplanned(code)


def _warn_of_dispatch_mode() -> None:
    line = user_line()
    warn(
        f"the step{f' at {line}' if line else ''} is called under a TorchDispatchMode such as "
        "FlopCounterMode, which receives each operation, so no plan is followed and no budget "
        "holds. Call it outside of that mode",
        code="FXR109",
    )


_RULES = torch_compat.Rules(
    _is_fxremat, _recompile_limit_error, _runs_unplanned, _warn_of_dispatch_mode
)


def forbid_silent_fallback() -> None:
    """Patch Dynamo to raise an error where it would run code of this backend uncompiled."""
    torch_compat.never_uncompiled(_RULES)
