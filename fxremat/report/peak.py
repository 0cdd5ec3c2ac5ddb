"""What a step holds at its peak, which line of the model made it, and what would free it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from fxremat.ir import Copy, Lane, MeasuredLink
from fxremat.report.facts import Fused
from fxremat.report.memory import EXISTING, CodeLine, Kind, Life, Tensor
from fxremat.report.modules import pattern_of, repeated
from fxremat.report.plan import AnyPlan, StepPlan, plans_of
from fxremat.report.view import REGION, StepView, view_of
from fxremat.units import format_bytes, format_seconds

BLOCKS, CACHE = "allocator blocks", "allocator cache"
"""Kinds of memory that no tensor has: the unused part of allocated blocks, and unused blocks."""

MOST_NAMES = 2
"""The maximum number of operations that the name of a unit lists."""

MADE = "gradients made so far"
"""The description of the gradients that a backward has made when the peak is reached."""


class _State(Enum):
    """Why an activation is held at the peak."""

    WAITS = "kept for the backward"
    USED = "in use"
    FORWARD = "read later in the forward"
    AGAIN = "recomputed for the backward"
    BACK = "back from the host"


@dataclass(frozen=True, slots=True)
class PeakHolder:
    """Tensors of one origin that are held at the peak of a step.

    Tensors are of one origin if they have the same purpose, and one line and operation of the same
    module, or of repeated blocks, allocates them.

    Attributes:
        kind: purpose of the memory, such as ``"parameters"``, ``"activations"`` or
            ``"workspaces"``.
        nbytes: bytes of all tensors.
        share: share of the peak, from 0 to 1.
        tensors: number of tensors, 0 if the bytes belong to none.
        what: the operation that allocates them, or a description, such as ``"12 parameters"``.
        module: path of the module, such as ``"layers.0–11.mlp"``; empty if unknown.
        line: line of the model that allocates them, or ``None`` if unknown. For a model of a
            library it is a line of that library.
        recompute_s: seconds that a step takes longer if the tensors are recomputed instead of kept;
            ``None`` if they cannot be, or if that would not lower the peak.
        instead_bytes: bytes that would have to be kept instead, to recompute the tensors from.
        offload_s: seconds of their transfer to host memory and back, which may overlap with
            computations; ``None`` if the plan was made without ``offload=``, or if that would not
            lower the peak.
        how_to_free: what would free them, and its cost, as text; empty if nothing would.
    """

    kind: str
    nbytes: int
    share: float
    tensors: int
    what: str
    module: str = ""
    line: CodeLine | None = None
    recompute_s: float | None = None
    instead_bytes: int = 0
    offload_s: float | None = None
    how_to_free: str = ""

    @property
    def place(self) -> str:
        """The line as text, such as ``"model.py:23: x = self.up(x)"``; empty if unknown."""
        if self.line is None:
            return ""
        return self.line.place + f": {self.line.code}" * bool(self.line.code)

    @property
    def text(self) -> str:
        """The kind and the origin, such as ``"activations: gelu × 12 in layers.0–11.mlp"``."""
        is_named = not self.module and self.kind.removesuffix("s") in self.what
        return self.origin if is_named else f"{self.kind}: {self.origin}"

    @property
    def origin(self) -> str:
        """The operation, the number of tensors and the module, or the description."""
        times = f" × {self.tensors}" * (self.tensors > 1)
        return f"{self.what}{times} in {self.module}" if self.module else self.what

    def facts(self) -> dict[str, Any]:
        """Return the holder as a dict of numbers and text that ``json`` can write."""
        return {
            "kind": self.kind,
            "nbytes": self.nbytes,
            "share": self.share,
            "tensors": self.tensors,
            "what": self.what,
            "module": self.module,
            "file": self.line and self.line.file,
            "line": self.line and self.line.number,
            "code": self.line and self.line.code,
            "recompute_s": self.recompute_s,
            "instead_bytes": self.instead_bytes,
            "offload_s": self.offload_s,
            "how_to_free": self.how_to_free,
        }


def holders_of(plan: AnyPlan) -> tuple[PeakHolder, ...]:
    """Return what a step holds at its peak, the most bytes first.

    Raises:
        PlanError: a plan has no record of tensors.
    """
    return tuple(holder for holder, _ in holders_with_tensors(plan, view_of(plan)))


def holders_with_tensors(
    plan: AnyPlan, view: StepView
) -> tuple[tuple[PeakHolder, tuple[int, ...]], ...]:
    """Return what a step holds at its peak, each with the indices of its tensors in ``view``.

    Ensures: the bytes add up to the predicted peak in the bytes that the budget limits.
    """
    peak = _Peak(plan, view)
    groups: defaultdict[Hashable, list[Life]] = defaultdict(list)
    for life in view.memory.alive(peak.instant):
        groups[peak.key(life)].append(life)
    rows = [(peak.holder(lives), tuple(life.tensor for life in lives)) for lives in groups.values()]
    rows += ((holder, ()) for holder in peak.of_allocator())
    return tuple(sorted(rows, key=lambda pair: -pair[0].nbytes))


def summed(holders: Sequence[PeakHolder]) -> dict[str, int]:
    """Return the bytes of ``holders`` by kind, in the order in which kinds are listed."""
    rows = dict.fromkeys((kind.value for kind in Kind), 0)
    for holder in holders:
        rows[holder.kind] = rows.get(holder.kind, 0) + holder.nbytes
    return rows


def shortened(text: str, width: int) -> str:
    """Return ``text``, cut with an ellipsis if it is longer than ``width``."""
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


class _Peak:
    """The instant of a step at which most memory is held."""

    def __init__(self, plan: AnyPlan, view: StepView) -> None:
        self._view, self._memory = view, view.memory
        self._plans, self._plan = plans_of(plan), plan
        self.instant = view.memory.peak_instant
        self._is_between = self.instant in view.between
        self._call = bisect_right(view.memory.calls, self.instant) - 1
        self._waiting = {own.tensor: own for own in view.memory.waiting}
        self._moved = {e.op.name for e in view.timeline.events if isinstance(e.op, Copy)}
        self._units = {unit.name: _unit(unit) for own in self._plans for unit in own.fused}
        links = (own.measured.link for own in self._plans if own.measured)
        self._link = next(filter(None, links), None)

    def key(self, life: Life) -> Hashable:
        """Return a value that the lives of one row of the table have in common."""
        tensor = self._memory.tensors[life.tensor]
        if not tensor.operation:
            return tensor.kind, tensor.name
        if tensor.kind is Kind.GRADIENTS:  # of all modules
            return tensor.kind, MADE
        # Without a line, numbers of inner modules are all that distinguishes them.
        module = pattern_of(_bare(tensor.module), outermost=tensor.line < 0)
        state = self._state(life)
        is_fixed = state is _State.WAITS and self._waiting[life.tensor].runs is None
        return tensor.kind, state, is_fixed, tensor.line, tensor.operation, module

    def holder(self, lives: Sequence[Life]) -> PeakHolder:
        """Return the row of ``lives``, which have equal keys."""
        tensors = [self._memory.tensors[life.tensor] for life in lives]
        first, nbytes = tensors[0], sum(tensor.nbytes for tensor in tensors)
        if first.kind is Kind.GRADIENTS and first.operation:
            first = Tensor(MADE, nbytes, Kind.GRADIENTS)
            tensors = [first]
        state = self._state(lives[0])
        recompute_s, instead_bytes, offload_s = None, 0, None
        if state is _State.WAITS:
            recompute_s, instead_bytes = self._recomputed(lives, nbytes)
            offload_s = _transfer_s(nbytes, self._link)
        holder = PeakHolder(
            kind=first.kind.value,
            nbytes=nbytes,
            share=nbytes / max(1, self._plan.counted_bytes),
            tensors=len({life.tensor for life in lives}),
            what=self._units.get(first.operation, first.operation) or first.name,
            module=repeated([_bare(tensor.module) for tensor in tensors]),
            line=self._memory.lines[first.line] if first.line >= 0 else None,
            recompute_s=recompute_s,
            instead_bytes=instead_bytes,
            offload_s=offload_s,
        )
        return replace(holder, how_to_free=self._advice(holder, first, state))

    def of_allocator(self) -> Iterator[PeakHolder]:
        """Yield the bytes of the peak that belong to no tensor, if there are any."""
        plan, held_bytes = self._plan, self._memory.peak_bytes
        for kind, nbytes, what in (
            (
                BLOCKS,
                plan.predicted_peak_bytes - held_bytes,
                "blocks are larger than their tensors",
            ),
            (CACHE, plan.counted_bytes - plan.predicted_peak_bytes, "blocks without a tensor"),
        ):
            if nbytes:
                yield PeakHolder(kind, nbytes, nbytes / max(1, plan.counted_bytes), 0, what)

    def _recomputed(self, lives: Sequence[Life], nbytes: int) -> tuple[float | None, int]:
        """Return the seconds that recomputing tensors takes, and the bytes to keep instead.

        The seconds are ``None`` if that is not possible, or holds as much.
        """
        waiting = [self._waiting[life.tensor] for life in lives]
        needs = {need for own in waiting for need in own.needs}
        instead_bytes = sum(self._memory.tensors[need].nbytes for need in needs)
        if any(own.runs is None for own in waiting) or instead_bytes >= nbytes:
            return None, 0
        runs = {run for own in waiting for run in own.runs or ()}
        return sum(self._memory.again_s[run] for run in sorted(runs)), instead_bytes

    def _state(self, life: Life) -> _State | None:
        """Return why an activation is held; ``None`` for all other memory."""
        memory = self._memory
        tensor = memory.tensors[life.tensor]
        if tensor.kind is not Kind.ACTIVATIONS:
            return None
        if life.begin > memory.loss_point:
            return _State.BACK if tensor.name in self._moved else _State.AGAIN
        own = self._waiting.get(life.tensor)
        is_new = not self._is_between and life.begin >= memory.calls[self._call]
        if is_new or (own and not self._is_between and self._call in own.calls):
            return _State.USED
        return _State.WAITS if own else _State.FORWARD

    def _advice(self, holder: PeakHolder, tensor: Tensor, state: _State | None) -> str:
        """Return what would free the tensors of a row, as far as the plan's facts say."""
        if state is _State.WAITS:
            ways = []
            if holder.recompute_s is not None:
                kept = f", keeping {format_bytes(holder.instead_bytes)}"
                cost = format_seconds(holder.recompute_s)
                ways.append(f"recompute: {cost}" + kept * (holder.instead_bytes > 0))
            if holder.offload_s is not None:
                ways.append(f"offload: {format_seconds(holder.offload_s)} of copies")
            return ", or ".join(ways) or "nothing: every plan keeps it"
        if state is _State.USED and self._operation():
            return f"in use by {self._operation()}"
        return state.value if state else self._advice_on_kind(tensor)

    def _advice_on_kind(self, tensor: Tensor) -> str:
        options = [dict(own.origin.options) for own in self._plans if own.origin]
        if tensor.kind is Kind.GRADIENTS and tensor.name == EXISTING:
            if any(own.get("accumulate") == "True" for own in options):
                return "nothing: they are accumulated"
            return "zero_grad() before the forward"
        if isinstance(self._plan, StepPlan) and tensor.kind in (Kind.LOSS, Kind.OUTPUTS):
            return ""  # options of its regions are not those of the step
        if tensor.kind is Kind.LOSS and any(own.get("loss") == "None" for own in options):
            return "loss=: an unknown loss is assumed"
        return _ADVICE.get(tensor.kind, "")

    def _operation(self) -> str:
        """Return the operation that runs at the peak, such as ``"B 7"``."""
        if self._is_between or self._call < 0:
            return ""
        events = [e for e in self._view.timeline.events if e.lane is Lane.COMPUTE]
        return str(events[self._call].op)


