"""Tensors whose bytes are in host memory, while every operator sees tensors of the device.

Gradients and the state of optimizers are read and written for a short part of a step. A
:class:`HostTensor` stands for one of them in between. It has the device, the shape and the dtype of
the tensor that it stands for. An operator on it copies the bytes to the device, runs there, and
copies back what it has written. So a loop that clips, scales, accumulates or prints gradients runs
unchanged, with the same bits, and holds one of them at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxremat import torch_compat
from fxremat.errors import TransferError
from fxremat.runtime.arena import Arena, HostLimit, lease_of
from fxremat.runtime.lease import Arrival
from fxremat.runtime.operators import list_length, one_by_one, treats_each, written
from fxremat.runtime.slots import slot_bytes

aten = torch.ops.aten


class HostSpace:
    """Host memory for tensors that live longer than a step, in blocks that are allocated once.

    Args:
        device: the device of the tensors.
        folder: for a CPU, the folder of the file that represents host memory.
        limit: the limit that all host memory of the model shares.
    """

    def __init__(self, device: torch.device, *, folder: str | None, limit: HostLimit) -> None:
        self.device = device
        self._folder = folder
        self._limit = limit
        self._blocks: list[tuple[Arena, Tensor]] = []
        self._next = self._end = 0
        self._places: dict[int, list[Place]] = {}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum([host.numel() for _, host in self._blocks])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory of each block."""
        return (host for _, host in self._blocks)

    @property
    def free_bytes(self) -> int | None:
        """The bytes that new blocks may have within the limit; ``None``: there is no limit."""
        limit = self._limit
        return None if limit.nbytes is None else max(0, limit.nbytes - limit.lasting_bytes)

    def reserve(self, nbytes: int) -> None:
        """Allocate one block of ``nbytes``, for the places that :meth:`place` returns next.

        Raises:
            HostMemoryError: it cannot be allocated, or exceeds the limit.
        """
        if nbytes <= self._end - self._next:
            return
        arena = Arena(
            nbytes, device=self.device, host_dir=self._folder, limit=self._limit, lasting=True
        )
        with torch_compat.real_execution():  # a capture may be active
            self._blocks.append((arena, arena.open()))
        self._next, self._end = 0, nbytes

    def place(self, nbytes: int) -> Place:
        """Return a place for a tensor of ``nbytes`` that no tensor has its bytes in.

        A place whose tensor is gone is used again. If no block has room, a new one is allocated.

        Raises:
            HostMemoryError: a new block is needed and cannot be allocated.
        """
        taken = max(slot_bytes(nbytes), slot_bytes(1))
        places = self._places.setdefault(taken, [])
        for place in places:
            if place.is_free:
                return place
        self.reserve(taken)
        places.append(Place(self._blocks[-1][1], self._next, taken, self.device))
        self._next += taken
        return places[-1]

    def release(self) -> None:
        """Release all blocks; what tensors still use is freed with them."""
        self._blocks.clear()
        self._places.clear()
        self._next = self._end = 0


