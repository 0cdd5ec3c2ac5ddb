"""User-written Triton kernels as operations that modify none of their arguments."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.runtime.operation import Operation

Made = tuple[Sequence[int], Sequence[int], torch.dtype, Any]
"""A tensor that a launch allocates before it writes to it: shape, strides, dtype, and the value of
all elements, or ``None`` if they are not initialized. Its device is that of the other arguments."""


class Launch(Operation):
    """Launches a kernel that writes to copies of its arguments, and returns these copies.

    Equal launches are one object, see :func:`launch_of`.

    Args:
        kernel: name of the user's function.
        digest: a digest of the kernel and all other arguments, equal in all processes.
        run: launches the kernel, which writes to the tensors that it is given.
        names: names of the arguments that are in a graph.
        written: names of the tensors that the kernel writes to.
        tuned: whether the first launch tries several configurations.
        repeatable: whether a second launch computes the same bits as the first.
        made: names of tensors that the launch allocates, for which a caller passes a description.

    A call takes the grid, how descriptors are made, and the arguments in the order of ``names``,
    with a ``Made`` in place of each allocated tensor. It returns the tensors of ``written``, or the
    only one.
    """

    def __init__(
        self,
        kernel: str,
        digest: str,
        run: torch_compat.KernelLauncher,
        names: Sequence[str],
        *,
        written: Sequence[str],
        tuned: bool,
        repeatable: bool,
        made: Sequence[str] = (),
    ) -> None:
        super().__init__(kernel, digest, "user_kernels")
        self.kernel, self.names = kernel, tuple(names)
        self.written, self.made = tuple(written), tuple(made)
        self.tuned, self.repeatable = tuned, repeatable
        self._run = run
        self._tuned_for = set[tuple[object, ...]]()
        with _lock:
            _LAUNCHES.setdefault(digest, self)

    def making(self, names: Sequence[str]) -> Launch:
        """Return the launch of this kernel that itself allocates the arguments with these names."""
        text = f"{self.digest} makes {sorted(names)}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        return launch_of(digest) or Launch(
            self.kernel,
            digest,
            self._run,
            self.names,
            written=self.written,
            tuned=self.tuned,
            repeatable=self.repeatable,
            made=names,
        )

    def __call__(self, grid: Sequence[Any], descriptors: Mapping[str, Any], *given: Any) -> Any:
        """Launch the kernel, and return the tensors of ``written``, or the only one."""
        arguments = dict(zip(self.names, given, strict=True))
        for name in self.names:
            if name in self.made:
                arguments[name] = _allocate(arguments[name], near=given)
            elif name in self.written:
                arguments[name] = torch_compat.clone_with_strides(arguments[name])
            else:
                arguments[name] = _plain(arguments[name])
        self._run(_plain(grid), _plain(descriptors), arguments)
        results = [arguments[name] for name in self.written]
        return results[0] if len(results) == 1 else results

    def tune(self, grid: Sequence[Any], descriptors: Mapping[str, Any], *given: Any) -> None:
        """Let Triton choose a configuration for these arguments, by many launches.

        This takes device memory for a while, and modifies none of the arguments.
        """
        self(grid, descriptors, *given)
        self._tuned_for.add(tuple(map(_tuning_key, given)))

    def is_tuned_for(self, _grid: object, _descriptors: object, *given: Any) -> bool:
        """Return whether a configuration was chosen for these arguments, or none has to be.

        The arguments may have no data.
        """
        chosen = self._run.has_choices and tuple(map(_tuning_key, given)) in self._tuned_for
        return chosen or not self.tuned


def _allocate(description: Made, *, near: Sequence[Any]) -> Tensor:
    """Return a new tensor as described, on the device of the tensors among ``near``."""
    shape, stride, dtype, fill = description
    device = next(other.device for other in near if isinstance(other, Tensor))
    made = torch.empty_strided(_plain(shape), _plain(stride), dtype=dtype, device=device)
    return made if fill is None else made.fill_(fill)


def _plain(value: Any) -> Any:
    """Return ``value`` with symbolic numbers replaced by their present values.

    Triton looks at the types of arguments.
    """
    if isinstance(value, (tuple, list)):
        items = map(_plain, value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, int) and type(value) not in (int, bool):
        return int(value)
    if isinstance(value, float) and type(value) is not float:
        return float(value)
    return value


def _tuning_key(value: Any) -> object:
    """Return what the choice of a configuration may depend on: a layout, or a value as text."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), tuple(value.stride())
    return str(_plain(value))


_LAUNCHES: dict[str, Launch] = {}
_lock = threading.Lock()


def launch_of(digest: str) -> Launch | None:
    """Return the launch in this process that has this digest, or ``None``."""
    return _LAUNCHES.get(digest)
