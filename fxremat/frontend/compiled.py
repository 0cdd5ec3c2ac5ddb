"""The module that ``fxremat.compile`` returns."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat import torch_compat
from fxremat.costs.measure import device_of
from fxremat.errors import CaptureError, FxrematError
from fxremat.frontend.capture import StepCompiler
from fxremat.frontend.entry import Entry
from fxremat.frontend.family import Compiled
from fxremat.frontend.outputs import Detaching, Unused, refuse_gradients
from fxremat.frontend.sample import places_of
from fxremat.frontend.trace import StepTrace, trace_step
from fxremat.report.plan import Plan


class CompiledModule(nn.Module):
    """A model that trains under a byte budget.

    It is the user's model in all but its training forward: parameters, buffers, modules,
    ``state_dict``, ``train()``, ``to()`` and attributes are those of the original, which
    it shares. In eval mode and without gradients it runs the original forward.

    Attributes:
        plan: of the step that ran last (of the sample, before any step).
        plans: of every shape seen so far, in order.
    """

    def __new__(cls, original: nn.Module, *_args: object, **_kwargs: object) -> CompiledModule:
        """An instance that can be indexed, counted and iterated if the original can."""
        own = {name: _delegate(name) for name in _CONTAINER if hasattr(type(original), name)}
        return super().__new__(type(cls.__name__, (cls,), own) if own else cls)

    def __init__(
        self,
        original: nn.Module,
        compiler: StepCompiler,
        unused: Unused | None = None,
        *,
        dynamic: bool | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["_original"] = original
        self.__dict__["_compiler"] = compiler
        self.__dict__["_unused"] = unused
        inner = torch_compat.wrapped_by(original)
        captured = Detaching(inner, unused) if unused else inner
        self.__dict__["_whole"] = Entry(captured, compiler, dynamic=dynamic)
        self.__dict__["_outer"] = None
        if inner is not original:
            self.__dict__["_outer"] = torch_compat.wrapped_anew(original, self.__dict__["_whole"])
        # Dynamo keeps compiled code for longer than this module lives.
        weakref.finalize(self, compiler.close).atexit = False
        unwatch = compiler.optimizers.watch(original, device_of(original))
        weakref.finalize(self, unwatch).atexit = False
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = original.__dict__[shared]

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        original: nn.Module | None = self.__dict__.get("_original")
        return original.training if original is not None else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self._original.training = mode

    @property
    def plan(self) -> Plan:
        """The plan of the step that ran last."""
        return self._latest.plan

    @property
    def _latest(self) -> Compiled:
        latest: Compiled | None = self._compiler.latest
        assert latest is not None
        return latest

    @property
    def plans(self) -> tuple[Plan, ...]:
        """One plan for each shape seen so far."""
        plans = (compiled.plan for compiled in self._compiler.compiled)
        return tuple({id(plan): plan for plan in plans}.values())

    @property
    def forward_code(self) -> str:
        """The emitted forward as Python: one line an operation."""
        return self.plan.forward_code

    @property
    def backward_code(self) -> str:
        """The emitted backward as Python: one line an operation."""
        return self.plan.backward_code

    def trace_step(self, step: Callable[[], object]) -> StepTrace:
        """Run ``step`` once and time every call and every transfer of it.

        Args:
            step: one forward and one backward of this module.

        Raises:
            ValueError: it ran the forward or the backward more or less than once.
        """
        return trace_step(step, compiler=self._compiler, device=device_of(self._original))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Train as planned; in eval mode or without gradients, the original forward.

        Raises:
            BudgetError: new shapes need more than the budget.
            CaptureError: new shapes or flags lead to code that cannot be captured.
        """
        if not (self._original.training and torch.is_grad_enabled()):
            return self._original(*args, **kwargs)
        outputs = self.call_whole(args, kwargs)
        detached: tuple[int, ...] = ()
        if self.__dict__["_unused"] is not None:
            outputs, detached = outputs
        return refuse_gradients(outputs, detached) if detached else outputs

    def call_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled graph; what Dynamo raises comes out as what really went wrong.

        Returns the outputs; with those that were detached, if some have no use.
        """
        original: nn.Module = self.__dict__["_original"]
        compiler: StepCompiler = self.__dict__["_compiler"]
        compiler.resident = lambda: _resident(original, args, kwargs)
        compiler.arguments = lambda: places_of(args, kwargs)
        try:
            with torch_compat.capture_settings():
                outer = None if compiler.dry else self.__dict__["_outer"]
                return (outer or self.__dict__["_whole"])(*args, **kwargs)
        except torch_compat.capture_failures() as error:
            cause = torch_compat.failure_cause(error)
            if isinstance(cause, FxrematError):
                raise cause from None
            data_dependent = isinstance(cause, torch_compat.data_dependent_errors())
            if cause is not error and not data_dependent:  # nothing that the model did
                raise cause from error
            raise CaptureError(
                f"{type(original).__name__} cannot be captured as one graph: {cause}\n"
                "fxremat plans whole steps: take what breaks the graph out of the forward"
            ) from error
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # see capture.emitted
            raise
        finally:
            compiler.resident = compiler.arguments = tuple  # a batch must not outlive its step

    def train(self, mode: bool = True) -> CompiledModule:
        """Put the model into training or eval mode."""
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, under the original's names."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the original."""
        return self._original.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> CompiledModule:
        self._original._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or "_original" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise TypeError(
            f"a compiled {type(self._original).__name__} cannot be copied or pickled: its plan "
            "holds for this process; copy the original model, or its state_dict, and compile again"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._original!r})"


_CONTAINER = ("__getitem__", "__setitem__", "__len__", "__iter__", "__contains__")


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: CompiledModule, *args: Any) -> Any:
        return getattr(self.__dict__["_original"], name)(*args)

    return method


def _resident(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    arguments = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    return (*model.parameters(), *model.buffers(), *arguments)