class Place:
    """A part of host memory, for the bytes of one tensor at a time.

    Attributes:
        nbytes: its size.
        content: returns what it holds; ``None`` if nothing does any more.
    """

    __slots__ = ("_device", "_host", "_offset", "content", "nbytes")

    def __init__(self, host: Tensor, offset: int, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._host = host
        self._offset = offset
        self._device = device
        self.content: Callable[[], Content | None] = _nothing

    @property
    def is_free(self) -> bool:
        """Whether no tensor has its bytes here."""
        return self.content() is None

    def put(self, tensor: Tensor, *, like: Tensor | None = None) -> HostTensor:
        """Copy ``tensor`` here, and return the tensor that stands for it.

        When this returns, the memory of ``tensor`` may be freed in the order of the device.

        Args:
            tensor: the tensor.
            like: a tensor of the same shape and dtype that has the strides of the result.

        Raises:
            TransferError: the copy failed.
        """
        content = Content(self, tensor, like=like)
        content.store(tensor)
        return HostTensor(content)

    def write(self, storage: Tensor) -> None:
        """Start to copy the whole storage of ``storage`` here."""
        lease = lease_of(self._host)
        lease.recover()
        lease.offload(storage, offset=self._offset)

    def wait_until_written(self) -> None:
        """Wait, in the order of the device, until the latest :meth:`write` is done."""
        lease_of(self._host).release(offset=self._offset)

    def read(self, nbytes: int) -> Tensor:
        """Start to copy the first bytes to the device, and return them; see :class:`Arrival`."""
        lease = lease_of(self._host)
        lease.recover()
        return lease.prefetch(offset=self._offset, nbytes=nbytes, device=self._device)


def _nothing() -> None:
    return None


class Content:
    """What a place holds: the bytes of one dense tensor, and how they are read.

    Attributes:
        place: the place.
        meta: a tensor without data that has the same layout.
        device: the device of the tensor.
    """

    __slots__ = ("__weakref__", "device", "meta", "place")

    def __init__(self, place: Place, tensor: Tensor, *, like: Tensor | None = None) -> None:
        self.place = place
        place.content = weakref.ref(self)
        self.device = tensor.device
        whole = tensor
        if like is not None:
            whole = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        if not _is_whole(whole):
            whole = torch.empty_like(whole, device="meta")
        self.meta = torch.empty_strided(
            whole.shape, whole.stride(), dtype=tensor.dtype, device="meta"
        )

    def store(self, tensor: Tensor) -> None:
        """Copy ``tensor`` to the place, and wait for that in the order of the device."""
        self.start_storing(tensor)
        self.place.wait_until_written()

    def start_storing(self, tensor: Tensor) -> Tensor:
        """Start to copy ``tensor`` to the place; return what must be held until that is done."""
        if not _is_whole(tensor) or tensor.stride() != self.meta.stride():
            whole = torch.empty_like(self.meta, device=tensor.device)
            tensor = whole.copy_(tensor)
        self.place.write(tensor)
        return tensor

    def start_fetching(self) -> Tensor:
        """Return a new tensor of the device that starts to get the bytes.

        Pass it to :func:`arrive` before it is read.
        """
        meta = self.meta
        typed = self.place.read(meta.nbytes).view(meta.dtype)
        return typed.as_strided(meta.shape, meta.stride())

    def fetch(self) -> Tensor:
        """Return a new tensor of the device that has the bytes."""
        fresh = self.start_fetching()
        arrive(fresh)
        return fresh


def arrive(fresh: Tensor) -> None:
    """Wait, in the order of the device, for a tensor of :meth:`Content.start_fetching`.

    Raises:
        TransferError: the copy failed.
    """
    Arrival.wait(fresh)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether copying the storage of ``tensor`` copies just its elements, once each."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        return False
    dense = torch.empty_like(tensor, device="meta")  # has other strides if elements overlap
    return dense.stride() == tensor.stride()


View = Callable[[Tensor], Tensor]


class HostTensor(torch_compat.OffDevice):
    """A tensor of the device whose bytes are in host memory; see the module.

    A view of it is another one with the same content, which writes to the same bytes.

    Attributes:
        content: the bytes.
    """

    content: Content
    _view: View | None

    @staticmethod
    def __new__(cls: Any, content: Content, view: View | None = None) -> HostTensor:
        """Return a tensor that has ``content``, or ``view`` of it."""
        with torch_compat.real_execution():
            meta = content.meta if view is None else view(content.meta)
        made: HostTensor = torch_compat.wrapper_tensor(cls, meta, content.device)
        made.content, made._view = content, view
        return made

    def on_device(self) -> Tensor:
        """Return a copy on the device."""
        return self.of(self.content.fetch())

    def of(self, base: Tensor) -> Tensor:
        """Return what this is of ``base``, a tensor with all of the content."""
        return base if self._view is None else self._view(base)

    @property
    def data(self) -> Tensor:
        """The tensor without a history; what is assigned to it replaces the bytes."""
        return HostTensor(self.content, self._view)

    @data.setter
    def data(self, value: Tensor) -> None:
        layout = value.shape, value.dtype, value.device
        if self._view is not None or layout != (self.shape, self.dtype, self.device):
            raise _refused(
                f"a tensor of shape {tuple(value.shape)} and {value.dtype} on {value.device} "
                f"cannot be assigned to the .data of {self._described()}"
            )
        if not (isinstance(value, HostTensor) and value.content is self.content):
            self.content.store(value.on_device() if isinstance(value, HostTensor) else value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy as an array."""
        return self.on_device().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as numbers in lists."""
        return self.on_device().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a copy as an array."""
        array = self.on_device().numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of a copy on the device."""
        return self.on_device().__dlpack__(**options)

    def data_ptr(self) -> int:
        """Raise an error: no address on the device has the bytes between operators."""
        raise _refused(f"{self._described()} has no address on the device")

    def share_memory_(self) -> Any:
        """Raise an error: the bytes belong to this process."""
        raise _refused(f"{self._described()} cannot be shared with other processes")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain copy on the device."""
        memo[id(self)] = made = self.on_device()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle a plain copy in host memory."""
        plain: Any = self.on_device().cpu()
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the text of a plain tensor."""
        return repr(self.on_device())

    def _described(self) -> str:
        return f"a tensor of shape {tuple(self.shape)} whose bytes are in host memory"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the device, and copy back what it has written."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is aten.record_stream.default:
            return None  # no memory of the device belongs to it
        if func.is_view and isinstance(first, HostTensor):
            return _view_of(func, first, args, kwargs)
        if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
            changed = _written(func, args, kwargs)
            if changed:
                raise _refused(
                    f"{func} would change the shape, the strides or the storage of "
                    f"{changed[0]._described()}"
                )
        count = list_length(func, args)
        if count > 1:
            return one_by_one(_run, func, args, kwargs, count)
        return _run(func, args, kwargs)


def _refused(what: str) -> TransferError:
    """Return the error to raise where a tensor in host memory cannot do what a plain one does."""
    return TransferError(
        f"{what}: HostMemory(state=True) keeps it there between operators. Use .clone(), which is "
        "a plain tensor",
        code="FXR725",
    )


def _view_of(func: Any, base: HostTensor, args: Any, kwargs: Any) -> Any:
    """Return a view of ``base``, or a list of views, without copying anything."""
    rest = args[1:]
    whole = base.of(base.content.meta)
    made = func(whole, *rest, **kwargs)

    def part(at: int | None) -> HostTensor:
        def view(content: Tensor) -> Tensor:
            result: Any = func(base.of(content), *rest, **kwargs)
            made: Tensor = result if at is None else result[at]
            return made

        return HostTensor(base.content, view)

    if isinstance(made, Tensor):
        unchanged = func in (aten.detach.default, aten.alias.default)
        return HostTensor(base.content, base._view) if unchanged else part(None)
    return type(made)(part(at) for at in range(len(made)))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on copies of its host tensors, and copy back those that it has written."""
    bases: dict[int, tuple[Content, Tensor]] = {}
    originals: dict[int, HostTensor] = {}

    def fetched(value: Any) -> Any:
        if not isinstance(value, HostTensor):
            return value
        content = value.content
        if id(content) not in bases:
            bases[id(content)] = content, content.fetch()
        real = value.of(bases[id(content)][1])
        originals[id(real)] = value
        return real

    given = pytree.tree_map(fetched, (args, kwargs))
    result = func(*given[0], **given[1])
    changed = _written(func, args, kwargs)
    for key in {id(host.content) for host in changed}:
        content, base = bases[key]
        content.store(base)
    if treats_each(func):  # autograd counts the writes of all other operators
        torch.autograd.graph.increment_version(changed)
    # What an operator writes to and returns is the caller's tensor, not the copy.
    return pytree.tree_map(lambda made: originals.get(id(made), made), result)


def _written(func: Any, args: Any, kwargs: Any) -> list[HostTensor]:
    """Return the host tensors that ``func`` writes to, as its schema says."""
    return [own for own in written(func, args, kwargs) if isinstance(own, HostTensor)]
