"""Steps in flight: forwards whose backward has not run.

Autograd is given one small tensor for all that a forward saves, the *token* of the step, which
refers to the saved tensors. They are freed when autograd drops the token: with the graph, or after
the backward.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.errors import BackwardError
from fxremat.runtime.counted import Count

SCALAR_BYTES = 8
"""Bytes of a number, such as a loss."""

_numbers = itertools.count()

_by_number: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()
"""Steps whose token autograd may give back as another tensor, as ``save_on_cpu`` does."""

_NO_NUMBER = torch.full((1,), -1, device="cpu")
"""The memory that tokens share if autograd gives them back unchanged."""


_latest = threading.local()


def latest_step() -> Step | None:
    """Return the step whose forward this thread has run last, if it still exists.

    A step is returned once. From then on only the caller and the token hold it.
    """
    reference = getattr(_latest, "step", None)
    step = None if reference is None else reference()
    _latest.step = _latest.held = None
    return step


class Step:
    """A forward that runs, and what it leaves for its backward.

    Args:
        plan: the plan whose graphs run.
        backward: the backward graph.
        owners: what runs its backward works for: the loop, the regions and the graph.
        context: the context in which the forward runs.
        leaves: leaves whose gradients the backward computes, by primal.
        passed: what the backward returns unchanged, by place among the gradients.
        count: counts the peak of the step, if its device counts anything.
        missing: primals whose gradient was planned for as existing, and does not exist.
        kept: outputs of earlier steps that are held when the forward begins.

    Attributes:
        plan, backward, owners, context, leaves, passed, count, missing, kept: see above.
        elsewhere: whether hooks may replace its token by another tensor.
        part: the step of several graphs that it belongs to, and its place there.
        number: grows with each step; -1 until the forward has ended.
        outputs: storages that the forward made for its caller, who may hold them for long.
        held_bytes: device memory of what it saved and returned and nothing else holds.
        bundled_bytes: bytes of all bundles of the forward, and of the largest one.
    """

    __slots__ = (
        "__weakref__", "_saved", "_versions", "backward", "bundled_bytes", "context", "count",
        "elsewhere",
        "held_bytes", "kept", "leaves", "missing", "number", "outputs", "owners", "part", "passed",
        "plan",
    )  # fmt: skip

    def __init__(
        self,
        plan: Any,
        backward: Callable[[list[Any]], object],
        *,
        owners: Any = None,
        context: Any,
        leaves: Sequence[Any],
        passed: Mapping[int, object] = MappingProxyType({}),
        count: Count | None = None,
        missing: frozenset[int] = frozenset(),
        kept: Sequence[torch_compat.StorageAlive] = (),
    ) -> None:
        self.plan = plan
        self.owners = owners
        self.count = count
        self.missing = missing
        self.kept = kept
        self.backward = backward
        self.context = context
        self.leaves = leaves
        self.passed = passed
        self.number = -1
        self.outputs: list[torch_compat.StorageAlive] = []
        self.held_bytes = 0
        self.bundled_bytes = 0, 0
        self.elsewhere = False
        self.part: tuple[Any, int] | None = None
        self._saved: list[Tensor] | None = None
        self._versions: list[int] = []

    def keep(self, saved: list[Tensor], outputs: Iterable[object], *, held_bytes: int) -> None:
        """Hold the tensors that the forward has saved, and number the step, which has run.

        Args:
            saved: the first arguments of the backward graph.
            outputs: the results of the forward.
            held_bytes: device memory of these that nothing else holds.
        """
        self._saved, self._versions = saved, torch_compat.versions_of(saved)
        self.outputs = torch_compat.storages_alive(outputs)
        self.held_bytes = held_bytes
        self.number = next(_numbers)
        self.elsewhere = torch_compat.saved_elsewhere()
        if self.elsewhere:
            _by_number[self.number] = self
        _latest.step = weakref.ref(self)
        _latest.held = self if self.elsewhere else None

    def token(self) -> Tensor:
        """Return what autograd saves for this step: a small tensor on the CPU that refers to it.

        It holds the step's number if hooks may replace it by a copy.
        """
        if self.elsewhere:
            token = torch.full((1,), self.number, device="cpu")
            token.__getstate__ = _no_state  # type: ignore[method-assign]
        else:
            token = _NO_NUMBER.data
        token.step = self  # type: ignore[attr-defined]
        return token

    def __deepcopy__(self, _memo: object) -> Step:
        """Return the same step: copies of a token belong to it, too."""
        return self

    @property
    def waits(self) -> bool:
        """Whether its saved tensors exist: its backward has not run, or may run again."""
        return self._saved is not None

    @property
    def graph(self) -> Any:
        """The captured graph that this step runs."""
        return self.owners[-1]

    @staticmethod
    def of(token: Tensor) -> Step:
        """Return the step of a token, or of the tensor that autograd gives back in its place.

        Raises:
            BackwardError: the step no longer exists.
        """
        step: Step | None = getattr(token, "step", None) or _by_number.get(int(token))
        if step is None:
            raise BackwardError(
                "the tensors saved by the forward of a compiled step were freed: hooks on saved "
                "tensors returned a copy of another step's. Do not use such hooks for the compiled "
                "model",
                code="FXR705",
            )
        return step

    def take(self) -> list[Tensor]:
        """Return the saved tensors in a new list, and drop them unless the graph is retained.

        Raises:
            BackwardError: they were taken already, or one of them was modified since.
        """
        saved = self._saved
        if saved is None:
            raise BackwardError(
                "the backward of a compiled step runs a second time, but the tensors saved by its "
                "forward were freed: call backward(retain_graph=True) the first time",
                code="FXR702",
            )
        versions = torch_compat.versions_of(saved)
        if versions != self._versions:
            triples = zip(saved, self._versions, versions, strict=True)
            tensor, version, now = next(t for t in triples if t[1] != t[2])
            raise BackwardError(
                "one of the variables needed for gradient computation has been modified by "
                f"an inplace operation: a tensor of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype} that the backward of a compiled step reads is at version "
                f"{now}, but was at version {version} after its forward. Write to it after the "
                "backward",
                code="FXR701",
            )
        if torch_compat.keeps_graph():
            return list(saved)
        self._saved = None
        self.held_bytes = 0
        return saved


def _no_state() -> None:
    """Return ``None``, so that hooks which pickle a token write its number and not its step."""


class InFlight:
    """Steps of a model whose backward has not run, and outputs of other steps that are held.

    ``latest`` is the number of the step that began last.
    """

    def __init__(self) -> None:
        self.latest = -1
        self._steps: list[weakref.ref[Step]] = []
        self._outputs: list[tuple[int, torch_compat.StorageAlive]] = []
        self._lock = threading.Lock()

    def add(self, step: Step) -> None:
        """Add a step whose forward has run."""
        with self._lock:
            self.latest = step.number
            self._steps.append(weakref.ref(step))
            for output in step.outputs:
                self._outputs.append((step.number, output))

    def returned(self, results: Iterable[object]) -> None:
        """Add tensors that the caller may hold, and that no step has among its outputs.

        These are gradients of ``torch.autograd.grad``, or results of calls of several graphs.
        """
        made = torch_compat.storages_alive(results)
        with self._lock:
            self._outputs = [entry for entry in self._outputs if entry[1]]
            keys = {alive.key for _, alive in self._outputs}
            self._outputs += [(-1, alive) for alive in made if alive.key not in keys]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.waiting())

    def waiting(self) -> list[Step]:
        """Return the steps whose backward has not run, the earliest first."""
        if not self._steps:
            return []
        with self._lock:
            steps = [step for ref in self._steps if (step := ref()) is not None and step.waits]
            if len(steps) < len(self._steps):
                self._steps = [weakref.ref(step) for step in steps]
        return steps

    def now(self) -> tuple[list[Step], int]:
        """Return the steps whose backward has not run, and the bytes of held outputs of others."""
        waiting = self.waiting()
        return waiting, self.kept_bytes(waiting)

    def has_others(self, step: Step) -> bool:
        """Return whether the backward of any step other than ``step`` has not run."""
        return len(self._steps) > 1 and any(other is not step for other in self.waiting())

    def kept_bytes(self, waiting: Iterable[Step]) -> int:
        """Return the bytes of outputs that are still held, of steps that are not ``waiting``.

        One scalar is left out; see :meth:`kept`.
        """
        if not self._outputs:
            return 0
        return sum([alive.nbytes for alive in self.kept(waiting)])

    def kept(self, waiting: Iterable[Step]) -> list[torch_compat.StorageAlive]:
        """Return the outputs that are still held, of steps that are not ``waiting``.

        One scalar of the latest step is left out: a variable of the loop holds the last loss until
        it is assigned the next one, and every plan has room for that.
        """
        with self._lock:
            self._outputs = [entry for entry in self._outputs if entry[1]]
            if not self._outputs:
                return []
            excluded = {step.number for step in waiting}
            outputs = [entry for entry in self._outputs if entry[0] not in excluded]
        for place, (number, alive) in enumerate(outputs):
            if number == self.latest and alive.nbytes <= SCALAR_BYTES:
                del outputs[place]
                break
        return [alive for _, alive in outputs]
