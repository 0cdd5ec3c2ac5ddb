"""How large a batch may be: from one symbolic capture, without running any of them."""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fxremat.capture.sample import Sample, call_without_data, places_of
from fxremat.errors import ArgumentError, BudgetError
from fxremat.graph.dimensions import MOST_SIZE, Dimension, nearest, resized, taken_sizes
from fxremat.graph.graph import Graph
from fxremat.graph.pool import fastest, least_of
from fxremat.graph.pools import least_bytes, least_bytes_from_scratch, pools
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.choose import usual_context
from fxremat.planning.largest_size import bisected, largest_size
from fxremat.progress import Progress
from fxremat.report.frontier import Batches, BatchPoint
from fxremat.units import format_bytes

Dim = int | tuple[int | str, int]
"""A dimension of the sample's first tensor, or an argument's index or name and a dimension."""


class NamedDim(NamedTuple):
    """A dimension that the user named.

    Attributes:
        place: the argument, such as ``args[0]``.
        dim: the index of the dimension, from 0.
        size: its size in the sample.
        written: the argument ``dim`` as the user gave it.
    """

    place: str
    dim: int
    size: int
    written: object

    @property
    def name(self) -> str:
        """The dimension as a Python expression, such as ``args[0].shape[1]``."""
        return f"{self.place}.shape[{self.dim}]"

    def refuse(self, why: str) -> ArgumentError:
        """Return the error that this dimension cannot vary, with the reason ``why``."""
        message = f"dim is {self.written!r}, but {why}"
        return ArgumentError(message, argument="dim", value=self.written)


