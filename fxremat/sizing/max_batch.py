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
from fxremat.graph.pools import least_bytes_from_scratch, pools, rough_least_bytes
from fxremat.options.budget import TrainingBudget
from fxremat.planner.context import StepContext
from fxremat.planning.choose import usual_context
from fxremat.planning.largest_size import largest_size
from fxremat.progress import Progress
from fxremat.report.frontier import Batches, BatchPoint
from fxremat.units import format_bytes

Dim = int | tuple[int | str, int]
"""A dimension of the sample's first tensor, or an argument's index or name and a dimension."""

CURVE = 12
"""Sizes of a curve, evenly among all; the best one's neighbours come on top."""

CLOSER = 2
"""Times that sizes half-way from the fastest to its neighbours are added."""

TRIALS = 3
"""How often a size is compiled by itself, where the one that should fit is refused."""

FRONTIER = 8
"""Sizes of each further dimension, where there is one."""


class NamedDim(NamedTuple):
    """A dimension that the user named.

    Attributes:
        place: the argument.
        dim: of its dimensions, from 0.
        size: in the sample.
        written: as the user named it.
    """

    place: str
    dim: int
    size: int
    written: object

    @property
    def name(self) -> str:
        """The dimension as Python writes it, as ``args[0].shape[1]``."""
        return f"{self.place}.shape[{self.dim}]"

    def refuse(self, why: str) -> ArgumentError:
        """An error that says why the dimension cannot vary."""
        return ArgumentError(f"dim is {self.written!r}: {why}", argument="dim", value=self.written)


def read_dims(model: nn.Module, sample: Sample, dim: Dim | Sequence[Dim]) -> tuple[NamedDim, ...]:
    """The dimensions that the user named.

    Raises:
        ArgumentError: the sample has no such argument or dimension, or one is named twice.
    """
    several = list(dim) if isinstance(dim, list) else [dim]
    asked = tuple(_read_dim(model, sample, one) for one in several)
    if not asked:
        raise ArgumentError("dim is []: name at least one dimension", argument="dim", value=dim)
    sizes = [one.size for one in asked]
    for one in asked:
        if sizes.count(one.size) > 1:
            raise one.refuse(
                f"two of the dimensions have size {one.size} in the sample, and sizes that are "
                "equal there vary together: give a sample in which they differ"
            )
    return asked


