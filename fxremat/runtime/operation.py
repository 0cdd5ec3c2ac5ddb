"""What functions that passes put into graphs have in common."""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeVar

DIGITS = 12
"""How many digits of its digest are in the name of an operation."""


class Operation:
    """A function in a graph, with a name that is unique to what it computes.

    The name does not depend on the process. So costs, saved plans and stages that share code can
    identify the function by it.

    Args:
        label: what it computes, for people.
        digest: a digest of what it computes, equal in all processes.
        module: the name of a module for the code that torch generates, such as ``"sparse"``.
    """

    def __init__(self, label: str, digest: str, module: str) -> None:
        self.__name__ = self.__qualname__ = f"{label}_{digest[:DIGITS]}"
        self.__module__ = f"fxremat.{module}"
        self.digest = digest

    def __repr__(self) -> str:
        return self.__name__


Kind = TypeVar("Kind", bound=Operation)


class SharedOperations:
    """The operations of one kind in this process, by digest, for as long as a graph has them."""

    def __init__(self) -> None:
        self._operations: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, operation: Operation) -> None:
        """Add an operation, unless an equal one exists."""
        with self._lock:
            self._operations.setdefault(operation.digest, operation)

    def of(self, digest: str) -> Any:
        """Return the operation with this digest, or ``None``."""
        with self._lock:
            return self._operations.get(digest)
