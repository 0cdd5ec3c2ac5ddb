"""Operations as their traces have them, and with the same bits wherever they run.

A plan is made from a trace: device, strides and storages of real results must be those of the
fake ones. And a recomputation runs in autograd's thread what the forward ran in another: the
bits must be the same there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks.devices import deterministic_kernels
from benchmarks.gpu_probe.probe import Finding, Probe
from fxremat import torch_compat
from fxremat.passes.joint.batchnorm import STATELESS
from fxremat.runtime.rng import record_state, redraw
from tests.models.bits import first_difference

aten: Any = torch.ops.aten

Results = tuple[Tensor, ...]
Run = Callable[..., Results]


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on given tensors.

    Attributes:
        run: of the tensors; results that are no tensors are left out.
        inputs: their values.
        backward: the gradients of the inputs are meant, for a sum of the first result.
        meant: how many results, from the first, have bits that mean something. Without dropout
            attention returns seeds that nobody has written.
    """

    run: Run
    inputs: Results
    backward: bool = False
    meant: int | None = None

    def __call__(self, inputs: Results) -> Results:
        """The tensors that come out."""
        if not self.backward:
            return tensors_of(self.run(*inputs))
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            out = tensors_of(self.run(*leaves))[0]
            return tuple(torch.autograd.grad(out.float().square().sum(), leaves))


def tensors_of(value: object) -> Results:
    """The tensors of a result."""
    items = value if isinstance(value, tuple | list) else (value,)
    return tuple(item for item in items if isinstance(item, Tensor))


def operations(probe: Probe) -> None:
    """Every kind of operation whose kernels are chosen by device, size or thread."""
    for what, make in CASES.items():
        if probe.cuda or what not in ON_CUDA_ONLY:
            probe.ask(what, lambda m=make: _as_traced_and_same(probe.device, m(probe.device)))
    for what, make in CASES.items():
        if probe.cuda and make(torch.device("meta")).backward:
            probe.ask(f"{what}, deterministic", lambda m=make: _deterministic(probe.device, m))
    for what, shape, settings in NORMALIZED:
        if probe.cuda or settings.get("dtype") is None:
            probe.ask(
                f"both kernels of BatchNorm, {what}",
                lambda s=shape, o=settings: _both_kernels(probe.device, s, o),
            )
    probe.ask("dropout, drawn again elsewhere", lambda: _drawn_again(probe.device))
    probe.ask("BatchNorm in a trace", lambda: _traced_norm(probe.device))
    probe.ask("attention in a trace", lambda: _traced_attention(probe.device))
    probe.ask("max pooling, deterministic", lambda: _pooling(probe.device))


def _drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _heads(device: torch.device, dtype: torch.dtype) -> Results:
    """Queries, keys and values as a model has them: views of one product, heads in the middle."""
    whole = _drawn(device, 2, 256, 3, 4, 64, dtype=dtype)
    return tuple(x.transpose(1, 2) for x in whole.unbind(2))


HALF = torch.bfloat16


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Results:
    if q.device.type == "cpu":
        found: Results = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal=True
        )
        return found
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)  # type: ignore[no-any-return]


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Results:
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        q, k, v, None, True, 0.0, True
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Results:
    return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
        q, k, v, None, True, 0.0, True
    )


def _convolved(device: torch.device, dtype: torch.dtype, layout: torch.memory_format) -> Results:
    images = _drawn(device, 8, 32, 28, 28, dtype=dtype).to(memory_format=layout)
    return images, _drawn(device, 64, 32, 3, 3, dtype=dtype).to(memory_format=layout)


def _conv(images: Tensor, kernel: Tensor) -> Results:
    return (functional.conv2d(images, kernel, padding=1),)


LAST, FIRST = torch.channels_last, torch.contiguous_format