def _read_dim(model: nn.Module, sample: Sample, dim: Any) -> NamedDim:
    places = places_of(sample.args, sample.kwargs)
    argument, number = dim if isinstance(dim, tuple) and len(dim) == 2 else (None, dim)
    if not _is_number(number) or not (argument is None or isinstance(argument, (int, str))):
        raise ArgumentError(
            f"dim is {dim!r}: must be an int, a pair of an argument's index or name and an int, "
            "or a list of these",
            argument="dim",
            value=dim,
        )
    wanted = "" if argument is None else _place_of(model, sample, argument)
    for place, tensor in places:
        own = place == wanted or place.startswith(f"{wanted}[") or not wanted
        if own and -tensor.dim() <= number < tensor.dim():
            index = number % tensor.dim()
            return NamedDim(place, index, tensor.shape[index], dim)
    known = ", ".join(f"{place} of shape {tuple(tensor.shape)}" for place, tensor in places)
    raise ArgumentError(
        f"dim is {dim!r}: the sample has no such dimension; its tensors are {known}",
        argument="dim",
        value=dim,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _place_of(model: nn.Module, sample: Sample, argument: int | str) -> str:
    """Where an argument of the model is in the sample."""
    if isinstance(argument, int):
        return f"args[{argument}]"
    names = list(inspect.signature(model.forward).parameters)
    if argument not in sample.kwargs and argument in names[: len(sample.args)]:
        return f"args[{names.index(argument)}]"
    return f"kwargs[{argument!r}]"


def read_most(most: object) -> int:
    """The largest size that is asked for.

    Raises:
        ArgumentError: it is no positive int.
    """
    if most is None:
        return MOST_SIZE
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ArgumentError(
            f"most is {most!r}: must be an int of at least 1, or None", argument="most", value=most
        )
    return most


@dataclass(frozen=True, slots=True)
class Batching:
    """One captured step whose sizes vary.

    Attributes:
        graph: that was captured.
        budget: of the model.
        budget_bytes: what is not to be exceeded.
        context: what the captured call found.
        model: what was captured.
        sample: of the capture.
        most: the largest size that is asked for.
        progress: told how far the search for sizes has come.
        trains: compiles a sample of other sizes; whether the budget is accepted. ``None``: sizes
            are answered as they are predicted.
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

    def over(self, asked: Sequence[NamedDim]) -> Batches:
        """The sizes that fit.

        Raises:
            BudgetError: none does.
            ArgumentError: a dimension does not vary, or only with another of the same argument.
        """
        groups = [self._group(one) for one in asked]
        self.progress("find the largest batch")
        points = self._curve(groups[0]) if len(groups) == 1 else self._frontier(groups)
        names = tuple(one.name for one in asked)
        return Batches(self.budget_bytes, names, tuple(points))

    def _group(self, asked: NamedDim) -> tuple[Dimension, ...]:
        """All dimensions that vary with one."""
        known, hints = self.graph.dimensions, self.graph.sizes.hints
        if not any(d.place == asked.place and d.dim == asked.dim for d in known):
            raise asked.refuse(
                f"{asked.name}, {asked.size} in the sample, does not vary: the model takes only "
                "this size, or does not use the argument; a sample's sizes must be at least 2"
            )
        group = tuple(d for d in known if hints[d.symbol] == asked.size)
        places = [d.place for d in group]
        for dimension in group:
            if places.count(dimension.place) > 1:
                tied = " and ".join(d.name for d in group if d.place == dimension.place)
                raise asked.refuse(
                    f"{tied} are both {asked.size} in the sample, and sizes that are equal there "
                    "vary together: give a sample in which they differ"
                )
        return group

    def _at(self, groups: Sequence[Sequence[Dimension]], sizes: Sequence[int]) -> StepContext:
        values = self.context.sizes
        for group, size in zip(groups, sizes, strict=True):
            values = resized(values, group, size)
        return usual_context(self.graph, replace(self.context, sizes=values), self.budget)

    def _point(
        self, groups: Sequence[Sequence[Dimension]], sizes: tuple[int, ...], *, run: bool = True
    ) -> BatchPoint:
        context = self._at(groups, sizes)
        found = pools(self.graph, context, self.budget_bytes, run=run, bits=False)
        least_bytes = least_of(found).least_bytes
        _, candidate = fastest(found, max(self.budget_bytes, least_bytes))
        return BatchPoint(sizes, least_bytes, candidate.total_s)

    def _curve(self, group: Sequence[Dimension]) -> list[BatchPoint]:
        taken = self._taken(self.context, group)
        largest = self._largest(self.context, group)
        if largest is None:
            raise self._nothing([group])
        sizes = sorted({nearest(taken, largest * i // CURVE) for i in range(CURVE + 1)})
        found: dict[int, BatchPoint] = {}
        for size in sizes:
            self.progress("predict batches", len(found), len(sizes) + CLOSER)
            found[size] = self._point([group], (size,), run=size == largest)
        for closer in range(CLOSER):
            self.progress("predict batches", len(sizes) + closer, len(sizes) + CLOSER)
            known = sorted(found)
            best = known.index(min(known, key=lambda size: found[size].seconds_a_sample))
            near = known[max(0, best - 1) : best + 2]
            middles = {nearest(taken, (a + b) // 2) for a, b in itertools.pairwise(near)}
            for size in middles - found.keys():
                found[size] = self._point([group], (size,), run=False)
        return [found[size] for size in sorted(found)]

    def _frontier(self, groups: Sequence[Sequence[Dimension]]) -> list[BatchPoint]:
        """The largest size of the first dimension, for sizes of all others."""
        first, *others = groups
        smallest = self._at([first], [self._taken(self.context, first).start])
        spread = []
        count = max(2, round(FRONTIER ** (1 / len(others))))
        for group in others:
            top = self._largest(smallest, group)
            if top is None:
                raise self._nothing(groups)
            taken = self._taken(smallest, group)
            tops = (round(top ** ((i + 1) / count)) for i in range(count))
            spread.append(sorted({nearest(taken, size) for size in tops}))
        points = []
        choices = list(itertools.product(*spread))
        for done, sizes in enumerate(choices):
            self.progress("predict batches", done, len(choices))
            largest = self._largest(self._at(others, sizes), first)
            if largest is not None:
                points.append(self._point(groups, (largest, *sizes)))
        return points

    def _largest(self, context: StepContext, group: Sequence[Dimension]) -> int | None:
        """The largest size of ``group`` that fits, and that the model takes."""
        predicted = largest_size(
            self.graph,
            context,
            group,
            self.budget_bytes,
            most=self.most,
            alone=True,
            at_sizes=lambda own: usual_context(self.graph, own, self.budget),
            takes=self._is_taken,
        )
        return predicted and self._largest_trained(context, group, predicted)

    def _largest_trained(
        self, context: StepContext, group: Sequence[Dimension], predicted: int
    ) -> int | None:
        """The largest size up to ``predicted`` that a compile by itself accepts.

        Only parts that must keep their bits can be refused: at each size of a capture they are cut
        elsewhere, and a library's kernels round by where they are cut. What fits without them is
        not compiled.
        """

        def at(size: int) -> StepContext:
            return replace(context, sizes=resized(context.sizes, group, size))

        def fits_without_bits(size: int) -> bool:
            own = usual_context(self.graph, at(size), self.budget)
            least = least_bytes_from_scratch(self.graph, own, self.budget_bytes, exact_parts=False)
            return least <= self.budget_bytes

        if self.trains is None or fits_without_bits(predicted):
            return predicted
        trains, taken = self.trains, self._taken(context, group)
        if trains(self._sample_at(at(predicted))):
            return predicted
        low, high = 0, bisect_right(taken, predicted)  # counts of ``taken``
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits_without_bits(taken[middle - 1]) else (low, middle)
        high = bisect_right(taken, predicted)
        for trial in range(TRIALS):
            if high - low <= 1:
                break
            self.progress("compile batches", trial, TRIALS)
            # What is refused is seldom off by much.
            middle = max(low + 1, high - max(1, (high - low) >> (TRIALS - trial)))
            is_trained = trains(self._sample_at(at(taken[middle - 1])))
            low, high = (middle, high) if is_trained else (low, middle)
        return taken[low - 1] if low else None

    def _taken(self, context: StepContext, group: Sequence[Dimension]) -> range:
        """Sizes for which the captured step holds, beside others for which it does."""
        found = taken_sizes(self.graph.sizes, context.sizes, group)
        assert found is not None
        return found

    def _nothing(self, groups: Sequence[Sequence[Dimension]]) -> BudgetError:
        context, smallest = self.context, []
        for group in groups:
            smallest.append(self._taken(context, group).start)
            context = self._at(groups[: len(smallest)], smallest)
        least, budget = rough_least_bytes(self.graph, context), self.budget_bytes
        named = zip(groups, smallest, strict=True)
        told = ", ".join(f"{group[0].name} is {size}" for group, size in named)
        return BudgetError(
            f"no size fits {budget} bytes: where {told} the least feasible budget is {least} "
            f"bytes ({format_bytes(least)}). Give at least that",
            least_budget_bytes=least,
        )

    def _is_taken(self, context: StepContext) -> bool:
        """Whether the model takes arguments of such sizes, such as its table of positions does."""
        if context.sizes == self.graph.sizes.hints:
            return True
        try:
            call_without_data(self.model, self._sample_at(context, torch.Tensor.new_empty))
        except Exception:  # the model's own
            return False
        return True

    def _sample_at(
        self, context: StepContext, make: Callable[..., torch.Tensor] = torch.Tensor.new_zeros
    ) -> Sample:
        """A sample of a call's sizes: zeros, which any index or class may be; or what ``make``
        makes of a tensor and a shape.
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
