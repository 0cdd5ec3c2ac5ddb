"""Several operations of a step that run as one, because sizes between them depend on data."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from fxremat import torch_compat
from fxremat.runtime.operation import Operation, SharedOperations
from fxremat.runtime.rng import redraw


class Composite(Operation):
    """Operations of a captured graph that run as one.

    Sizes of values inside may depend on data; results have sizes that do not. What other composites
    read of the values inside is in bundles (:class:`fxremat.torch_compat.Bundle`), which are the
    last results. Equal composites are one object while it exists, see :data:`COMPOSITES`.

    Args:
        label: what it computes, for people.
        digest: a digest of the operations inside, equal in all processes.
        run: runs the operations; it takes its arguments in one list, which it empties, and returns
            the results in order.
        draws: the operators inside that advance a random generator, in order.

    Attributes:
        label, digest, draws: as given.
        draws_random_numbers: whether there are any of these.
        again: repeats a call that drew random numbers.

    A call takes what the operations read from outside, and returns the results, or the only one.
    """

    def __init__(
        self,
        label: str,
        digest: str,
        run: torch_compat.BoxedCallable,
        *,
        draws: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(label, digest, "composites")
        self.label = label
        self.draws, self.draws_random_numbers = draws, bool(draws)
        self.again = Redrawing(self)
        self._run = run
        COMPOSITES.add(self)

    def __call__(self, *given: Any) -> Any:
        """Run the operations, and return their results, or the only one."""
        arguments = list(given)
        del given
        results = self._run(arguments)
        return results[0] if len(results) == 1 else results


class Redrawing:
    """Repeats calls of a composite with the random numbers that they drew; see :func:`redraw`."""

    def __init__(self, composite: Composite) -> None:
        self.__name__ = self.__qualname__ = f"{composite.__name__}_again"
        self.__module__ = composite.__module__
        self._composite = weakref.ref(composite)

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, state: torch.Tensor, device: str, *given: Any) -> Any:
        """Return the results of the composite, drawn again from ``state`` of a generator."""
        composite = self._composite()
        assert composite is not None  # the graph that has both keeps it
        return redraw(state, device, composite, *given)


COMPOSITES = SharedOperations()
"""The composites of this process."""


def value_of(bundle: torch_compat.Bundle, place: int) -> Any:
    """Return the value at ``place`` in a bundle."""
    return bundle.contents[place]


def bundled(device: str, *values: Any) -> torch_compat.Bundle:
    """Return a bundle of ``values`` that counts on ``device``."""
    made = torch_compat.bundle_of(values, torch.device(device))
    BUNDLED.add(sum(torch_compat.storages_of(made).values()))
    return made


class BundledBytes(threading.local):
    """Counts the bytes of bundles that each thread makes, which depend on data.

    A forward, or a backward, runs in one thread from its begin to its end.

    Attributes:
        total_bytes: bytes of all bundles since the last :meth:`begin`.
        largest_bytes: bytes of the largest of them.
    """

    def __init__(self) -> None:
        self.total_bytes = self.largest_bytes = 0

    def begin(self) -> None:
        """Count from 0 again."""
        self.total_bytes = self.largest_bytes = 0

    def add(self, nbytes: int) -> None:
        """Count a bundle of ``nbytes``."""
        self.total_bytes += nbytes
        self.largest_bytes = max(self.largest_bytes, nbytes)


BUNDLED = BundledBytes()
"""The bundles of the forward, or backward, that this thread runs."""
