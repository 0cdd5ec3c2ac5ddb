"""A run of operations as one, which computes some rows of its results at a time."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxremat.passes.joint.digest import target_name, written
from fxremat.passes.joint.graph import is_getitem
from fxremat.passes.joint.sizes import Layout, evaluated, names_in, number_at
from fxremat.passes.parts.bits import are_equal
from fxremat.passes.parts.rows import Result, Rows, Shape, indexed, part, part_of, ranges_of
from fxremat.runtime import cuda_graph

ROWS = "ROWS"
"""Name of the number of rows of a part, in the arguments of its operations."""

MOST_SIZES = 128
"""For how many sizes the code of a run is kept; the oldest is dropped first."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes whose sums are computed in float32, and rounded once."""

Body = Callable[..., tuple[Tensor, ...]]
"""Computes one part: takes its inputs, and returns a tuple."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a run of operations returns.

    Attributes:
        way: the dimensions that are its rows, or that it is the sum of what the parts return, or
            that nobody reads it.
        layout: the memory layout of the whole tensor.
        dtype: the dtype of its elements.
        is_product: whether the parts return two matrices, and it is the sum of their products.
    """

    way: Rows | Result
    layout: Layout
    dtype: torch.dtype
    is_product: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the operations of a run allocate if all rows are computed at once.

    Attributes:
        layout: layout of its storage.
        first, last: indices of the operation that allocates it, and of the one that reads it last.
    """

    layout: Layout
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Witness:
    """A test whether a pointwise operation of a run computes each element by the same formula.

    Kernels for a CPU compute numbers that do not fill a vector by another formula, so the bits of a
    number may depend on its position. For numbers for which the two formulas differ, ``parts`` has
    the same results in parts as at once if, and only if, each position has the same formula.

    Attributes:
        node: the operation.
        parts: the run up to it, which reads given numbers in place of tensors. It takes some inputs
            of the run, then a number for each tensor that the operation reads.
        taken: indices of these inputs among the inputs of the run.
    """

    node: fx.Node
    parts: Parts
    taken: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Integers:
    """Which integer inputs of a run are indices, and which are numbers.

    Attributes:
        indices: positions of tensors whose numbers are indices, of which only 0 is always valid.
        values: positions of tensors whose numbers are converted to floating-point numbers.
    """

    indices: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Changed:
    """What differs if a run is computed in parts; its truth value is whether anything does.

    Attributes:
        results: indices of results with other bits.
        witnesses: indices of witnesses that show another formula.
    """

    results: frozenset[int] = frozenset()
    witnesses: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.results or self.witnesses)


class Parts:
    """A run of operations that is computed in parts of its rows, one after the other.

    Equal runs are one object, so a recomputation runs like the first computation.

    Args:
        name: its unique name in emitted code.
        graph: one part: placeholders, operations, a tuple; sizes among its arguments may name
            :data:`ROWS`.
        inputs: the rows of each input tensor; ``None`` if each part reads it whole.
        outputs: the tensors that it returns.
        rows: the number of rows; it may follow the sizes of the step.
        part_rows: the most rows of a part.
        hints: sizes that the run follows, by name, and their values at the capture.
        device: device of all tensors.
        exact: whether its results must have the same bits as if all rows were computed at once.
        certain: whether they have, by the rules of its operations, for all sizes.
        part_bytes: bytes that a part holds besides inputs and results, at the capture.
        whole: the step's operations that it computes, without views.
        at_once: all rows at once: the operations as traced, with the placeholders and results of
            ``graph``.
        witnesses: returns the witnesses of pointwise operations that may not keep their bits. It is
            called only the first time that they are needed.
        integers: which integer inputs are indices, and which are numbers.
        made: what ``at_once`` allocates, including results.

    A call takes the inputs, and the sizes in the order of ``hints``. It returns a tensor, or a list
    of several. If it must be exact and that is not certain, it runs ``at_once`` for all sizes for
    which :meth:`confirm_bits` has not confirmed that parts keep the bits.
    """

    def __init__(
        self,
        name: str,
        graph: fx.Graph,
        inputs: Sequence[Rows | None],
        outputs: Sequence[Output],
        rows: int,
        part_rows: int,
        hints: Mapping[str, int],
        device: torch.device,
        *,
        exact: bool,
        certain: bool,
        part_bytes: int,
        whole: Sequence[fx.Node],
        at_once: fx.Graph,
        witnesses: Callable[[], Iterable[Witness]] = tuple,
        integers: Integers | None = None,
        made: Sequence[Made] = (),
        held: Sequence[Sequence[int]] = (),
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "fxremat.parts"
        self.graph, self.rows, self.part_rows = graph, rows, part_rows
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.hints, self.device = dict(hints), device
        self.exact, self.certain = exact, certain
        self.part_bytes, self.whole, self.at_once = part_bytes, tuple(whole), at_once
        self._make_witnesses = witnesses
        self.integers = integers or Integers()
        self._made = tuple(made)
        self._held = tuple(dict.fromkeys(map(tuple, held)))
        self._keeps_bits: dict[tuple[int, ...], bool] = {}
        self._refused = False
        self._report: Callable[[bool], None] | None = None
        self._bodies: dict[tuple[int | None, ...], Body] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return self.__name__

    @functools.cached_property
    def witnesses(self) -> tuple[Witness, ...]:
        """Tests of the pointwise operations whose results may have other bits in parts."""
        return tuple(self._make_witnesses())

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operators that a part runs, in order, such as ``mm``."""
        return tuple(name.split(".")[1] for name in self._called_names)

    def are_alike(self, shapes: Sequence[Shape]) -> bool:
        """Return whether parts of equally many rows compute the same at all sizes of the step.

        ``shapes`` are the shapes of the inputs.
        """
        pairs = zip(shapes, self.inputs, strict=True)
        given = [shape if way is None else part_of(shape, way, 1) for shape, way in pairs]
        arguments = [(node.args, node.kwargs) for node in self.graph.nodes]
        sums = [out.layout.shape for out in self.outputs if not isinstance(out.way, Rows)]
        return names_in([given, arguments, sums]).keys() <= {ROWS}

    def count(self, sizes: Mapping[str, int]) -> int:
        """Return the number of parts for sizes of the step; 1 if all rows are computed at once."""
        whole = not self._is_split(tuple(sizes[name] for name in self.hints))
        return 1 if whole else -(-int(evaluated(self.rows, sizes)) // self.part_rows)

    def part_bytes_at(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes that a part holds besides inputs and results, for sizes of the step."""
        if not names_in(self._held):
            return self.part_bytes
        total = number_at(self.rows, sizes)
        numbers = {n: number_at(n, sizes) for each in self._held for n in each}
        most = max(sum(numbers[n] for n in each) for each in self._held)
        return -(-most * min(self.part_rows, total) // total)

    @property
    def code(self) -> str:
        """Python code that shows what a call does: a loop over parts of its rows."""
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        rows = {n: way for n, way in zip(inputs, self.inputs, strict=True) if way is not None}

        def shown(node: fx.Node) -> str:
            return indexed(node.name, rows[node]) if node in rows else node.name

        lines = []
        for node in self.graph.nodes:
            if is_getitem(node):
                lines.append(f"{node.name} = {shown(node.args[0])}[{node.args[1]}]")
            elif node.op == "call_function":
                given = [written(a, shown) for a in node.args]
                given += [f"{name}={written(a, shown)}" for name, a in node.kwargs.items()]
                lines.append(f"{node.name} = {target_name(node.target)}({', '.join(given)})")
        results: Any = iter(self.graph.output_node().args[0])  # type: ignore[arg-type]
        for i, output in enumerate(self.outputs):
            value = shown(next(results))
            if output.is_product:
                value += f" @ {shown(next(results))}"
            if output.way is Result.SUM:
                lines.append(f"out{i} += {value}")
            else:
                to = f"out{i}" if output.way is Result.UNREAD else indexed(f"out{i}", output.way)
                lines.append(f"{to} = {value}")
        read = ", ".join(n.name for n in inputs)
        made = ", ".join(f"out{i}" for i in range(len(self.outputs)))
        return "\n".join(
            [
                f"def {self}({read}):",
                f"    for rows in parts({self.rows}, {self.part_rows}):",
                *(f"        {line}" for line in lines),
                f"    return {made}",
                "",
            ]
        )

    @property
    def _called_names(self) -> list[str]:
        called = (n for n in self.graph.nodes if n.op == "call_function" and not is_getitem(n))
        products = ["aten.mm.default" for output in self.outputs if output.is_product]
        return [*(target_name(n.target) for n in called), *products]

    def _is_split(self, sizes: tuple[int, ...]) -> bool:
        if not self.exact:
            return True
        return not self._refused and (self.certain or self._keeps_bits.get(sizes, False))

    def confirm_bits(self, sizes: tuple[int, ...], *, keeps_bits: bool) -> None:
        """Store whether results have the same bits in parts as at once for ``sizes``.

        These are in the order of ``hints``. If there are several calls for the same sizes, with
        tensors in different layouts, each must have ``keeps_bits``.
        """
        self._keeps_bits[sizes] = keeps_bits and self._keeps_bits.get(sizes, True)

    def compared_bytes(self, sizes: Mapping[str, int], *, workspace_bytes: int) -> int:
        """Return an upper bound on the bytes held while results are compared with those at once.

        Args:
            sizes: sizes of the step, by name.
            workspace_bytes: the most that one of the operations takes beyond its results.

        Comparing the bits of a result may copy both sides to dense tensors, and takes four Booleans
        for each number.
        """
        made = [(each, int(evaluated(each.layout.storage_bytes, sizes))) for each in self._made]
        at_once = (
            sum(nbytes for each, nbytes in made if each.first <= place <= each.last)
            for place in {each.first for each in self._made}
        )
        results = [(out, int(evaluated(out.layout.storage_bytes, sizes))) for out in self.outputs]
        answers = (math.ceil(nbytes * (2 + 4 / out.dtype.itemsize)) for out, nbytes in results)
        left = sum(nbytes for _, nbytes in results)
        run_bytes = max(at_once, default=0) + workspace_bytes
        return max(run_bytes, left + max(answers, default=0))

    def compare_next(self, report: Callable[[bool], None] | None) -> None:
        """Let the next call also compute all rows at once, and compare the results.

        Args:
            report: called with whether the results have the same bits. If they do not, the call
                returns those computed at once, and so do further calls. ``None``: the next call
                does not compare.
        """
        self._report = report

    def __call__(self, *args: Any) -> Any:
        """Return the results for the inputs and sizes in ``args``: a tensor, or a list of several.

        If :meth:`compare_next` was called, compare them with those computed at once.
        """
        sizes = tuple(map(int, args[len(self.inputs) :]))
        is_split = self._is_split(sizes)
        made = self.run(args, part_rows=self.part_rows if is_split else None)
        report, self._report = self._report, None
        if report is None or not is_split or cuda_graph.is_captured():
            return made
        whole = self.run(args, part_rows=None)
        pairs = [(whole, made)] if len(self.outputs) == 1 else zip(whole, made, strict=True)
        same = all(
            output.way is Result.UNREAD or are_equal(one, other)
            for output, (one, other) in zip(self.outputs, pairs, strict=True)
        )
        self._refused = not same
        report(same)
        return made if same else whole

    def run(self, args: Sequence[Any], *, part_rows: int | None) -> Any:
        """Return the results for ``args``, ``part_rows`` rows at a time; ``None``: all at once."""
        given, sizes = args[: len(self.inputs)], tuple(map(int, args[len(self.inputs) :]))
        named = dict(zip(self.hints, sizes, strict=True))
        if part_rows is None:
            whole = self._body(sizes, None, named)(*given)
            return whole[0] if len(whole) == 1 else list(whole)
        total = int(evaluated(self.rows, named))
        made: list[Any] = [None] * len(self.outputs)
        for start, rows in ranges_of(total, part_rows):
            pieces = [
                tensor if way is None else part(tensor, way, start, rows)
                for tensor, way in zip(given, self.inputs, strict=True)
            ]
            values = list(self._body(sizes, rows, named)(*pieces))
            del pieces
            self._put(made, values, start, rows, named)
        for i, output in enumerate(self.outputs):
            if made[i].dtype != output.dtype:
                made[i] = made[i].to(output.dtype)
        return made[0] if len(made) == 1 else made

    def _body(self, sizes: tuple[int, ...], rows: int | None, named: Mapping[str, int]) -> Body:
        """Return the function that computes a part of ``rows`` rows; ``None``: all rows at once.

        ``sizes`` are in the order of ``hints``, and ``named`` has the same sizes by name.
        """
        key = (rows, *sizes)
        body = self._bodies.get(key)
        if body is None:
            graph = fx.Graph()
            graph.output(graph.graph_copy(self.at_once if rows is None else self.graph, {}))
            numbers = {**named, ROWS: rows or 0}
            for node in graph.nodes:
                node.args = fx.node.map_aggregate(node.args, lambda x: evaluated(x, numbers))
                node.kwargs = fx.node.map_aggregate(node.kwargs, lambda x: evaluated(x, numbers))
            with self._lock:
                while len(self._bodies) > 2 * MOST_SIZES:
                    self._bodies.pop(next(iter(self._bodies)))
                # The forward itself, because a call of the module would keep a failed call's data.
                body = self._bodies[key] = fx.GraphModule(torch.nn.Module(), graph).forward
        return body

    def _put(
        self,
        made: list[Any],
        values: list[Tensor],
        start: int,
        rows: int,
        named: Mapping[str, int],
    ) -> None:
        """Write what a part returned to the results ``made``, or add it to them.

        Args:
            made: the results of the run; ``None`` for each that no part has written to.
            values: the tensors of the part; the list is emptied.
            start: the first row of the part.
            rows: the number of its rows.
            named: sizes of the step, by name.
        """
        for i, output in enumerate(self.outputs):
            value = values.pop(0)
            if isinstance(output.way, Rows):
                if made[i] is None:
                    made[i] = value.new_empty_strided(
                        [int(evaluated(n, named)) for n in output.layout.shape],
                        [int(evaluated(n, named)) for n in output.layout.stride],
                    )
                part(made[i], output.way, start, rows).copy_(value)
            elif output.way is Result.UNREAD:
                made[i] = value
            elif output.is_product:
                other = values.pop(0)
                if made[i] is None:
                    made[i] = torch.mm(value, other)
                    if output.dtype in HALVES:
                        made[i] = made[i].float()
                elif output.dtype in HALVES:
                    made[i] += torch.mm(value, other)
                else:
                    made[i].addmm_(value, other)
                del other
            elif made[i] is None:
                made[i] = value.float() if output.dtype in HALVES else value
            else:
                made[i] += value
            del value
