"""The bytes of optimizers' state before it exists, measured by one step on small parameters."""

from __future__ import annotations

import contextlib
import copy
import math
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxremat import torch_compat
from fxremat.capture.sample import Sample
from fxremat.errors import ArgumentError
from fxremat.options.readers import Optimizer
from fxremat.passes.joint.graph import allocated_bytes

SMALL = 1 << 14
"""The most elements of a parameter of which a trial step is made as it is; larger ones get a
stand-in."""

SIZES = (
    (),
    (16640,),
    (176, 208),
    (48, 80, 112),
    (16, 48, 5, 7),
    (16, 48, 5, 7, 11),
)
"""Sizes of a stand-in, by its number of dimensions. They are distinct, so that a size of its state
shows which one it follows. It has more than 4096 elements, and whole blocks of 256: smaller
parameters, and others, are not quantized by usual 8-bit optimizers."""

_OPTIMIZER = torch.optim.Optimizer

StateBytes = Mapping[int, tuple[int, ...]]
"""Bytes of each tensor of state, by the ``id`` of its parameter."""


def optimizer_bytes(
    optimizers: Iterable[Optimizer], model: nn.Module
) -> dict[int, tuple[int, ...]]:
    """Return the bytes of each tensor of optimizer state, by the ``id`` of its parameter.

    State that does not exist yet is measured by one step of a copy of the optimizer, on a parameter
    of the same dtype, device and number of dimensions. State on another device than its parameter
    is not counted, such as Adam's count of steps unless it is ``capturable`` or ``fused``. Nor is
    state of parameters on devices that the model has no parameter on, such as copies on the host.

    Args:
        optimizers: optimizers of the step; a class stands for an instance with default options.
        model: the model whose parameters an instance of a class is made of.

    Raises:
        ArgumentError: an optimizer cannot take such a step, or a class needs more arguments than
            the parameters.
    """
    state_bytes: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    devices = {parameter.device for parameter in model.parameters()}
    for instance in with_state(_instance_of(own, model) for own in optimizers):
        trials: dict[object, Trial] = {}
        for number, group in enumerate(instance.param_groups):
            for parameter in group["params"]:
                if devices and parameter.device not in devices:
                    continue
                local = torch_compat.local_part(parameter)
                state = _existing_state(instance, parameter)
                if state is None:
                    key = number, parameter.dtype, parameter.device, _stand_in_shape(local)
                    if key not in trials:
                        trials[key] = _try_step(instance, group, local)
                    sizes = list(trials[key].sizes_for(local))
                else:
                    sizes = [torch_compat.nbytes_of(v) for v in state]
                # The allocator rounds each tensor by itself.
                state_bytes[id(parameter)] += tuple(
                    allocated_bytes(nbytes, parameter.device) for nbytes in sizes
                )
    return dict(state_bytes)