CASES: dict[str, Callable[[torch.device], Case]] = {
    "flash attention": lambda d: Case(_flash, _heads(d, HALF), meant=2),
    "flash attention, backward": lambda d: Case(_flash, _heads(d, HALF), backward=True),
    "efficient attention": lambda d: Case(_efficient, _heads(d, HALF), meant=2),
    "efficient attention, fp32": lambda d: Case(_efficient, _heads(d, torch.float32), meant=2),
    "efficient attention, backward": lambda d: Case(_efficient, _heads(d, HALF), backward=True),
    "cuDNN attention": lambda d: Case(_cudnn, _heads(d, HALF), meant=2),
    "cuDNN attention, backward": lambda d: Case(_cudnn, _heads(d, HALF), backward=True),
    "mm": lambda d: Case(lambda a, b: (a @ b,), (_drawn(d, 512, 768), _drawn(d, 768, 640))),
    "mm, bf16": lambda d: Case(
        lambda a, b: (a @ b,), (_drawn(d, 512, 768, dtype=HALF), _drawn(d, 768, 640, dtype=HALF))
    ),
    "addmm, bf16": lambda d: Case(
        lambda a, b, c: (torch.addmm(c, a, b),),
        (
            _drawn(d, 512, 768, dtype=HALF),
            _drawn(d, 768, 640, dtype=HALF),
            _drawn(d, 640, dtype=HALF),
        ),
    ),
    "bmm": lambda d: Case(
        lambda a, b: (torch.bmm(a, b),), (_drawn(d, 8, 128, 96), _drawn(d, 8, 96, 160))
    ),
    "convolution": lambda d: Case(_conv, _convolved(d, torch.float32, FIRST)),
    "convolution, backward": lambda d: Case(
        _conv, _convolved(d, torch.float32, FIRST), backward=True
    ),
    "convolution, bf16, channels last": lambda d: Case(_conv, _convolved(d, HALF, LAST)),
    "layer norm": lambda d: Case(
        lambda x: aten.native_layer_norm(x, [768], None, None, 1e-5), (_drawn(d, 512, 768),)
    ),
    "softmax": lambda d: Case(lambda x: (x.softmax(-1),), (_drawn(d, 512, 3000),)),
    "sum over rows": lambda d: Case(lambda x: (x.sum(0),), (_drawn(d, 4096, 768),)),
}

ON_CUDA_ONLY = {
    "efficient attention", "efficient attention, fp32", "efficient attention, backward",
    "cuDNN attention", "cuDNN attention, backward",
}  # fmt: skip

NORMALIZED: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("64 channels", (8, 64, 56, 56), {}),
    ("2048 channels, few pixels", (16, 2048, 7, 7), {}),
    ("few channels, many pixels", (2, 3, 500, 500), {}),
    ("channels last", (8, 64, 56, 56), {"memory_format": LAST}),
    ("bf16", (8, 64, 56, 56), {"dtype": HALF}),
    ("bf16, channels last", (8, 64, 56, 56), {"dtype": HALF, "memory_format": LAST}),
)


def in_the_backward(run: Callable[[], Results], device: torch.device) -> tuple[Results, int]:
    """What ``run`` returns where a recomputation runs, and the thread that it ran in."""
    found: list[tuple[Results, int]] = []

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            found.append((run(), threading.get_ident()))
            return gradient

    x = torch.zeros((), device=device, requires_grad=True)
    Elsewhere.apply(x).backward()  # type: ignore[no-untyped-call]
    return found[0]


def _as_traced_and_same(device: torch.device, case: Case) -> Finding:
    real, again = case(case.inputs), case(case.inputs)
    with _no_grad_unless(case):
        elsewhere, thread = in_the_backward(lambda: case(case.inputs), device)
    told, traced = [_described(t) for t in real], _traced(case)
    meant = case.meant
    differences = [first_difference(real[:meant], found[:meant]) for found in (again, elsewhere)]
    same = not any(differences)
    wrong = [f"{a} for {b}" for a, b in zip(told, traced, strict=False) if a != b]
    if len(told) != len(traced):
        wrong.append(f"{len(told)} results for {len(traced)}")
    texts = [
        "as traced" if not wrong else f"NOT as traced: {wrong[0]}",
        "same bits" if same else "OTHER bits",
    ]
    return Finding(
        ", ".join(texts),
        # Backwards run once a step, in one thread: their kernels may add in any order.
        "as traced" if case.backward else "as traced, same bits",
        not wrong and (same or case.backward),
        {
            "results": told,
            "traced": traced,
            "second_run": differences[0],
            "in_the_backward": differences[1],
            "other_thread": thread != threading.get_ident(),
        },
    )


@contextlib.contextmanager
def _no_grad_unless(case: Case) -> Iterator[None]:
    """A backward is itself run by autograd, so that it is compared from the caller's thread."""
    with torch.enable_grad() if case.backward else contextlib.nullcontext():
        yield


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)} {tensor.stride()} on {tensor.device}"


