"""Parameters that regions read, where calls of the model are not reported."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from fxremat import torch_compat
from fxremat.regions.step_profiles import RegionCall


class ReadParameters:
    """The parameters that calls of regions have read, as weak references."""

    def __init__(self) -> None:
        self._by_id: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add parameters that a call reads."""
        self._by_id.update((id(p), weakref.ref(p)) for p in parameters)

    def bytes_beyond(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return the bytes of all parameters read so far but ``parameters``, with gradients."""
        excluded = set(map(id, parameters))
        others = [p for p in self._alive() if id(p) not in excluded]
        gradients = [p.grad for p in others if p.grad is not None]
        return sum(
            nbytes
            for tensor in (*others, *gradients)
            for nbytes in torch_compat.storages_of(tensor).values()
        )

    def later_gradient_bytes(
        self, resident: Iterable[torch.Tensor], calls: Sequence[RegionCall]
    ) -> int:
        """Return the bytes of gradients made after a call's forward, but before its backward.

        They are of parameters that none of the calls so far reads: later calls make them.

        Args:
            resident: tensors of the model and of its call, if calls of the model are reported.
            calls: the calls of the step so far.
        """
        read = {key for call in calls for key in call.parameters}
        parameters = {id(p): p for p in (*resident, *self._alive())}
        left = (p for key, p in parameters.items() if key not in read and p.requires_grad)
        return sum(torch_compat.nbytes_of(p) for p in left if p.is_leaf and p.grad is None)

    def _alive(self) -> list[torch.Tensor]:
        return [p for own in self._by_id.values() if (p := own()) is not None]