def read_dim(model: nn.Module, sample: Sample, dim: Any) -> NamedDim:
    """Return the dimension that the user named.

    Raises:
        ArgumentError: the sample has no such argument or dimension.
    """
    places = places_of(sample.args, sample.kwargs)
    argument, number = dim if isinstance(dim, tuple) and len(dim) == 2 else (None, dim)
    if not _is_number(number) or not (argument is None or isinstance(argument, (int, str))):
        raise ArgumentError(
            "dim must be an int, or a pair of an argument's index or name and an int, but got "
            f"{dim!r}",
            argument="dim",
            value=dim,
        )
    wanted = "" if argument is None else _place_of(model, sample, argument)
    for place, tensor in places:
        own = place == wanted or place.startswith(f"{wanted}[") or not wanted
        if own and -tensor.dim() <= number < tensor.dim():
            index = number % tensor.dim()
            return NamedDim(place, index, tensor.shape[index], dim)
    available = ", ".join(f"{place} of shape {tuple(tensor.shape)}" for place, tensor in places)
    raise ArgumentError(
        f"dim is {dim!r}, but the sample has no such dimension; its tensors are {available}",
        argument="dim",
        value=dim,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _place_of(model: nn.Module, sample: Sample, argument: int | str) -> str:
    """Return the place in the sample, such as ``args[0]``, of an argument by index or name."""
    if isinstance(argument, int):
        return f"args[{argument}]"
    names = list(inspect.signature(model.forward).parameters)
    if argument not in sample.kwargs and argument in names[: len(sample.args)]:
        return f"args[{names.index(argument)}]"
    return f"kwargs[{argument!r}]"


def read_most(most: object) -> int:
    """Return the argument ``most`` of ``max_batch``, checked, or its default for ``None``.

    Raises:
        ArgumentError: ``most`` is not a positive int.
    """
    if most is None:
        return MOST_SIZE
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ArgumentError(
            f"most must be an int of at least 1, or None, but got {most!r}",
            argument="most",
            value=most,
        )
    return most


@dataclass(frozen=True, slots=True)
class Batching:
    """The search for batch sizes of one captured step that fit a budget.

    Attributes:
        graph: the captured graph, with symbols as sizes.
        budget: the budget of the model.
        budget_bytes: the bytes that no size may exceed.
        context: the context of the captured call.
        model: the captured model.
        sample: the sample of the capture.
        most: the largest size to consider.
        progress: receives how far the search for sizes has come.
        trains: compiles a sample of another size, and returns whether it keeps to the budget.
            ``None``: predicted sizes are returned unchecked.
    """

    graph: Graph
    budget: TrainingBudget
    budget_bytes: int
    context: StepContext
    model: nn.Module
    sample: Sample
    most: int
    progress: Progress
    trains: Callable[[Sample], bool] | None = None

    def over(self, asked: NamedDim) -> Batches:
        """Return sizes of one dimension that fit the budget, with least bytes and seconds of each.

        Raises:
            BudgetError: no size fits.
            ArgumentError: the dimension does not vary, or only with another of the same argument.
        """
        group = self._group(asked)
        self.progress("find the largest batch")
        return Batches(self.budget_bytes, asked.name, tuple(self._curve(group)))

    def _group(self, asked: NamedDim) -> tuple[Dimension, ...]:
        """Return the dimensions of all arguments that vary with ``asked``: those of its size."""
        dimensions, hints = self.graph.dimensions, self.graph.sizes.hints
        if not any(d.place == asked.place and d.dim == asked.dim for d in dimensions):
            raise asked.refuse(
                f"{asked.name}, {asked.size} in the sample, does not vary: the model accepts only "
                "this size, or does not use the argument; sizes in a sample must be at least 2"
            )
        group = tuple(d for d in dimensions if hints[d.symbol] == asked.size)
        places = [d.place for d in group]
        for dimension in group:
            if places.count(dimension.place) > 1:
                tied = " and ".join(d.name for d in group if d.place == dimension.place)
                raise asked.refuse(
                    f"{tied} are both {asked.size} in the sample, and equal sizes vary together: "
                    "pass a sample in which they differ"
                )
        return group

    def _at(self, group: Sequence[Dimension], size: int) -> StepContext:
        return replace(self.context, sizes=resized(self.context.sizes, group, size))

    def _usual_at(self, group: Sequence[Dimension], size: int) -> StepContext:
        return usual_context(self.graph, self._at(group, size), self.budget)

    def _point(self, group: Sequence[Dimension], size: int, *, run: bool = True) -> BatchPoint:
        context = self._usual_at(group, size)
        evaluated = pools(self.graph, context, self.budget_bytes, run=run, bits=False)
        least_bytes = least_of(evaluated).least_bytes
        _, candidate = fastest(evaluated, max(self.budget_bytes, least_bytes))
        return BatchPoint(size, least_bytes, candidate.total_s)

    def _curve(self, group: Sequence[Dimension]) -> list[BatchPoint]:
        taken = self._taken(group)
        largest = self._largest(group)
        if largest is None:
            raise self._nothing(group)
        count, closer_count = (
            self.graph.options.effort.curve_sizes,
            self.graph.options.effort.curve_closer,
        )
        sizes = sorted({nearest(taken, largest * i // count) for i in range(count + 1)})
        points: dict[int, BatchPoint] = {}
        for size in sizes:
            self.progress("predict batches", len(points), len(sizes) + closer_count)
            points[size] = self._point(group, size, run=size == largest)
        for closer in range(closer_count):
            self.progress("predict batches", len(sizes) + closer, len(sizes) + closer_count)
            tried = sorted(points)
            best = tried.index(min(tried, key=lambda size: points[size].seconds_a_sample))
            near = tried[max(0, best - 1) : best + 2]
            middles = {nearest(taken, (a + b) // 2) for a, b in itertools.pairwise(near)}
            for size in middles - points.keys():
                points[size] = self._point(group, size, run=False)
        return [points[size] for size in sorted(points)]

    def _largest(self, group: Sequence[Dimension]) -> int | None:
        """Return the largest size of ``group`` that fits and the model accepts, or ``None``."""
        predicted = largest_size(
            self.graph,
            self.context,
            group,
            self.budget_bytes,
            most=self.most,
            uncached=True,
            at_sizes=lambda own: usual_context(self.graph, own, self.budget),
            takes=self._is_taken,
        )
        return predicted and self._largest_trained(group, predicted)

    def _largest_trained(self, group: Sequence[Dimension], predicted: int) -> int | None:
        """Return the largest size up to ``predicted`` whose compiled step keeps to the budget.

        Return ``None`` if there is none. A size is compiled only if it does not fit without
        operations that are computed in parts and must have the bits of the whole: at each size the
        parts have other rows, where library kernels may round differently. Such parts are not used.
        """

        taken = self._taken(group)
        high = bisect_right(taken, predicted)  # counts of ``taken``

        def fits_without_bits(count: int) -> bool:
            own = self._usual_at(group, taken[count - 1])
            least = least_bytes_from_scratch(self.graph, own, self.budget_bytes, exact_parts=False)
            return least <= self.budget_bytes

        if self.trains is None or fits_without_bits(high):
            return predicted
        trains = self.trains
        if trains(self._sample_at(self._at(group, predicted))):
            return predicted
        low = bisected(fits_without_bits, 0, high)
        trials = self.graph.options.effort.batch_trials
        for trial in range(trials):
            if high - low <= 1:
                break
            self.progress("compile batches", trial, trials)
            # What is refused is seldom off by much.
            middle = max(low + 1, high - max(1, (high - low) >> (trials - trial)))
            is_trained = trains(self._sample_at(self._at(group, taken[middle - 1])))
            low, high = (middle, high) if is_trained else (low, middle)
        return taken[low - 1] if low else None

    def _taken(self, group: Sequence[Dimension]) -> range:
        """Return the sizes of ``group`` for which the captured graph is valid, by its guards."""
        taken = taken_sizes(self.graph.sizes, self.context.sizes, group)
        assert taken is not None
        return taken

    def _nothing(self, group: Sequence[Dimension]) -> BudgetError:
        smallest = self._taken(group).start
        context = self._usual_at(group, smallest)
        least = max(
            least_bytes(self.graph, context, None),
            least_bytes_from_scratch(self.graph, context, 0),
        )
        return BudgetError(
            f"no size fits {self.budget_bytes} bytes: if {group[0].name} is {smallest}, the "
            f"least feasible budget is {least} bytes ({format_bytes(least)}). Give at least that",
            least_budget_bytes=least,
            code="FXR002",
        )

    def _is_taken(self, context: StepContext) -> bool:
        """Return whether the model accepts arguments of these sizes, which a table may limit."""
        if context.sizes == self.graph.sizes.hints:
            return True
        try:
            call_without_data(self.model, self._sample_at(context, torch.Tensor.new_empty))
        except Exception:  # raised by the model
            return False
        return True

    def _sample_at(
        self, context: StepContext, make: Callable[..., torch.Tensor] = torch.Tensor.new_zeros
    ) -> Sample:
        """Return the sample with the tensor sizes of ``context``.

        Args:
            context: the context with the sizes.
            make: returns the new tensor for a tensor of the sample and a shape, by default zeros.
        """
        new = {(d.place, d.dim): context.sizes[d.symbol] for d in self.graph.dimensions}
        made: dict[int, torch.Tensor] = {}  # one tensor may be given in several places
        for place, tensor in places_of(self.sample.args, self.sample.kwargs):
            shape = [new.get((place, dim), size) for dim, size in enumerate(tensor.shape)]
            if id(tensor) not in made:
                made[id(tensor)] = make(tensor, shape)

        def like(value: Any) -> Any:
            return made.get(id(value), value)

        return self.sample.map(like)
