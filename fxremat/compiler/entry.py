"""The way from a call into captured code: the first sizes as numbers, all others as symbols."""

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
from fxremat.training.training import Training


class Backend:
    """The Dynamo backend of a :class:`Training`, which goes when its owner does.

    Dynamo keeps this, and what is made for its graphs, in a cache of the user's functions and among
    their globals, for as long as these are there.
    """

    def __init__(self, training: Training) -> None:
        self.training = weakref.ref(training)

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_options: Any
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo's."""
        training = self.training()
        assert training is not None  # nobody else calls
        return compile_graph(training, module, example_inputs)


class Entry:
    """Calls a forward as it was captured.

    A capture with symbols serves all sizes. The first one has its own, with numbers: operations are
    fewer there, and what was planned for it is not planned less exactly once other sizes come.

    Args:
        forward: what is captured.
        backend: of Dynamo.
        dynamic: ``True``: symbols from the first call on; ``False``: never; ``None``: from the
            second size on, where what is computed can follow them.
        whole: it must be one graph.
        failures: tells what is raised where it cannot be captured, before anything has run.
        instead: is called with such an error and the arguments; ``None``: the error comes out.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backend: Callable[..., Any],
        *,
        dynamic: bool | None,
        whole: bool,
        failures: Callable[[], tuple[type[Exception], ...]] = torch_compat.capture_failures,
        instead: Callable[[Exception, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        keep_compiled()
        self._dynamic = dynamic
        self._first: list[object] | None = None
        self._given = forward, backend, whole
        self._failures, self._instead = failures, instead
        own, others = (torch_compat.with_code_of_its_own(forward) for _ in range(2))
        self._own = torch_compat.compile_function(
            own, backend, whole=whole, dynamic=dynamic is not False
        )
        self._others = torch_compat.compile_function(others, backend, whole=whole, dynamic=True)
        self._marked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, captured anew where it must be."""
        try:
            if self._dynamic is False:
                return self._own(*args, **kwargs)
            plain = not kwargs and all(type(x) is torch.Tensor for x in args)
            leaves = args if plain else tree_leaves((args, kwargs))
            tensors = args if plain else [x for x in leaves if isinstance(x, torch.Tensor)]
            sizes: list[object] = [t.shape for t in tensors]
            if not plain:
                sizes += [x for x in leaves if type(x) is int]
            if self._first is None:
                self._first = sizes
            if sizes == self._first and not self._dynamic:
                return self._own(*args, **kwargs)
            return self._of_other_sizes(tensors, args, kwargs)
        except Exception as error:
            if self._instead is None or not isinstance(error, self._failures()):
                raise
            failed = error
        try:
            return self._instead(failed, args, kwargs)
        finally:
            del failed  # this frame is its own

    def _of_other_sizes(
        self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # All sizes at once, not each as it is seen to change.
        vary = contextlib.nullcontext() if self._marked else torch_compat.sizes_vary(tensors)
        try:
            with vary:
                results = self._others(*args, **kwargs)
        except torch_compat.capture_failures() as error:
            whole = self._given[-1]  # else something may have run
            cause = torch_compat.failure_cause(error)
            if self._dynamic or not whole or not isinstance(cause, SizesError):
                raise
            self._only_numbers()
            return self._own(*args, **kwargs)
        self._marked = True
        return results

    def _only_numbers(self) -> None:
        """Capture each size by itself from now on: what is computed cannot follow symbols."""
        forward, backend, whole = self._given
        own = torch_compat.with_code_of_its_own(forward)
        self._own = torch_compat.compile_function(own, backend, whole=whole, dynamic=False)
        self._dynamic = False


class SeparateCapture:
    """A context in which modules are captured where their callers are not.

    Calls of some are never part of their caller's graph. Those of torch's own containers, which
    Dynamo passes by where it comes from code that it has left to Python, are then seen by it.

    Their forwards are others in it, and their own again once nobody is in it any more.

    Args:
        model: whose containers are seen.
        modules: of it, those that are never part of their caller's graph.
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
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._forwards:
            return
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            for module, forward in self._forwards.items():
                if "forward" in vars(module):
                    self._before[module] = vars(module)["forward"]
                vars(module)["forward"] = forward

    def __exit__(self, *_exc_info: object) -> None:
        if not self._forwards:
            return
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            for module in self._forwards:
                del vars(module)["forward"]
            for module, forward in self._before.items():
                vars(module)["forward"] = forward
            self._before.clear()


def _is_ours(found: object) -> bool:
    """Whether a backend of Dynamo's is a :class:`Backend`, or the one that is known by name."""
    return isinstance(found, Backend) or getattr(found, "__module__", "") == _BY_NAME


_BY_NAME = "fxremat.module.backend"


def _training_of(backend: object) -> Training | None:
    return backend.training() if isinstance(backend, Backend) else None


def _captured_too_often(found: object, setting: str, limit: int) -> BaseException:
    error = CaptureError(
        f"this model cannot be captured once more: {setting} is {limit}, counted over all that "
        "share its code, and torch would run it without a plan. Let what changes from call to "
        "call be one capture (dynamic=True or torch._dynamo.mark_dynamic for sizes, tensors for "
        "numbers), or raise the limit"
    )
    training = _training_of(found)
    return error if training is None else training.refused(error)


def _runs_as_it_is(found: object, code: CodeType) -> bool:
    training = _training_of(found)
    return training is not None and training.runs_as_it_is(code)


def _in_mode() -> None:
    line = user_line()
    warn(
        f"the step{f' at {line}' if line else ''} is called under a TorchDispatchMode, as "
        "FlopCounterMode, which sees each operation: no plan is followed there, and no budget holds"
    )


_RULES = torch_compat.Rules(_is_ours, _captured_too_often, _runs_as_it_is, _in_mode)


def keep_compiled() -> None:
    """Have Dynamo never leave code of ours to Python in silence, from the first time on."""
    torch_compat.never_uncompiled(_RULES)
