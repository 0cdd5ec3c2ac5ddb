"""A step that is captured without data: shapes exist, nothing is allocated.

On a GPU ``scaled_dot_product_attention`` chooses other kernels than where the step is traced, which
keep other tensors for the backward. The choice here is the one of torch on GPUs since Ampere
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``), cuDNN's kernel left out, which keeps
what FlashAttention keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fxremat import torch_compat
from fxremat.capture.errors import capture_refusal
from fxremat.capture.isolation import attributes_replaced
from fxremat.capture.sample import Sample, places_of
from fxremat.capture.unused_outputs import Unused, forward_of
from fxremat.errors import CaptureError, FxrematError, SampleError
from fxremat.graph.signature import results_of
from fxremat.runtime.host_parameter import HostParameter

aten = torch.ops.aten

_Kernel = Callable[..., tuple[Tensor, ...]]

_FLASH: _Kernel = aten._scaled_dot_product_flash_attention
_EFFICIENT: _Kernel = aten._scaled_dot_product_efficient_attention
_PLAIN: _Kernel = aten._scaled_dot_product_attention_math

MOST_HEAD = 256
"""The largest last dimension that FlashAttention takes."""

HEAD_MULTIPLE = 8
"""The last dimension is padded to one for FlashAttention."""

HALVES = (torch.float16, torch.bfloat16)

HOME = torch.device("cpu")
"""Where copies are: any torch can trace there."""


@dataclass(slots=True)
class FakeCopies:
    """Fake copies of tensors, one for each; copies of tensors that share a storage share one, too.

    Attributes:
        mode: the ``FakeTensorMode`` of the copies.
        in_host: ``id`` of each parameter whose copy is in host memory.
    """

    mode: Any = field(default_factory=torch_compat.fake_mode)
    in_host: frozenset[int] = frozenset()
    _known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return the fake copy of a tensor; return any other value unchanged.

        Raises:
            SampleError: the tensor has a layout without a storage, such as a sparse one.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._known:
            if value.layout is not torch.strided:
                raise SampleError(
                    f"a tensor of shape {tuple(value.shape)} has layout {value.layout}, but only "
                    "dense tensors can be estimated: pass a dense tensor",
                    code="FXR501",
                )
            if torch_compat.is_wrapper(value):
                made = torch_compat.rewrapped(value, self.of)
            else:
                made = torch_compat.fake_copy(value, self.mode, self._storages, HOME)
                if id(value) in self.in_host:
                    made = nn.Parameter(HostParameter(made.detach(), HOME), value.requires_grad)
            self._known[id(value)] = value, made  # it must live: ids are used again
            self._known[id(made)] = made, made
        return self._known[id(value)][1]

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Replace the tensors of ``model`` by their fake copies, and restore them on exit."""
        with attributes_replaced(model, self.of):
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    tensors.update({name: self.of(tensor) for name, tensor in tensors.items()})
            yield


@dataclass(frozen=True, slots=True)
class Captured:
    """The step that AOTAutograd would compile.

    Attributes:
        joint: the joint graph of forward and backward.
        output_count: the number of its outputs that belong to the forward.
        inputs: fake copies of the primals that are tensors, by index of the primal.
    """

    joint: fx.GraphModule
    output_count: int
    inputs: Mapping[int, torch.Tensor]

    @property
    def gradients(self) -> frozenset[int]:
        """Indices of the primals that get a gradient and are leaves of autograd."""
        made = torch_compat.differentiated_primals(
            self.joint, forward_output_count=self.output_count
        )
        return frozenset(i for i in made if i in self.inputs and self.inputs[i].is_leaf)


class _CapturedError(BaseException):
    """Raised by the backend with the captured step, so that nothing is compiled.

    It is not an ``Exception``, so that no handler in the traced model catches it.
    """

    def __init__(self, found: Captured) -> None:
        super().__init__()
        self.found = found


def capture(
    model: nn.Module,
    sample: Sample,
    unused: Unused | None = None,
    *,
    dynamic: bool,
    gpu: bool = False,
) -> Captured:
    """Capture the training step of a call without running it, and return its joint graph.

    Args:
        model: the model in training mode, whose tensors are fake.
        sample: the arguments of the call, whose tensors are fake.
        unused: the outputs that get no gradient, or ``None`` if all get one.
        dynamic: whether tensor sizes become symbols.
        gpu: whether attention is traced as the kernel that a GPU would run.

    Raises:
        CaptureError: the model breaks the graph, or computes nothing with a gradient.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any], **_options: Any) -> Any:
        def partition(
            joint: fx.GraphModule, _inputs: object, *, num_fwd_outputs: int, **_kwargs: Any
        ) -> Any:
            results_of(joint, num_fwd_outputs)
            values = enumerate(torch_compat.primal_values(joint, inputs))
            tensors = {i: value for i, value in values if isinstance(value, torch.Tensor)}
            raise _CapturedError(Captured(joint, num_fwd_outputs, tensors))

        def compiler(graph: fx.GraphModule, _inputs: object) -> Any:
            return graph

        aot = torch_compat.aot_autograd_backend(
            forward_compiler=compiler,
            backward_compiler=compiler,
            inference_compiler=compiler,
            partition=partition,
        )
        module = torch_compat.inline_regions(module)
        if gpu:
            as_on_gpu(module)
        return aot(module, inputs)

    forward = torch_compat.with_code_of_its_own(forward_of(model, unused))
    run = torch_compat.compile_function(forward, backend, whole=True, dynamic=dynamic)
    places = places_of(sample.args, sample.kwargs) if dynamic else ()
    try:
        with torch_compat.sizes_vary([t for _, t in places]):
            run(*sample.args, **sample.kwargs)
    except _CapturedError as error:
        return error.found
    except torch_compat.capture_failures() as error:
        cause = torch_compat.failure_cause(error)
        if isinstance(cause, _CapturedError):
            return cause.found
        if isinstance(cause, FxrematError):
            raise cause from None
        raise capture_refusal(model, cause) from error
    raise CaptureError(
        f"{type(model).__name__} computes nothing with a gradient from this sample: there is no "
        "step to plan",
        code="FXR305",
    )


def as_on_gpu(module: fx.GraphModule) -> None:
    """Replace calls of ``scaled_dot_product_attention`` in a graph by :func:`attention`."""
    target = functional.scaled_dot_product_attention
    for node in module.graph.find_nodes(op="call_function", target=target):
        node.target = attention
    module.recompile()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of ``scaled_dot_product_attention``, by the operator that a GPU uses."""
    head = query.shape[-1]
    four = all(t.dim() == 4 for t in (query, key, value))
    if four and query.dtype in HALVES and attn_mask is None and head <= MOST_HEAD:
        scale = head**-0.5 if scale is None else scale
        padded = (_padded(t) for t in (query, key, value))
        made = _FLASH(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return made[..., : value.shape[-1]]
    if four and query.dtype in (*HALVES, torch.float32) and not enable_gqa:
        bias = _bias(attn_mask, query, key)
        return _EFFICIENT(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return _PLAIN(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % HEAD_MULTIPLE
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return ``mask`` as the bias that is added to attention scores, expanded to their shape."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])
