"""Functions of a tensor that put a higher-order operator of torch into the captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.zoo import ZooModel, sum_of_squares

WIDTH, ROWS, LAYERS = 32, 64, 3


@torch.library.custom_op("fxremat_tests::add_to", mutates_args=("y",))
def add_to(x: Tensor, y: Tensor) -> None:
    y.add_(x.detach())


add_to.register_fake(lambda x, y: None)


class Tripled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return gradient * 3 + output * 0.5


@torch._dynamo.nonstrict_trace
def traced_loosely(x: Tensor) -> Tensor:
    return functional.gelu(x) * 2


def associative_scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan as scan

    return scan(lambda a, b: a * b + 0.1, x, 0, combine_mode="generic")


def auto_functionalized(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    torch.ops.fxremat_tests.add_to(x, total)
    return x + total


def checkpoint(x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint as run

    return run(lambda a: functional.gelu(a).sin(), x, use_reentrant=False)


def cond(x: Tensor) -> Tensor:
    """The branches take different memory; the one that takes more runs."""

    def wide(a: Tensor) -> Tensor:
        return torch.cat([a.sin(), a.cos(), a], 1).mean(1, keepdim=True) * a

    return torch.cond(x.sum() > -1e9, wide, lambda a: a.tanh() * 1, (x,))


def cond_in_cond(x: Tensor) -> Tensor:
    def inner(a: Tensor) -> Tensor:
        return torch.cond(a.mean() > 0, lambda b: b.sin() * b, lambda b: b.cos(), (a,))

    return torch.cond(x.sum() > 0, inner, lambda a: a.tanh(), (x,))


def cond_with_dropout(x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > -1e9, lambda a: functional.dropout(a.sin(), 0.5), lambda a: a.cos(), (x,)
    )


def foreach_map(x: Tensor) -> Tensor:
    from torch._higher_order_ops.foreach_map import foreach_map as run

    return run(lambda a, b: a * b + 1, [x, x + 1], [x, x])[0]


def hints_wrapper(x: Tensor) -> Tensor:
    from torch._higher_order_ops.hints_wrap import hints_wrapper as run

    return run(lambda a: a.sin() * a, (x,), {}, hints={"an": "annotation"})


def map_impl(x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as run

    return run(lambda a, b: functional.gelu(a * b), x.view(8, -1, x.shape[-1]), x.mean(0)).view_as(
        x
    )


def out_dtype(x: Tensor) -> Tensor:
    whole = (x.detach() * 10).to(torch.int8)
    ones = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.int8)
    product = torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, whole, ones)
    return x + product * 0.01


def print_shape(x: Tensor) -> Tensor:
    torch._higher_order_ops.print("rows {}", x.shape[0])
    return x


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return x + functional.gelu(x).sin()


@torch.compiler.nested_compile_region
def region_with_cond(x: Tensor) -> Tensor:
    """Reads graphs as attributes of the region's own graph."""
    y = x + functional.gelu(x)
    return torch.cond(y.sum() > 0, lambda a: a.sin() * a, lambda a: a.cos(), (y,))


@torch.compiler.nested_compile_region
def region_with_dropout(x: Tensor) -> Tensor:
    return functional.dropout(functional.gelu(x), 0.5)


def scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan as run

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(state + row)
        return made, made.clone()

    return run(step, x.new_zeros(x.shape[-1]), x)[1]


def scan_with_dropout(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan as run

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(state + functional.dropout(row, 0.5))
        return made, made.clone()

    return run(step, x.new_zeros(x.shape[-1]), x)[1]


def strict_mode(x: Tensor) -> Tensor:
    from torch._higher_order_ops.strict_mode import strict_mode as run

    return run(lambda a: (a.sin() * a,), (x,))[0]


def twice_with_hook(x: Tensor) -> Tensor:
    made = x * 2
    made.register_hook(lambda gradient: gradient * 2)
    return made


def while_loop(x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop as run

    with torch.no_grad():
        _, halved = run(
            lambda i, a: i < 5, lambda i, a: (i + 1, a * 0.5), (torch.tensor(0), x.detach())
        )
    return x * halved


def wrap(x: Tensor) -> Tensor:
    from torch._higher_order_ops.wrap import wrap as run

    return run(lambda a: a.sin() * a, x)


TRAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "auto_functionalized_v2": auto_functionalized,
    "autograd_function_apply": Tripled.apply,
    "cond": cond,
    "foreach_map": foreach_map,
    "hints_wrapper": hints_wrapper,
    "invoke_subgraph": region,
    "map_impl": map_impl,
    "out_dtype": out_dtype,
    "print": print_shape,
    "scan": scan,
    "strict_mode": strict_mode,
    "tag_activation_checkpoint": checkpoint,
    "while_loop": while_loop,
    "with_effects": print_shape,
    "wrap": wrap,
}
"""By name of the operator: a function that leads to it."""

VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "associative_scan_on_a_cpu": associative_scan,
    "nonstrict_trace": traced_loosely,
    "cond_in_cond": cond_in_cond,
    "cond_with_dropout": cond_with_dropout,
    "scan_with_dropout": scan_with_dropout,
    "hook": twice_with_hook,
    "region_with_cond": region_with_cond,
    "region_with_dropout": region_with_dropout,
}
"""Further functions."""

EXPORT = "only torch.export makes it"
GPU = "it runs on a GPU only"
LATE = "a partitioner or Inductor makes it, after the graph is captured"

NOT_BUILT = {
    "_export_tracepoint": EXPORT,
    "aoti_call_delegate": EXPORT,
    "associative_scan": "on a CPU Dynamo traces it into plain operations",
    "auto_functionalized": "auto_functionalized_v2 has replaced it",
    "call_torchbind": "it needs a class of a C++ extension",
    "cond_op": EXPORT,
    "custom_function_call": "it exists only inside a transform of torch.func",
    "dynamo_bypassing_wrapper": LATE,
    "executorch_call_delegate": EXPORT,
    "flat_apply": "AOTAutograd traces into it",
    "flex_attention": GPU,
    "flex_attention_backward": GPU,
    "graphsafe_run_with_rng_state": LATE,
    "inductor_compiled_code": LATE,
    "inline_asm_elementwise": GPU,
    "invoke_leaf_function": "tests/test_effects.py runs it",
    "invoke_quant": LATE,
    "invoke_quant_packed": LATE,
    "local_map_hop": "it needs a device mesh of several processes",
    "register_hook": "Dynamo traces hooks of tensors into the graph",
    "run_and_save_rng_state": LATE,
    "run_const_graph": EXPORT,
    "run_dtensor_rng_op": LATE,
    "run_with_rng_state": LATE,
    "triton_kernel_wrapper_functional": GPU,
    "triton_kernel_wrapper_mutation": GPU,
    "while_loop_stack_output": "its sizes depend on data",
    "wrap_activation_checkpoint": "tag_activation_checkpoint has replaced it",
    "wrap_with_autocast": EXPORT,
    "wrap_with_set_grad_enabled": EXPORT,
}
"""By name of the operator: why no function here leads to it."""


class Layers(nn.Module):
    """Linear layers, each followed by a function."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], layers: int = LAYERS, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.function(functional.gelu(layer(x)))
        return x


def model_of(name: str, function: Callable[[Tensor], Tensor]) -> ZooModel:
    """Layers with a function, as a model of the zoo."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Layers(function)

    def sample(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(ROWS, WIDTH, generator=generator),), {}

    return ZooModel(name, build, sample, sum_of_squares, draws="dropout" in name)
