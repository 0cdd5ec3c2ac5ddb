"""Leases: the host memory of one step, with the transfers to it and from it."""

from __future__ import annotations

import abc
import os
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxremat.errors import FAULT, TransferError
from fxremat.runtime.memory import Block
from fxremat.units import format_bytes


class Lease(abc.ABC):
    """Host memory that belongs to one step, and the transfers to it and from it.

    It must not hold the tensor that was handed out for it: the lease ends when that tensor's
    storage dies.

    Attributes:
        block: the memory.
        nbytes: how many bytes of it the step uses.
        device: the device of the transfers.
    """

    def __init__(self, block: Block, *, nbytes: int, device: torch.device) -> None:
        self.block = block
        self.nbytes = nbytes
        self.device = device
        self._filled: dict[int, tuple[int, Any]] = {}
        self._process = os.getpid()

    def offload(self, x: Tensor, *, offset: int) -> None:
        """Start to copy the whole storage of ``x`` to the host memory from byte ``offset`` on.

        Raises:
            TransferError: the storage does not fit there or is on another device, or an earlier
                transfer of the step failed.
        """
        nbytes = x.untyped_storage().nbytes()
        self.check_process()
        self._check_request(nbytes, offset=offset, device=x.device, verb="offload")
        copy = self._offload(whole_storage(x), offset) if nbytes else None
        self._filled[offset] = nbytes, copy

    def release(self, *, offset: int) -> None:
        """Wait until the tensor that was offloaded to ``offset`` may be freed on the device.

        On CUDA the current stream waits, on the CPU the thread.

        Raises:
            TransferError: nothing was offloaded there, or a transfer of the step failed.
        """
        self.check_process()
        nbytes, copy = self._filled_at(offset, verb="release")
        if nbytes:
            self._release(copy)

    def prefetch(self, *, offset: int, nbytes: int, device: torch.device) -> Tensor:
        """Start to copy what was offloaded to ``offset`` to a new uint8 tensor, and return this.

        The tensor has ``nbytes``, at least as many as were offloaded: plans count the bytes that
        allocators hand out, which are more. The rest is not filled.

        Raises:
            TransferError: more was offloaded there, the device is wrong, or a transfer of the step
                failed.
        """
        self.check_process()
        self._check_request(nbytes, offset=offset, device=device, verb="prefetch")
        filled, _copy = self._filled_at(offset, verb="prefetch")
        if nbytes < filled:
            raise TransferError(
                f"cannot prefetch {nbytes} bytes from offset {offset} of the host memory: "
                f"{filled} were offloaded there. The graph does not fit its plan",
                code=FAULT,
            )
        fresh = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if filled:
            Arrival(fresh, lease=self, copy=self._prefetch(fresh[:filled], offset))
        return fresh

    def fill(self, fresh: Tensor, *, offset: int) -> None:
        """Copy from byte ``offset`` to ``fresh``, uint8, which may be read when this returns.

        Raises:
            TransferError: the copy failed.
        """
        # An interrupt may come after the copy has started, so it is one that may be abandoned.
        self.start_filling(fresh, offset=offset)
        Arrival.wait(fresh)

    def start_filling(self, fresh: Tensor, *, offset: int) -> None:
        """Start to copy from byte ``offset`` to ``fresh``, uint8; see :class:`Arrival`.

        Raises:
            TransferError: the copy cannot be started.
        """
        self.check_process()
        self.recover()
        Arrival(fresh, lease=self, copy=self._prefetch(fresh, offset))

    def take(self, source: Tensor, *, offset: int) -> None:
        """Copy ``source``, uint8, to byte ``offset``; it may be freed when this returns.

        Raises:
            TransferError: the copy failed.
        """
        self.check_process()
        self._release(self._offload(source, offset))

    def recover(self) -> None:  # noqa: B027
        """Allow further transfers after one that failed, where the lease outlives a step."""

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a forked child of the one that runs the step."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """Raise an error in a forked child, which has no threads or streams of transfers.

        Raises:
            TransferError: this process is a forked child of the one that runs the step.
        """
        if self.elsewhere:
            raise TransferError(
                f"a step that began in process {self._process} cannot go on in its forked child "
                f"{os.getpid()}: its activations are in the parent's host memory. Run forward and "
                "backward in the same process",
                code="FXR721",
            )

    def _check_request(self, nbytes: int, *, offset: int, device: torch.device, verb: str) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise TransferError(
                f"cannot {verb} {nbytes} bytes at offset {offset}: the step has "
                f"{self.nbytes} bytes of host memory. The graph does not fit its plan",
                code=FAULT,
            )
        if device.type != self.device.type or device.index not in (None, self.device.index):
            raise TransferError(
                f"cannot {verb} {format_bytes(nbytes)} with {device}: the host memory was "
                f"made for {self.device}. Compile the model on the device it runs on",
                code=FAULT,
            )

    def _filled_at(self, offset: int, *, verb: str) -> tuple[int, Any]:
        """Return the number of bytes that were offloaded to ``offset``, and their copy.

        ``verb`` says in an error what the caller does.
        """
        if offset not in self._filled:
            raise TransferError(
                f"cannot {verb} offset {offset} of the host memory: nothing was offloaded "
                "there in this step. The graph does not fit its plan",
                code=FAULT,
            )
        return self._filled[offset]

    @abc.abstractmethod
    def _offload(self, source: Tensor, offset: int) -> Any:
        """Start to copy ``source`` to byte ``offset``; return what :meth:`_release` takes."""

    @abc.abstractmethod
    def _release(self, copy: Any) -> None: ...

    @abc.abstractmethod
    def _prefetch(self, fresh: Tensor, offset: int) -> Any:
        """Start to fill ``fresh`` from byte ``offset``; return what :meth:`wait_for` takes."""

    @abc.abstractmethod
    def wait_for(self, copy: Any) -> None:
        """Make computations wait for ``copy``, a prefetch that :meth:`_prefetch` has started."""

    @abc.abstractmethod
    def abandon(self, copy: Any) -> None:
        """Let the next user of a prefetch's device memory wait for ``copy``, as nobody did."""


class Arrival:
    """A prefetch under way, for which no computation has waited yet.

    It outlives the host tensor, which emitted code drops after its last prefetch, but not the new
    storage: if the step is given up and that storage is dropped, the copy is abandoned.
    """

    _pending: ClassVar[dict[int, Arrival]] = {}
    """Prefetches by the address of their new storage."""

    def __init__(self, fresh: Tensor, *, lease: Lease, copy: Any) -> None:
        self._lease = lease
        self._copy = copy
        storage = fresh.untyped_storage()
        self._address = storage.data_ptr()
        # The storage's object in Python lives exactly as long as its memory.
        self._dropped = weakref.finalize(storage, self._abandon)
        self._dropped.atexit = False
        self._pending[self._address] = self

    @staticmethod
    def wait(x: Tensor) -> None:
        """Make computations wait until ``x`` has arrived; do nothing if no copy is under way."""
        arrival = Arrival._pending.get(x.untyped_storage().data_ptr())
        if arrival is not None:
            arrival._lease.check_process()
            arrival._lease.wait_for(arrival._copy)
            # Not reached if that failed: waiting again must fail again.
            arrival._dropped.detach()
            arrival._forget()

    def _abandon(self) -> None:
        self._forget()
        if not self._lease.elsewhere:
            self._lease.abandon(self._copy)

    def _forget(self) -> None:
        if self._pending.get(self._address) is self:
            del self._pending[self._address]


def whole_storage(x: Tensor) -> Tensor:
    """Return all bytes of the storage of ``x`` as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
