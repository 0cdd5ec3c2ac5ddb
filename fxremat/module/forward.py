"""The forward of a compiled module: planned in training, the model's own otherwise."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.capture.errors import without_frames
from fxremat.capture.sample import Sample
from fxremat.errors import FxrematError
from fxremat.graph.shortfall import warn
from fxremat.module.state import ModuleState, ensure_initialized, runner_for

_EVAL = "in eval mode, with gradients"


class PlannedForward:
    """The ``forward`` of the compiled modules of one class, as a descriptor.

    A forward that is assigned to a compiled module replaces only that module's: it may call the
    one that it replaces, and the model keeps its original one.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        @functools.wraps(forward)
        def planned(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            state: ModuleState = module._state
            if not (state.original.training and torch.is_grad_enabled()):
                return _call_without_training(state, args, kwargs)
            obstacle = _obstacle_to_planning(state)
            if obstacle:
                return _call_original(state, args, kwargs, obstacle)
            runner = state.runner
            if runner is None and not ensure_initialized(state, Sample(args, kwargs)):
                return _call_original(state, args, kwargs, "before its parameters are made")
            if runner is None or runner.may_retry_whole:
                runner = runner_for(state, Sample(args, kwargs))
            try:
                return runner.run(args, kwargs)
            except FxrematError as error:
                caught = error
            try:
                raise without_frames(caught)
            finally:
                del caught  # this frame would be in a cycle with it

        self._planned = planned

    def __get__(self, module: Any, _owner: object = None) -> Any:
        if module is None:
            return self._planned
        if torch.compiler.is_compiling():  # as part of a larger model, which is captured whole
            return module._state.original.forward
        return module._state.assigned or types.MethodType(self._planned, module)

    def __set__(self, module: Any, forward: Callable[..., Any]) -> None:
        """Assign a forward to a module; the planned one, or one that it wraps, undoes this."""
        function: Any = getattr(forward, "__func__", forward)
        own: Any = self._planned
        while function is not own and hasattr(own, "__wrapped__"):
            own = own.__wrapped__
        module._state.assigned = None if function is own else forward

    def __delete__(self, module: Any) -> None:
        if module._state.assigned is None:
            raise AttributeError("forward")
        module._state.assigned = None


def _call_without_training(
    state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the outputs of the model's own forward, in eval mode or without gradients.

    A call in eval mode with gradients enabled warns once that training in eval mode is not planned:
    at once if no step was trained before, and otherwise when a backward of its outputs runs.
    """
    if not torch.is_grad_enabled() or _EVAL in state.warned:
        return state.original.forward(*args, **kwargs)
    if not state.has_trained:
        _warn_of_eval(state)
        return state.original.forward(*args, **kwargs)
    returned = state.original.forward(*args, **kwargs)
    if torch_compat.in_transform():
        return returned
    for leaf in pytree.tree_leaves(returned):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(lambda _: _warn_of_eval(state))
    return returned


def _warn_of_eval(state: ModuleState) -> None:
    if _EVAL in state.warned:
        return
    state.warned.add(_EVAL)
    warn(
        f"{type(state.original).__name__} is called {_EVAL}, so no plan is "
        "followed and no budget holds. Call train() to train it, or use torch.no_grad()",
        code="FXR108",
    )


def _obstacle_to_planning(state: ModuleState) -> str:
    """Return, as text for a warning, why this call cannot be planned; ``""`` if it can."""
    if torch_compat.in_transform():
        return "inside a transform of torch.func, such as torch.func.grad or vmap"
    if torch_compat.in_dispatch_mode():
        return "under a TorchDispatchMode such as FlopCounterMode, which receives each operation"
    if torch_compat.runs_eagerly(captured=state.runner is not None):
        return "under a stance of torch.compiler that makes it run eagerly"
    return ""


def _call_original(
    state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any], obstacle: str
) -> Any:
    """Return the outputs of the model's own forward, and warn once that it is not planned.

    Args:
        state: the state of the module.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        obstacle: the result of :func:`_obstacle_to_planning`.
    """
    if obstacle not in state.warned:
        state.warned.add(obstacle)
        warn(
            f"{type(state.original).__name__} is called {obstacle}, so no plan is followed and no "
            "budget holds. Call it outside of that, or use the original model there",
            code="FXR109",
        )
    return state.original.forward(*args, **kwargs)
