"""Tensors whose bytes are in host memory: the same results as of plain ones, whatever runs."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxremat.errors import HostMemoryError, TransferError
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_tensor import HostSpace, HostTensor
from tests.moving import failing

CPU = torch.device("cpu")


def space(limit_bytes: int | None = None) -> HostSpace:
    return HostSpace(CPU, folder=None, limit=HostLimit(limit_bytes))


def hosted(tensor: Tensor) -> HostTensor:
    return space().place(tensor.nbytes).put(tensor)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 5
    return values.to(dtype)


def same(one: Any, other: Any) -> bool:
    """Whether results are equal to the bit, in layout too."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        other = other.on_device() if isinstance(other, HostTensor) else other
        one = one.on_device() if isinstance(one, HostTensor) else one
        layout = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        return layout and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: numbers(4, 6),
    "transposed": lambda: numbers(6, 4).t(),
    "channels_last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": lambda: numbers(4, 6, dtype=torch.bfloat16),
    "float64": lambda: numbers(4, 6, dtype=torch.float64),
    "integers": lambda: numbers(4, 6, dtype=torch.int32),
    "bool": lambda: numbers(4, 6) > 0,
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "complex": lambda: torch.complex(numbers(3, 4), numbers(3, 4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_comes_back_is_what_was_put_there(name: str):
    tensor = LAYOUTS[name]()
    host = hosted(tensor)
    assert (host.shape, host.stride(), host.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
    assert host.device == CPU
    assert same(tensor, host.on_device())


@pytest.mark.parametrize(
    "make", [lambda: numbers(1, 4).expand(3, 4), lambda: numbers(8, 8)[::2, 1:3]]
)
def test_a_part_of_a_storage_becomes_dense(make: Callable[[], Tensor]):
    tensor = make()
    host = hosted(tensor)
    assert torch.equal(host.on_device(), tensor)
    assert host.on_device().untyped_storage().nbytes() == tensor.nbytes


def test_it_may_have_the_strides_of_another_tensor():
    leaf = numbers(4, 6)
    host = space().place(leaf.nbytes).put(numbers(6, 4).t(), like=leaf)
    assert host.stride() == leaf.stride() == host.on_device().stride()
    assert torch.equal(host.on_device(), numbers(6, 4).t())


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "item": lambda x: x[1, 2].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().cpu().numpy().tolist(),
    "array": lambda x: __import__("numpy").asarray(x).tolist(),
    "array of integers": lambda x: __import__("numpy").asarray(x, dtype="int64").tolist(),
    "text": str,
    "format": lambda x: f"{x.mean():.3f}",
    "dlpack": torch.from_dlpack,
    "bool": lambda x: bool((x == x.clone()).all()),
    "equal": lambda x: torch.equal(x, x),
    "rows": lambda x: [float(row.sum()) for row in x],
    "split": lambda x: list(x.split(2)),
    "chunk": lambda x: list(x.chunk(3, dim=1)),
    "unbind": lambda x: list(x.unbind(0)),
    "t": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "view as integers": lambda x: x.view(torch.int32),
    "flatten of a slice": lambda x: x[1:3, ::2].flatten(),
    "cat": lambda x: torch.cat([x, x]),
    "stack of norms": lambda x: torch.stack([x.norm(), x.float().norm()]),
    "half": lambda x: x.half(),
    "vmap": torch.vmap(torch.sum),
    "foreach": lambda x: torch._foreach_mul([x, x], [2.0, 3.0]),
    "foreach norms": lambda x: torch._foreach_norm([x, x, x], 2),
    "foreach of one": lambda x: torch._foreach_neg([x]),
    "foreach of lists": lambda x: torch._foreach_addcdiv([x, x], [x, x], [x, x], [1.0, 2.0]),
    "total norm": lambda x: torch.nn.utils.get_total_norm([x, x]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_gives_what_it_gives_of_a_plain_tensor(name: str):
    run = OPERATIONS[name]
    assert same(run(numbers(4, 6)), run(hosted(numbers(4, 6))))


def _fill_part(x: Tensor) -> None:
    x[1] = 7.0


def _mask(x: Tensor) -> None:
    x[x > 1] = 0.0


def _fused(x: Tensor) -> None:
    zeros = [torch.zeros_like(x) for _ in range(3)]
    steps = [torch.tensor(1.0)]
    torch._fused_adamw_(
        zeros[:1], [x], zeros[1:2], zeros[2:], [], steps,
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        grad_scale=torch.tensor(4.0), found_inf=torch.tensor(0.0),
    )  # fmt: skip


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(numbers(4, 6).double() * 3),
    "an item": _fill_part,
    "a mask": _mask,
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(9.0)),
    "a view": lambda x: x.view(-1)[3:5].mul_(10),
    "a view of a view": lambda x: x[1:, ::2].t()[1].fill_(4),
    "a part of a split": lambda x: [part.mul_(i) for i, part in enumerate(x.split(1))],
    "a row": lambda x: [row.add_(i) for i, row in enumerate(x.unbind(0))],
    "detached": lambda x: x.detach().neg_(),
    "data": lambda x: x.data.neg_(),
    "out=": lambda x: torch.add(numbers(4, 6), 1, out=x),
    "out= of two": lambda x: torch.sort(numbers(4, 6), out=(x, torch.empty(0, dtype=torch.long))),
    "foreach": lambda x: torch._foreach_mul_([x], 3.0),
    "foreach of several": lambda x: torch._foreach_add_([x, numbers(4, 6)], [x, x], alpha=2),
    "foreach copies": lambda x: torch._foreach_copy_(
        [x, x[1:]], [numbers(4, 6) * 2, numbers(3, 6)]
    ),
    "fused": _fused,
    "unscaled": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
        [x, numbers(4, 6)], torch.zeros(1), torch.tensor(0.25)
    ),
    "itself": lambda x: x.add_(x.t().reshape(4, 6)),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_an_operator_writes_is_in_host_memory(name: str):
    plain, host = numbers(4, 6), hosted(numbers(4, 6))
    versions = plain._version, host._version
    WRITES[name](plain)
    WRITES[name](host)
    assert same(plain, host.on_device())
    if plain._version > versions[0]:  # as autograd sees it
        assert host._version > versions[1]
    if name == "data":
        assert host._version == versions[1]


def test_what_is_written_to_is_returned():
    host = hosted(numbers(4, 6))
    assert host.add_(1) is host
    out = torch.add(numbers(4, 6), 1, out=host)
    assert out is host
    assert isinstance(host.detach(), HostTensor)
    assert type(host.clone()) is Tensor
    assert type(host * 2) is Tensor


def test_data_may_be_assigned():
    host = hosted(numbers(4, 6))
    host.data = numbers(4, 6) * 2
    assert same(host, numbers(4, 6) * 2)
    host.data = host.data
    host.data = hosted(numbers(4, 6) * 3)
    assert same(host, numbers(4, 6) * 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.resize_(2, 2),
        lambda x: x.unsqueeze_(0),
        lambda x: x.set_(torch.ones(3)),
        lambda x: x.data_ptr(),
        lambda x: x.share_memory_(),
        lambda x: setattr(x, "data", torch.ones(3)),
        lambda x: setattr(x, "data", torch.ones(4, 4).double()),
    ],
)
def test_what_cannot_be_is_an_error_and_changes_nothing(change: Callable[[Tensor], Any]):
    host = hosted(numbers(4, 4))
    with pytest.raises(TransferError, match=r"\.clone\(\)") as raised:
        change(host)
    assert raised.value.code == "FXR725"
    assert same(host, numbers(4, 4))


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clipping_gives_the_bits_of_plain_gradients(norm: float, foreach: bool | None):
    shapes = ((64, 32), (32,), (3, 5, 7), ())
    results = []
    for put in (lambda x: x, hosted):
        parameters = [nn.Parameter(numbers(*shape)) for shape in shapes]
        for at, parameter in enumerate(parameters):
            gradient = numbers(*parameter.shape) * (at + 1)
            parameter.grad = gradient if at == 1 else put(gradient)  # some of them are plain
        total = nn.utils.clip_grad_norm_(parameters, 0.7, norm_type=norm, foreach=foreach)
        clipped = [parameter.grad.clone() for parameter in parameters]
        nn.utils.clip_grad_value_(parameters, 0.01, foreach=foreach)
        results.append([total, clipped, [p.grad.clone() for p in parameters]])
    assert same(*results)


def test_gradients_are_accumulated_into_it():
    leaf = nn.Parameter(numbers(4, 6))
    leaf.grad = hosted(numbers(4, 6))
    (leaf * 3).sum().backward()
    assert isinstance(leaf.grad, HostTensor)
    assert same(leaf.grad, numbers(4, 6) + 3)


def test_a_module_may_be_moved_with_it():
    results = []
    for put in (lambda x: x, hosted):
        module = nn.Linear(6, 4, bias=False)
        module.weight.data = numbers(4, 6)
        module.weight.grad = put(numbers(4, 6))
        module.to("cpu").float().requires_grad_(False).requires_grad_(True)
        results.append((module.weight.detach(), module.weight.grad.clone()))
        module.zero_grad(set_to_none=False)
        assert not module.weight.grad.any()
    assert same(*results)


def test_copies_are_plain():
    host = hosted(numbers(4, 6))
    file = io.BytesIO()
    torch.save({"gradient": host}, file)
    file.seek(0)
    for made in (
        copy.deepcopy(host),
        copy.deepcopy([host, host])[1],
        pickle.loads(pickle.dumps(host)),
        torch.load(file)["gradient"],
    ):
        assert type(made) is Tensor
        assert same(made, numbers(4, 6))


def test_a_copy_that_fails_is_an_error_and_the_next_one_works():
    host = hosted(numbers(4, 6))
    for run in (host.sum, lambda: host.mul_(2)):
        with failing(RuntimeError("no"), times=1), pytest.raises(TransferError):
            run()
        assert same(host, numbers(4, 6))
    with failing(RuntimeError("no"), after=1, times=1), pytest.raises(TransferError):
        host.mul_(2)  # the copy back
    host.copy_(numbers(4, 6))
    assert same(host, numbers(4, 6))


def test_an_operator_that_fails_changes_nothing():
    host = hosted(numbers(4, 6))
    with pytest.raises(RuntimeError):
        host.add_(torch.ones(5))
    with pytest.raises(RuntimeError):
        torch._foreach_add_([host, host], [torch.ones(5), torch.ones(5)])
    assert same(host, numbers(4, 6))


def test_a_place_is_used_again_when_its_tensor_is_gone():
    own = space()
    for _ in range(100):
        first = own.place(96).put(numbers(4, 6))
        second = own.place(96).put(numbers(4, 6) * 2)
        assert same(first, numbers(4, 6))
        assert same(second, numbers(4, 6) * 2)
        view = second[1:]
        del first, second
        gc.collect()
        third, fourth = (own.place(96).put(numbers(4, 6) * n) for n in (3, 4))
        assert same(view, (numbers(4, 6) * 2)[1:]), "a view holds the place"
        assert same(third, numbers(4, 6) * 3)
        assert same(fourth, numbers(4, 6) * 4)
    assert own.allocated_bytes <= 6 * 512


def test_a_limit_is_kept_and_what_is_reserved_is_one_block():
    own = space(2048)
    own.reserve(2048)
    kept = [own.place(512).put(torch.full((128,), float(i))) for i in range(4)]
    with pytest.raises(HostMemoryError):
        own.place(512)
    assert own.allocated_bytes == 2048
    assert [float(k[0]) for k in kept] == [0.0, 1.0, 2.0, 3.0]
    del kept
    own.place(300)  # a slot of the same size


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_a_compiled_function_takes_it():
    host = hosted(numbers(4, 6))
    assert same(torch.compile(lambda x: x * 2, backend="eager")(host), numbers(4, 6) * 2)
