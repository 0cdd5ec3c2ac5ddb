"""Which tensors of a graph share memory, and how much memory that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.errors import CaptureError, GraphError
from fxremat.passes.joint.sizes import layouts_of


@dataclass(frozen=True, slots=True)
class StorageTable:
    """Storages of a graph's tensors; a storage's id is its index in ``nbytes``.

    Attributes:
        nbytes: size of each storage.
        owner: the first node, in graph order, whose value lies in the storage.
        of_node: ids of the storages that a node's value lies in (several for a node
            that returns a tuple; none for numbers and None).
        asked_bytes: what each is asked of the allocator with, and how it follows the sizes.
        granule_bytes: what the allocator rounds each up to.
    """

    nbytes: tuple[int, ...]
    owner: tuple[fx.Node, ...]
    of_node: dict[fx.Node, tuple[int, ...]]
    asked_bytes: tuple[int, ...] = ()
    granule_bytes: tuple[int, ...] = ()

    def total(self, ids: Iterable[int]) -> int:
        """Bytes of the distinct storages among ``ids``."""
        return sum(self.nbytes[i] for i in set(ids))

    def of(self, nodes: Iterable[fx.Node]) -> frozenset[int]:
        """Storages that any of ``nodes`` lies in."""
        return frozenset(i for node in nodes for i in self.of_node[node])


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """Fake tensors that running ``node`` returns, in order.

    Raises:
        GraphError: the node was traced without a value.
    """
    if node.op == "output":
        return
    if "val" not in node.meta:
        raise GraphError(f"node {node.name} ({node.target}) carries no traced value")
    value = node.meta["val"]
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """The least that the device's allocator hands out for a request of ``nbytes``.

    The CUDA caching allocator rounds requests up to 512 bytes. A cached block may be larger:
    that depends on what was asked for before (``planner.allocations``).
    """
    granule = granule_of(device)
    return -(-nbytes // granule) * granule


def granule_of(device: torch.device) -> int:
    """Bytes that the device's allocator rounds requests up to."""
    return 512 if device.type == "cuda" else 1


def build_storage_table(graph: fx.Graph) -> StorageTable:
    """Group the tensors of ``graph`` by storage.

    Requires: every node but the output carries the fake value of its trace.
    Ensures: every tensor lies in exactly one storage; views share their base's.

    Raises:
        CaptureError: a tensor is sparse.
    """
    ids: dict[int, int] = {}
    asked: list[int] = []
    granules: list[int] = []
    owner: list[fx.Node] = []
    of_node: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        found = []
        for index, tensor in enumerate(tensors_of(node)):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{node.name} ({node.target}) is a tensor of layout {tensor.layout}, whose "
                    "memory cannot be planned: use dense tensors (sparse=False in an embedding)"
                )
            key = torch_compat.storage_key(tensor)
            if key not in ids:
                ids[key] = len(asked)
                asked.append(layouts_of(node)[index].storage_bytes)
                granules.append(granule_of(tensor.device))
                owner.append(node)
            found.append(ids[key])
        of_node[node] = tuple(dict.fromkeys(found))
    sizes = (-(-int(n) // granule) * granule for n, granule in zip(asked, granules, strict=True))
    return StorageTable(tuple(sizes), tuple(owner), of_node, tuple(asked), tuple(granules))