def _traced(case: Case) -> list[str]:
    mode = FakeTensorMode()
    fakes = tuple(mode.from_tensor(x) for x in case.inputs)
    with mode:
        return [_described(t) for t in case(fakes)]


def _deterministic(device: torch.device, make: Callable[[torch.device], Case]) -> Finding:
    case = make(device)
    with deterministic_kernels():
        found = [case(case.inputs) for _ in range(4)]
    differences = [first_difference(found[0], other) for other in found[1:]]
    same = not any(differences)
    text = "same bits four times" if same else "OTHER bits"
    return Finding(text, "same bits", same, {"differences": differences})


def _both_kernels(
    device: torch.device, shape: tuple[int, ...], settings: dict[str, Any]
) -> Finding:
    """The one with running statistics, and the one that a recomputation runs."""
    dtype = settings.get("dtype") or torch.float32
    layout = settings.get("memory_format", FIRST)
    x = _drawn(device, *shape, dtype=dtype).to(memory_format=layout)
    weight, bias, mean = (_drawn(device, shape[1]) for _ in range(3))
    var = torch.ones(shape[1], device=device)
    first = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)
    run = lambda: tensors_of(STATELESS(x, weight, bias, True, 0.1, 1e-5))
    there, _thread = in_the_backward(run, device)
    difference = first_difference(tuple(first[:3]), run()) or first_difference(
        tuple(first[:3]), there
    )
    text = "same bits" if difference is None else "OTHER bits"
    return Finding(text, "same bits", difference is None, {"difference": difference})


def _drawn_again(device: torch.device) -> Finding:
    """The generator put back, as a recomputation does, in the backward."""
    x = torch.ones(1 << 16, device=device)
    name = str(device)
    state = record_state(name)
    first = tensors_of(aten.native_dropout(x, 0.3, True))
    after = record_state(name)
    again, _thread = in_the_backward(
        lambda: tensors_of(redraw(state, name, aten.native_dropout, x, 0.3, True)), device
    )
    difference = first_difference(first, again)
    moved = not torch.equal(after, record_state(name))
    text = ["same mask" if difference is None else "OTHER mask", "generator moved" if moved else ""]
    return Finding(
        ", ".join(t for t in text if t),
        "same mask",
        difference is None and not moved,
        {"difference": difference, "state_bytes": state.nbytes, "state_on": str(state.device)},
    )


def _operations_of(model: nn.Module, *inputs: Tensor) -> set[str]:
    """Names of all operations in the captured step."""
    found: set[str] = set()

    def note(graph: fx.GraphModule, _inputs: object) -> torch_compat.BoxedCallable:
        found.update(str(node.target) for node in graph.graph.nodes)
        return torch_compat.boxed(lambda arguments: graph(*arguments))

    backend = torch_compat.aot_autograd_backend(
        forward_compiler=note,
        backward_compiler=note,
        inference_compiler=note,
        partition=default_partition,
    )
    torch_compat.compile_function(model, backend, whole=True, dynamic=False)(
        *inputs
    ).float().square().sum().backward()
    return {name.removeprefix("aten.").removesuffix(".default") for name in found}


def _traced_norm(device: torch.device) -> Finding:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device)
    found = sorted(n for n in _operations_of(model, _drawn(device, 4, 3, 32, 32)) if "norm" in n)
    holds = any("_native_batch_norm_legit_functional" in name for name in found)
    return Finding(
        ", ".join(found), "_native_batch_norm_legit_functional", holds, {"operations": found}
    )


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3, 1, 64).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)


def _traced_attention(device: torch.device) -> Finding:
    """Which of the kernels torch chooses by itself; nothing is assumed."""
    model = _Attention().to(device, HALF)
    inputs = _drawn(device, 2, 128, 64, dtype=HALF)
    found = sorted(n for n in _operations_of(model, inputs) if "attention" in n)
    return Finding(", ".join(found) or "none fused", figures={"operations": found})


def _pooling(device: torch.device) -> Finding:
    """Whether the backward of overlapping max pooling runs where only deterministic ones may."""
    case = Case(lambda x: (functional.max_pool2d(x, 3, 2, 1),), (_drawn(device, 4, 8, 32, 32),))
    backward = Case(case.run, case.inputs, backward=True)
    with deterministic_kernels():
        found = [backward(backward.inputs) for _ in range(4)]
    same = not any(first_difference(found[0], other) for other in found[1:])
    return Finding("runs, same bits" if same else "runs, OTHER bits", "same bits", same)