def with_state(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that keep the state of ``optimizers``.

    An optimizer that is none by itself, but only passes steps on to others, keeps none: the ones
    that it has in its attributes do. torchao's ``CPUOffloadOptimizer`` is one.
    """
    for optimizer in optimizers:
        if "state" in vars(optimizer):
            yield optimizer
        else:
            held = (own for own in _attributes_of(optimizer) if isinstance(own, _OPTIMIZER))
            yield from with_state({id(own): own for own in held}.values())


def _attributes_of(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """Yield the attributes of an optimizer, and what those that are containers have in them."""
    for value in vars(optimizer).values():
        if isinstance(value, Mapping):
            yield from value.keys()
            yield from value.values()
        elif isinstance(value, (list, tuple, set)):
            yield from value
        else:
            yield value


def counted_state(
    state: StateBytes, model: nn.Module, gradients: Iterable[torch.Tensor] | None
) -> tuple[int, ...]:
    """Return the bytes of each tensor of optimizer state that a step is planned for.

    Args:
        state: the state of all optimizers.
        model: the model that trains. State of parameters of another network is always counted.
        gradients: dense parts of the parameters that the captured step computes a gradient of:
            others of the model never get state. ``None``: not all of the step is captured.
    """
    left_out: set[int] = set()
    if gradients is not None:
        used = {torch_compat.storage_key(t) for t in gradients}
        for parameter in model.parameters():
            if used.isdisjoint(torch_compat.storage_keys(parameter)):
                left_out.add(id(parameter))
    return tuple(n for own, sizes in state.items() if own not in left_out for n in sizes)


def check_optimizers(
    optimizers: Iterable[Optimizer], model: nn.Module, call: Sample | None
) -> None:
    """Raise if an optimizer belongs to another model.

    Args:
        optimizers: the optimizers of the step; a class is accepted for any model.
        model: the model that trains. If it has no parameter to train, any optimizer is accepted.
        call: a call of the model, whose tensors may be optimized too.

    Raises:
        ArgumentError: an optimizer steps no parameter of ``model``, though that has some to train.
    """
    own = {id(p) for p in model.parameters()}
    own |= {id(t) for _, t in call.tensors()} if call is not None else set()
    trains = any(p.requires_grad for p in model.parameters())
    for optimizer in optimizers:
        if not (isinstance(optimizer, torch.optim.Optimizer) and trains):
            continue
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if "state" not in vars(optimizer):  # it may step copies, and have the parameters as well
            stepped += [own for own in _attributes_of(optimizer) if isinstance(own, torch.Tensor)]
        if own.isdisjoint(map(id, stepped)):
            name = type(optimizer).__name__
            raise ArgumentError(
                f"optimizer, {name}, steps {len(stepped)} parameters, none of which is a parameter "
                f"of {type(model).__name__}. Create it from model.parameters() after "
                f"anything that replaces them, pass its class, optimizer=torch.optim.{name}, or "
                "pass the bytes of its state as reserve=",
                argument="optimizer",
                value=optimizer,
                code="FXR405",
            )


def _instance_of(optimizer: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    make: Any = optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [dict(p._post_accumulate_grad_hooks or {}) for p in trained]
    try:
        instance: torch.optim.Optimizer = make(trained)
    except (TypeError, ValueError, AssertionError) as error:
        raise _refused(
            optimizer, f"{optimizer.__name__} needs more than the parameters ({error})"
        ) from error
    if _drop_new_hooks(trained, before):
        raise _refused(
            optimizer,
            f"{optimizer.__name__} registers hooks of the parameters: create it first, and pass "
            "the instance",
        )
    return instance


def _drop_new_hooks(
    parameters: Iterable[torch.Tensor], before: Iterable[Mapping[int, Any]]
) -> bool:
    """Remove post-accumulate hooks that did not exist ``before``; return whether any did not."""
    removed = False
    for parameter, own in zip(parameters, before, strict=True):
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
        for key in hooks.keys() - own.keys():
            del hooks[key]
            removed = True
    return removed


def _existing_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> list[torch.Tensor] | None:
    """Return a parameter's state that is on its device; ``None``: it has no state yet."""
    state = optimizer.state.get(parameter)
    if not state:
        return None
    values = (v for v in state.values() if isinstance(v, torch.Tensor))
    return [value for value in values if value.device == parameter.device]


def _stand_in_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the small tensor that stands for ``parameter`` in a trial step.

    Its sizes are distinct, so that a size of the state shows which one it follows.
    """
    shape = tuple(parameter.shape)
    if parameter.numel() <= SMALL:
        return shape
    sizes = iter(SIZES[min(len(shape), len(SIZES) - 1)])
    by_size: dict[int, int] = {}
    for size in shape:
        if size > 1 and size not in by_size:
            by_size[size] = next(sizes, 1)
    return tuple(by_size.get(size, size) for size in shape)


@dataclass(frozen=True, slots=True)
class Trial:
    """The state that a trial step has made for a small tensor, and for one of twice its size.

    Attributes:
        probe: the small tensor that stands for a parameter. The first of its sizes that is more
            than 1 is doubled in the other tensor.
        state: the dense tensors of its state that are on its device.
        doubled: those of the other tensor, in the same order.
    """

    probe: torch.Tensor
    state: list[torch.Tensor]
    doubled: list[torch.Tensor]

    def sizes_for(self, parameter: torch.Tensor) -> Iterator[int]:
        """Yield the bytes of each tensor of state of ``parameter``."""
        if parameter.shape == self.probe.shape:
            yield from (value.nbytes for value in self.state)
            return
        real = dict(zip(self.probe.shape, parameter.shape, strict=True))
        count, probed = parameter.numel(), self.probe.numel()
        for value, doubled in zip(self.state, self.doubled, strict=True):
            kept = value.numel()
            if kept == probed:
                elements = count
            elif all(size == 1 or size in real for size in value.shape):
                elements = math.prod(real.get(size, size) for size in value.shape)
            elif kept == doubled.numel():
                elements = kept
            else:  # one for each block of elements
                elements = math.ceil(count * kept / probed)
            yield elements * value.element_size()


def _try_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> Trial:
    """Make a trial step of a copy of ``optimizer`` on tensors that stand for ``parameter``."""
    shape = _stand_in_shape(parameter)
    larger = list(shape)
    if shape != tuple(parameter.shape):
        first = next(i for i, size in enumerate(shape) if size > 1)
        larger[first] *= 2
    probes = [
        torch.zeros(own, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
        for own in (shape, larger)
    ]
    for probe in probes:
        probe.grad = torch.ones_like(probe)
    trial = copied_optimizer(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": probes}]
    try:
        with _gradients_hidden(optimizer):
            torch_compat.step_unseen(trial)
    except Exception as error:  # of the user's class
        name = type(optimizer).__name__
        raise _refused(
            optimizer, f"the state of {name} cannot be measured by a trial step ({error})"
        ) from error
    state, doubled = (
        [
            part
            for value in trial.state[probe].values()
            if isinstance(value, torch.Tensor) and value.device == probe.device
            for part in torch_compat.dense_parts(value)
        ]
        for probe in probes
    )
    return Trial(probes[0], state, doubled)


def copied_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a shallow copy of an optimizer that also has the attributes of its own class.

    Containers and tensors among these are copied, so that a step of the copy does not change them.

    Raises:
        ArgumentError: the optimizer wraps another one, whose step would change the parameters.
    """
    made = copy.copy(optimizer)  # by ``__getstate__``, which leaves out what the class has added
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise _refused(
                optimizer, f"the {type(optimizer).__name__} wraps a {type(value).__name__}"
            )
        is_bound = isinstance(value, (types.MethodType, types.FunctionType))  # by a scheduler
        if name not in vars(made) and not is_bound:
            vars(made)[name] = _copied(value)
    return made


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(own) for key, own in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_copied, value))
    return value


@contextlib.contextmanager
def _gradients_hidden(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Take the gradients of an optimizer's parameters away, so that no step can change these."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    hidden = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


def _refused(optimizer: object, why: str) -> ArgumentError:
    return ArgumentError(
        f"{why}: pass the bytes of its state as reserve= instead of optimizer=",
        argument="optimizer",
        value=optimizer,
        code="FXR405",
    )
