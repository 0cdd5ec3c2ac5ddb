"""Operations on sparse tensors, as functions of dense ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxremat import torch_compat
from fxremat.runtime.operation import Operation


class SparseOperation(Operation):
    """Runs a graph in which tensors are sparse, and returns its single result.

    Where that is a sparse tensor, plans have a dense tensor of bytes in its place, because a sparse
    one has several storages.

    Args:
        module: the graph.
        digest: a digest of it, equal in all processes.
    """

    def __init__(self, module: fx.GraphModule, digest: str) -> None:
        super().__init__("sparse", digest, "sparse")
        self._module = module

    def __call__(self, *values: Any) -> Any:
        """Return the result of the graph; of fake tensors, the bytes in place of a sparse one."""
        result = self._module(*values)
        if not _is_sparse(result):
            return result
        return in_place_of(result, values) if torch_compat.is_fake(result) else _compact(result)

    def stand_in(self, *values: Any) -> Any:
        """Return as many bytes as a sparse result takes, where the graph has one.

        A sum may merge equal indices, which depends on data, so it is assumed that it does not.
        """
        result = self(*values)
        if not _is_sparse(result):
            return result
        taken, most = torch_compat.nbytes_of(result), in_place_of(result, values)
        return most if most.nbytes >= taken else most.new_empty(taken)


def in_place_of(result: Tensor, values: Any) -> Tensor:
    """Return a dense tensor of bytes to plan with in place of a sparse one.

    It has as many bytes as the tensors that the sparse one was made of.

    Args:
        result: the sparse tensor.
        values: the arguments of its operation.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    dense = [t for t in tensors if t.layout is torch.strided]
    nbytes = sum([t.numel() * t.element_size() for t in dense])
    return torch.empty(nbytes, dtype=torch.uint8, device=result.device)


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is not torch.strided


def _compact(result: Tensor) -> Tensor:
    """Return a sparse tensor that keeps no storage alive which is larger than its parts."""
    parts = torch_compat.dense_parts(result)
    whole = all(part.untyped_storage().nbytes() <= part.nbytes for part in parts)
    return result if whole else result.clone()
