"""A parameter whose bytes are in host memory is a tensor of the device for everybody."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxremat import torch_compat
from fxremat.errors import HostMemoryError, TransferError
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_parameter import HostParameter, fetch, homes
from tests.cuda import needs_cuda
from tests.models.bits import assert_bitwise_equal
from tests.moving import intercept_copies

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])


def moved(tensor: Tensor, limit: HostLimit | None = None) -> nn.Parameter:
    (host,) = homes([tensor], folder=None, limit=limit or HostLimit())
    return nn.Parameter(HostParameter.of(tensor, host), requires_grad=False)


def drawn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)


@devices
def test_it_seems_to_be_what_it_stands_for(device: str):
    plain = drawn(4, 6, device=device)
    own = moved(plain)
    assert isinstance(own, nn.Parameter)
    assert (own.shape, own.dtype, own.device, own.stride()) == (
        plain.shape,
        plain.dtype,
        plain.device,
        plain.stride(),
    )
    assert torch_compat.storages_on(plain.device, [own]) == {}
    assert torch_compat.nbytes_of(own) == 0


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:3, ::2],
        lambda t: t[2],
        lambda t: t.split(2)[1],
        lambda t: t.unsqueeze(0).expand(3, -1, -1),
        lambda t: t.reshape(-1)[5:9],
        lambda t: t[:0],
    ],
    ids=["whole", "transposed", "steps", "row", "split", "expanded", "flat", "empty"],
)
def test_views_have_strides_and_bits_of_views_of_the_tensor(
    device: str, dtype: torch.dtype, view: Callable[[Tensor], Tensor]
):
    plain = (drawn(4, 6) * 8).to(device, dtype)
    expected, own = view(plain), view(moved(plain))
    assert isinstance(own, HostParameter)
    assert own.stride() == expected.stride()
    copied = own.on_device()
    assert copied.stride() == expected.stride()
    assert_bitwise_equal(copied, expected)
    assert_bitwise_equal(own + own, expected + expected)


@devices
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.copy_(torch.ones_like(t)),
        lambda t: t.mul_(3),
        lambda t: t.t()[1:3].add_(2),
        lambda t: t.data.clamp_(min=0),
        lambda t: t[2].fill_(7),
        lambda t: torch._foreach_mul_([t, t.t()], 0.5),
        lambda t: torch.add(t, 1, out=t),
        lambda t: t.zero_(),
    ],
)
def test_writes_are_those_of_the_tensor(device: str, write: Callable[[Tensor], object]):
    plain = drawn(4, 6, device=device)
    own = moved(plain)
    same = own
    with torch.no_grad():
        write(plain)
        write(own)
    assert same is own
    assert_bitwise_equal(own.detach().on_device(), plain)


@devices
def test_an_operator_in_place_returns_the_parameter(device: str):
    own = moved(drawn(4, 6, device=device))
    with torch.no_grad():
        assert own.add_(1) is own


@devices
def test_what_reads_it_gets_plain_tensors_with_the_same_bits(device: str):
    plain = drawn(8, 8, device=device)
    own = moved(plain)
    for read in (
        torch.norm,
        torch.clone,
        lambda t: t.to("cpu", copy=True),
        lambda t: t.double(),
        torch.sum,
    ):
        made = read(own)
        assert type(made) is Tensor
        assert_bitwise_equal(made, read(plain))
    assert_bitwise_equal(torch.cat([own, plain]), torch.cat([plain, plain]))
    assert own.tolist() == plain.tolist()
    assert torch.equal(own, plain)


@devices
def test_autograd_differentiates_it(device: str):
    plain = nn.Parameter(drawn(4, 6, device=device))
    own = moved(plain.detach()).requires_grad_()
    x = drawn(3, 6, device=device)
    for weight in (plain, own):
        torch.nn.functional.linear(x, weight).square().sum().backward()
    assert plain.grad is not None
    assert own.grad is not None
    assert_bitwise_equal(own.grad, plain.grad)


@devices
def test_copies_and_pickles_are_plain(device: str):
    plain = drawn(4, 6, device=device)
    own = moved(plain)
    for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert type(copied) is nn.Parameter
        assert copied.device == plain.device
        assert not copied.requires_grad
        assert_bitwise_equal(copied.detach(), plain)
    file = io.BytesIO()
    torch.save({"weight": own.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert type(loaded) is Tensor
    assert_bitwise_equal(loaded.to(device), plain)


def test_bytes_as_savers_read_them():
    plain = drawn(4, 6)
    own = moved(plain)
    assert own.numpy().tobytes() == plain.numpy().tobytes()
    assert own.data_ptr() != 0


@devices
def test_the_memory_lives_as_long_as_the_parameter(device: str):
    limit = HostLimit(1024)
    own = moved(drawn(16, 16, device=device), limit)
    assert limit.allocated_bytes == 1024
    with pytest.raises(HostMemoryError):
        moved(drawn(16, 16, device=device), limit)
    assert_bitwise_equal(own.detach().on_device(), drawn(16, 16, device=device))
    del own
    moved(drawn(16, 16, device=device), limit)


def test_a_copy_that_fails_is_an_error_and_changes_nothing():
    plain = drawn(4, 6)
    own = moved(plain)

    def fail(_copy: Callable[[], None]) -> None:
        raise OSError("the disk is gone")

    with intercept_copies(fail):
        with pytest.raises(TransferError, match="the disk is gone"):
            own.norm()
        with pytest.raises(TransferError, match="the disk is gone"):
            moved(plain)
    assert torch.equal(own, plain)


def test_the_operation_of_graphs_says_what_it_allocates():
    host = drawn(4, 6).t()[1:5, ::2]
    torch.library.opcheck(fetch, (host, torch.device("cpu")))
