"""The inputs and results of a captured graph, as its calls see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat import torch_compat
from fxremat.errors import FAULT, CaptureError
from fxremat.passes.joint.sizes import layouts_of


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and results of a captured graph.

    A primal is an input of the joint graph, given by its index.

    Attributes:
        output_count: number of results of the forward that go to its caller.
        gradients: primals that get a gradient, and the index of each gradient among the tensors
            that are differentiated.
        without_gradient: primals that get none.
        passed: results of the backward that are inputs of the forward, by index.
        storages: primals and the bytes of their storages, as expressions of the sizes.
    """

    output_count: int
    gradients: dict[int, int]
    without_gradient: tuple[int, ...]
    passed: dict[int, int]
    storages: tuple[tuple[int, Any], ...]

    @property
    def primal_count(self) -> int:
        """Number of primals of the graph."""
        return len(self.gradients) + len(self.without_gradient)

    @staticmethod
    def of(
        joint: fx.GraphModule, placeholders: Sequence[fx.Node], *, output_count: int
    ) -> Signature:
        """Return the signature of a joint graph.

        Args:
            joint: as AOTAutograd has made it.
            placeholders: the same graph's, with the sizes of the capture fixed.
            output_count: how many of its outputs are the forward's.
        """
        gradients = torch_compat.differentiated_primals(joint, forward_output_count=output_count)
        count = len(torch_compat.primal_values(joint, ()))
        return Signature(
            output_count,
            gradients,
            tuple(i for i in range(count) if i not in gradients),
            torch_compat.passed_primals(joint, forward_output_count=output_count),
            tuple(
                (i, layout.storage_bytes)
                for i, node in enumerate(placeholders[:count])
                for layout in layouts_of(node)
            ),
        )


def results_of(joint: fx.GraphModule, output_count: int) -> tuple[int | None, ...]:
    """Change the backward of ``joint`` to have a result for each primal.

    Returns the indices of its previous results among the new ones, with ``None`` for a token that
    orders effects.

    Raises:
        CaptureError: they cannot be assigned to primals.
    """
    places = torch_compat.spread_results(joint, forward_output_count=output_count)
    if places is None:
        raise CaptureError(
            "the results of the captured backward cannot be assigned to inputs of the forward, so "
            "no gradient can be distinguished. Please report this model",
            code=FAULT,
        )
    return places
