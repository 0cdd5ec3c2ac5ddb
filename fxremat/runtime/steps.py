"""Steps in flight: forwards whose backward has not run.

Autograd is given one small tensor for all that a forward saves, the step's *token*; what was saved
hangs on it. So it goes when autograd drops the token, with the graph or after the backward.
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
"""Of a number, as a loss is."""

_numbers = itertools.count()

_by_number: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()
"""Steps whose token autograd may give back as another tensor, as ``save_on_cpu`` does."""

_NO_NUMBER = torch.full((1,), -1, device="cpu")
"""What tokens hold that autograd gives back as they are: none of them needs memory of its own."""


_latest = threading.local()


def latest_step() -> Step | None:
    """The step whose forward this thread has run last, if it is still there.

    Whoever asks holds it from then on, where its token does not.
    """
    found = getattr(_latest, "step", None)
    step = None if found is None else found()
    _latest.step = _latest.held = None
    return step


class Step:
    """A forward that runs, and what it leaves for its backward.

    Args:
        plan: that it follows.
        backward: its emitted backward.
        owners: what runs its backward works for: the loop, the regions and the graph.
        context: in which the forward runs.
        leaves: by primal, whose gradients it computes.
        passed: what the backward returns as it is, by place among the gradients.
        count: of what it takes, where that is counted.
        missing: primals whose gradient is planned for as if it were there, and is not.
        kept: outputs of earlier steps that somebody holds when the forward begins.

    Attributes:
        plan, backward, owners, context, leaves, passed, count, missing, kept: as given.
        elsewhere: hooks may put another tensor in the place of its token.
        part: what it is a part of, where a step runs several graphs, and its place there.
        number: larger for later ones; -1 until the forward has ended.
        outputs: storages that the forward has made for its caller, which may hold them for long.
        held_bytes: device memory of what it has saved and returned, beside what others hold.
    """

    __slots__ = (
        "__weakref__", "_saved", "_versions", "backward", "context", "count", "elsewhere",
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
        self.elsewhere = False
        self.part: tuple[Any, int] | None = None
        self._saved: list[Tensor] | None = None
        self._versions: list[int] = []

    def keep(self, saved: list[Tensor], outputs: Iterable[object], *, held_bytes: int) -> None:
        """The forward has ended.

        Args:
            saved: what the backward graph takes first.
            outputs: what the forward returns.
            held_bytes: device memory of all that, beside what others hold.
        """
        self._saved, self._versions = saved, torch_compat.versions_of(saved)
        self.outputs = [torch_compat.StorageAlive(t) for t in outputs if isinstance(t, Tensor)]
        self.held_bytes = held_bytes
        self.number = next(_numbers)
        self.elsewhere = torch_compat.saved_elsewhere()
        if self.elsewhere:
            _by_number[self.number] = self
        _latest.step = weakref.ref(self)
        _latest.held = self if self.elsewhere else None

    def token(self) -> Tensor:
        """What autograd saves for this step: on the CPU, its number where hooks may copy it."""
        if self.elsewhere:
            token = torch.full((1,), self.number, device="cpu")
            token.__getstate__ = _nothing  # type: ignore[method-assign]
        else:
            token = _NO_NUMBER.data
        token.step = self  # type: ignore[attr-defined]
        return token

    def __deepcopy__(self, _memo: object) -> Step:
        """Copies of a token are of the same step."""
        return self

    @property
    def waits(self) -> bool:
        """Whether its backward has not run, or may run again."""
        return self._saved is not None

    @property
    def graph(self) -> Any:
        """The captured graph whose step it is."""
        return self.owners[-1]

    @staticmethod
    def of(token: Tensor) -> Step:
        """The step of a token, or of what autograd gives back in its place.

        Raises:
            BackwardError: it is gone.
        """
        step: Step | None = getattr(token, "step", None) or _by_number.get(int(token))
        if step is None:
            raise BackwardError(
                "what the forward of a compiled step had saved is gone: hooks on saved tensors "
                "gave back a copy of another step's. Leave the compiled model out of them"
            )
        return step

    def take(self) -> list[Tensor]:
        """What was saved, in a list of the caller's own; nothing is left unless the graph stays.

        Raises:
            BackwardError: it was taken already, or something of it was written to since.
        """
        saved = self._saved
        if saved is None:
            raise BackwardError(
                "the backward of a compiled step runs a second time, and what its forward had "
                "saved is gone: call backward(retain_graph=True) the first time"
            )
        versions = torch_compat.versions_of(saved)
        if versions != self._versions:
            each = zip(saved, self._versions, versions, strict=True)
            tensor, version, now = next(one for one in each if one[1] != one[2])
            raise BackwardError(
                "one of the variables needed for gradient computation has been modified by "
                f"an inplace operation: a tensor of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype} that the backward of a compiled step reads is at version "
                f"{now}, its forward left it at {version}. Write to it after the backward"
            )
        if torch_compat.keeps_graph():
            return list(saved)
        self._saved = None
        self.held_bytes = 0
        return saved


def _nothing() -> None:
    """What is written of a token beside its number, where hooks write saved tensors to a file."""


class InFlight:
    """The steps of a model whose backward has not run, and outputs of others that are held.

    Attributes:
        latest: the number of the one that began last.
    """

    def __init__(self) -> None:
        self.latest = -1
        self._steps: list[weakref.ref[Step]] = []
        self._outputs: list[tuple[int, torch_compat.StorageAlive]] = []
        self._lock = threading.Lock()

    def add(self, step: Step) -> None:
        """A forward has run."""
        with self._lock:
            self.latest = step.number
            self._steps.append(weakref.ref(step))
            for output in step.outputs:
                self._outputs.append((step.number, output))

    def returned(self, results: Iterable[object]) -> None:
        """Gradients that somebody asked for, or outputs that no step has made, and may hold."""
        made = [torch_compat.StorageAlive(t) for t in results if isinstance(t, Tensor)]
        with self._lock:
            self._outputs = [own for own in self._outputs if own[1]]  # nobody else may ask
            known = {alive.key for _, alive in self._outputs}
            self._outputs += [(-1, alive) for alive in made if alive.key not in known]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.waiting())

    def waiting(self) -> list[Step]:
        """The steps, the one that began first at the front."""
        if not self._steps:
            return []
        with self._lock:
            found = [own for step in self._steps if (own := step()) is not None and own.waits]
            if len(found) < len(self._steps):
                self._steps = [weakref.ref(step) for step in found]
        return found

    def now(self) -> tuple[list[Step], int]:
        """The steps that wait, and the bytes of outputs of others that somebody holds."""
        waiting = self.waiting()
        return waiting, self.kept_bytes(waiting)

    def has_others(self, step: Step) -> bool:
        """Whether a step beside this one waits for its backward."""
        return len(self._steps) > 1 and any(other is not step for other in self.waiting())

    def kept_bytes(self, waiting: Iterable[Step]) -> int:
        """Of outputs that somebody holds, of steps that are not ``waiting``."""
        if not self._outputs:
            return 0
        return sum([alive.nbytes for alive in self.kept(waiting)])

    def kept(self, waiting: Iterable[Step]) -> list[torch_compat.StorageAlive]:
        """Outputs that somebody holds, of steps that are not ``waiting``.

        One number of the latest step is left out: a loop's variable holds its last loss until it
        has the next, and every plan has room for that.
        """
        with self._lock:
            self._outputs = [own for own in self._outputs if own[1]]
            if not self._outputs:
                return []
            counted = {step.number for step in waiting}
            found = [(n, alive) for n, alive in self._outputs if n not in counted]
        for place, (number, alive) in enumerate(found):
            if number == self.latest and alive.nbytes <= SCALAR_BYTES:
                del found[place]
                break
        return [alive for _, alive in found]
