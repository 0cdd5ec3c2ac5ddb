"""The sample: the arguments of one call of a model."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.capture.errors import release_frames
from fxremat.capture.isolation import attributes_replaced, generators_restored
from fxremat.errors import CaptureError, NoGradientError, SampleError


@dataclass(frozen=True, slots=True)
class Sample:
    """The arguments of one call of a model: tensors, and any other values.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments, by name.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(sample: object) -> Sample:
        """Return the sample for a tensor, a sequence or dict of arguments, or a ``Sample``.

        Raises:
            SampleError: ``sample`` is of another type.
        """
        match sample:
            case Sample():
                return sample
            case torch.Tensor():
                return Sample((sample,))
            case tuple() | list():
                return Sample(tuple(sample))
            case Mapping():
                return Sample((), {str(name): value for name, value in sample.items()})
        if isinstance(sample, (str, int, float)):
            raise SampleError(
                f"the sample is {sample!r}, a {type(sample).__name__}, which looks like a budget. "
                "Pass the budget after the sample, as in fxremat.compile(model, sample, '6 GiB'). "
                "Without a sample, compile(model, budget='6 GiB') plans for the first training "
                "call",
                code="FXR501",
            )
        raise SampleError(
            "the sample must be a tensor, a tuple of arguments, a dict of keywords, or "
            f"fxremat.Sample(args, kwargs), but is a {type(sample).__name__}",
            code="FXR501",
        )

    def map(self, change: Callable[[Any], Any]) -> Sample:
        """Return a sample with the result of ``change`` in place of each leaf, tensor or not."""
        args, kwargs = pytree.tree_map(change, (self.args, self.kwargs))
        return Sample(args, kwargs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor with its place, such as ``sample[0]`` or ``sample['x']``."""
        leaves, _ = pytree.tree_flatten_with_path((self.args, self.kwargs))
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                yield "sample" + pytree.keystr(path[1:]), leaf


def places_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return each tensor of a call with its place, as ``args[0]`` or ``kwargs['x']``."""
    named = (("args", args), ("kwargs", kwargs))
    return tuple(
        (name + pytree.keystr(path), leaf)
        for name, values in named
        for path, leaf in pytree.tree_flatten_with_path(values)[0]
        if isinstance(leaf, torch.Tensor)
    )


def check_sample(model: nn.Module, sample: Sample) -> None:
    """Raise an error if no step of this model and sample can be captured.

    Raises:
        SampleError: a tensor is not on the model's device, or has no data.
        CaptureError: autograd cannot save a tensor of the model.
        NoGradientError: nothing requires a gradient.
    """
    name = type(model).__name__
    for place, parameter in model.named_parameters():
        if parameter.is_meta and not torch_compat.is_fake(parameter):
            raise SampleError(
                f"parameter {place} of {name} is on meta, without data, so nothing can be "
                "measured or trained. Allocate its weights with model.to_empty(device='cpu'), or "
                "use fxremat.estimate, which accepts a model on meta",
                code="FXR502",
            )
        if parameter.is_inference():
            raise CaptureError(
                f"parameter {place} of {name} was created in torch.inference_mode(), so autograd "
                "cannot save it for a backward. Create the model outside of that mode, or compile "
                "copy.deepcopy(model)",
                code="FXR309",
            )
    homes = {t.device for t in (*model.parameters(), *model.buffers())}
    for place, tensor in sample.tensors():
        if homes and tensor.device not in homes:
            home = min(map(str, homes))
            if tensor.is_meta:
                raise SampleError(
                    f"{place} of shape {tuple(tensor.shape)} is on meta, without data, but the "
                    f"model is on {home}: pass torch.zeros_like({place}, device={home!r})",
                    code="FXR502",
                )
            raise SampleError(
                f"{place} of shape {tuple(tensor.shape)} is on {tensor.device}, but the model is "
                f"on {home}: move it with .to({home!r})",
                code="FXR502",
            )
    check_gradients(model, sample)


def check_gradients(model: nn.Module, sample: Sample) -> None:
    """Raise ``NoGradientError`` if the step has no backward.

    Raises:
        NoGradientError: nothing requires a gradient.
    """
    tensors = (*model.parameters(), *(t for _, t in sample.tensors()))
    if not any(t.requires_grad for t in tensors):
        count = sum(1 for _ in model.parameters())
        raise NoGradientError(
            f"none of the {count} parameters of {type(model).__name__} and no tensor of the "
            "sample requires a gradient, so there is no backward to plan. Call requires_grad_() "
            "on the parameters to train"
        )


def has_gradient(model: nn.Module, sample: Sample) -> bool:
    """Return whether an output of a call requires a gradient, or may, as it depends on data."""
    outputs = call_without_data(model, sample, gradients=True)
    leaves = pytree.tree_leaves(outputs)
    return outputs is None or any(getattr(leaf, "requires_grad", False) for leaf in leaves)


def call_without_data(model: nn.Module, sample: Sample, *, gradients: bool = False) -> object:
    """Call ``model`` on fake copies of its arguments, parameters and buffers.

    Shapes are computed; no data is read, and no state changes. Some libraries install hooks at a
    model's first call, under a lock that Dynamo cannot trace; this call does it.

    Args:
        model: the model.
        sample: the arguments.
        gradients: whether autograd records the call.

    Returns:
        The outputs as fake tensors, or ``None`` where they depend on data.

    Raises:
        Exception: what the model itself raises at the call, see :func:`model_error`.
    """
    mode = torch_compat.fake_mode_of(t for _, t in sample.tensors())

    def fake_copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or torch_compat.is_fake(value):
            return value
        return _with_attributes(mode.from_tensor(value), value)

    args, kwargs = pytree.tree_map(fake_copy, (sample.args, sample.kwargs))
    state = {name: fake_copy(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    quiet = torch_compat.without_shape_errors_logged()
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            attributes_replaced(model, fake_copy),
            torch_compat.without_launches(),
            torch_compat.without_attention_warning(),
            quiet,
            mode,
            torch.set_grad_enabled(gradients),
        ):
            return functional_call(model, state, args, kwargs)
    except torch_compat.data_dependent_errors():
        return None  # the capture names the line
    except Exception as error:
        release_frames(error)
    raised = model_error(model, sample)
    if raised is None:  # the model runs, but not on fake tensors
        return None
    try:
        release_frames(raised)
        raise raised
    finally:
        del raised  # this frame would be in a cycle with it


def _with_attributes(made: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``made``, a copy of ``tensor``, with the attributes that its users have set."""
    if torch_compat.is_plain(tensor):
        missing = vars(tensor).keys() - vars(made).keys()
        vars(made).update({name: vars(tensor)[name] for name in missing})
    return made


def model_error(model: nn.Module, call: Sample) -> Exception | None:
    """Return the exception that the model itself raises at a call, or ``None`` if it raises none.

    The model runs on copies of the arguments and of its tensors, without gradients and, where that
    fails, with them. It counts as raising nothing where the memory for the copies is lacking.
    From Python 3.11 on, a note of the exception names the call's tensors. Raise it outside of any
    ``except`` clause, whose error would become its context.
    """

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_simple = torch_compat.is_plain(value) or torch_compat.is_wrapper(value)
        if value.is_leaf and not is_simple:
            return copy.deepcopy(value)
        clone = value.detach().clone().requires_grad_(value.requires_grad)
        return _with_attributes(clone, value)

    raised: Exception | None = None
    for enabled in (False, True):
        try:
            args, kwargs = pytree.tree_map(copied, (call.args, call.kwargs))
            state = {n: copied(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
            with (
                generators_restored(model, (call.args, call.kwargs)),
                contextlib.redirect_stdout(io.StringIO()),
                attributes_replaced(model, copied),
                torch.set_grad_enabled(enabled),
            ):
                functional_call(model, state, args, kwargs)
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            raised = error
        else:
            return None
    if raised is not None and sys.version_info >= (3, 11):
        given = places_of(call.args, call.kwargs)
        shapes = ", ".join(f"{place} {tuple(t.shape)} {t.dtype}" for place, t in given)
        raised.add_note(f"raised by {type(model).__name__} itself, called with {shapes}")
    return raised