RETURNED = "a model that returns only its loss"

_ADVICE = {
    Kind.PARAMETERS: "fully_shard, or a frozen base in 4 bit",
    Kind.OPTIMIZER: "an 8-bit optimizer, or fully_shard",
    Kind.INPUTS: "a smaller batch",
    Kind.RESERVE: "a smaller reserve=",
    Kind.GRADIENTS: "an optimizer step in the backward",
    Kind.OUTPUTS: RETURNED,
    Kind.PASSING: "in use by the backward",
    Kind.WORKSPACES: "in use by its operation",
    Kind.LOSS: RETURNED,
}


def _unit(unit: Fused) -> str:
    """Return a short name of operations that are called as one, by the first of them."""
    names = [*dict.fromkeys(unit.operations)]
    more = ", …" * (len(names) > MOST_NAMES)
    return ", ".join(names[:MOST_NAMES]) + more + (" in parts" if unit.parts > 1 else " fused")


def _transfer_s(nbytes: int, link: MeasuredLink | None) -> float | None:
    if link is None:
        return None
    return nbytes / link.offload_bytes_per_s + nbytes / link.prefetch_bytes_per_s


def _bare(module: str) -> str:
    """Return a module's path without the number of its region, if it has one."""
    parts = module.split(".")
    return ".".join(parts[2:]) if parts[0] == REGION and len(parts) > 2 else module
