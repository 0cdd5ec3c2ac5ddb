"""Parameters that are moved to host memory before a model is captured, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fxremat import torch_compat
from fxremat.errors import ArgumentError
from fxremat.loop.placement import SMALL_SHARE
from fxremat.planner.transfers.transfers import HostMemory
from fxremat.runtime.host_parameter import HostParameter, homes


def movable(model: nn.Module, *, trained: bool = False) -> list[nn.Parameter]:
    """Return the parameters of a model that may live in host memory, the largest first.

    They are frozen, or also ``trained``. They are dense, they share no memory with other tensors,
    and they are not among the smallest ones, which together have :data:`SMALL_SHARE` of the bytes:
    copying these takes longer than their bytes are worth.
    """
    distinct = {id(own): own for own in torch_compat.tensors_of_module(model)}.values()
    users = Counter(key for own in distinct for key in torch_compat.storages_of(own))
    plain: list[nn.Parameter] = [own for own in distinct if type(own) is nn.Parameter]
    able = [own for own in plain if (trained or not own.requires_grad) and _is_whole(own)]
    ordered = sorted(
        (own for own in able if users[torch_compat.storage_key(own)] == 1),
        key=lambda own: own.nbytes,
    )
    small_bytes, total_bytes = 0, sum(own.nbytes for own in plain)
    while ordered and small_bytes + ordered[0].nbytes <= SMALL_SHARE * total_bytes:
        small_bytes += ordered.pop(0).nbytes
    return ordered[::-1]


def _is_whole(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is dense and fills its storage, each element once."""
    if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda", "meta"):
        return False
    meta = torch.empty_like(tensor, device="meta")  # has other strides if elements overlap
    is_dense = meta.stride() == tensor.stride()
    return is_dense and tensor.untyped_storage().nbytes() == tensor.nbytes > 0


def within(parameters: Sequence[nn.Parameter], nbytes: int | None) -> list[nn.Parameter]:
    """Return those of ``parameters``, in order, that fit ``nbytes`` together; all for ``None``."""
    if nbytes is None:
        return list(parameters)
    taken = []
    for own in parameters:
        if own.nbytes <= nbytes:
            taken.append(own)
            nbytes -= own.nbytes
    return taken


def in_host(model: nn.Module) -> tuple[int, ...]:
    """Return the parameters of ``model`` that are in host memory, by their place among all."""
    places = enumerate(model.parameters())
    return tuple(i for i, own in places if isinstance(own, HostParameter))


def among(
    model: nn.Module, places: Iterable[int], parameters: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """Return those of ``parameters`` whose place among all of ``model`` is in ``places``."""
    asked = set(places)
    wanted = {id(own) for i, own in enumerate(model.parameters()) if i in asked}
    return [own for own in parameters if id(own) in wanted]


def refuse_unmovable(model: nn.Module, *, together: bool = False) -> None:
    """Raise if parameters of ``model`` cannot be moved, because a wrapper works on their memory.

    Args:
        model: the model.
        together: whether several processes follow one plan because of ``ranks=``.

    Raises:
        ArgumentError: it is wrapped by ``DistributedDataParallel``, sharded, or has distributed
            tensors.
    """
    wrapped = torch_compat.wrapped_by(model) is not model
    if not (together or wrapped or torch_compat.is_sharded(model) or torch_compat.ranks_of(model)):
        return
    reason = (
        "DistributedDataParallel copies parameters between processes"
        if wrapped
        else "other processes, which ranks= names, may move others"
        if together
        else "other processes have parts of its parameters"
    )
    raise ArgumentError(
        f"HostMemory(parameters=True) moves the parameters of {type(model).__name__} to host "
        f"memory, but {reason}. Omit parameters=True",
        argument="offload",
        value="HostMemory(parameters=True)",
        code="FXR414",
    )


class Moved:
    """Parameters that were moved to host memory, and that can be moved back.

    While they are in host memory, ``state_dict()`` has plain copies of them on the CPU: formats of
    files read the memory of each entry.

    Args:
        model: the model that they belong to.
        parameters: the parameters, which are plain ones of one device.
        host: the host memory.

    Raises:
        HostMemoryError: the memory cannot be allocated, or exceeds the limit; nothing has changed.
        ArgumentError: other code refers to the memory of one of them; nothing has changed.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], host: HostMemory
    ) -> None:
        self._moved: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for own in parameters:
            by_device.setdefault(own.device, []).append(own)
        try:
            for group in by_device.values():
                made = homes(group, folder=host.folder, limit=host.limit)
                for own in group:
                    _replace(own, HostParameter.of(own, made.pop(0)))
                    own.claim()  # type: ignore[attr-defined]
                    self._moved.append(own)
            moved = set(map(id, self._moved))
            for module in model.modules():
                if not moved.isdisjoint(map(id, module._parameters.values())):
                    register: Any = module.register_state_dict_post_hook
                    self._hooks.append(register(_copy_entries))
        except BaseException:
            self.undo()
            raise

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are in host memory, in the order in which they were moved."""
        return tuple(self._moved)

    def undo(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Move parameters back to the device; by default all of them."""
        asked = {id(own) for own in (self._moved if parameters is None else parameters)}
        for own in list(self._moved):
            if id(own) in asked and isinstance(own, HostParameter):
                _replace(own, own.on_device())
                self._moved = [other for other in self._moved if other is not own]
        if not self._moved:
            while self._hooks:
                self._hooks.pop().remove()


def _copy_entries(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object
) -> None:
    """Replace the entries of a module's parameters in host memory by copies on the CPU.

    Entries that are the parameters themselves (``keep_vars=True``) stay as they are.
    """
    parameters: dict[str, Any] = module._parameters  # of a subclass that replaces the class
    for name, parameter in parameters.items():
        entry = state_dict.get(prefix + name)
        if isinstance(parameter, HostParameter) and entry is not None and entry is not parameter:
            state_dict[prefix + name] = parameter.on_device().detach().cpu()


def _replace(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Give ``parameter``, which stays the same object, the memory and the class of ``tensor``.

    Raises:
        ArgumentError: other code refers to its memory.
    """
    gradient, parameter.grad = parameter.grad, None
    made = nn.Parameter(tensor, parameter.requires_grad)
    try:
        refused = torch_compat.swap(parameter, made)
    finally:
        parameter.grad = gradient
    if refused:
        raise ArgumentError(
            f"a parameter of shape {tuple(parameter.shape)} cannot be moved between the device and "
            f"host memory: {refused}. Compile the model before a step has begun and before other "
            "libraries hold its parameters, or omit parameters=True of HostMemory",
            argument="offload",
            value="HostMemory(parameters=True)",
            code="FXR415",
        )
