"""Transfers on the CPU: a thread that copies to host memory and back, one transfer at a time."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from queue import Empty, SimpleQueue

import numpy as np
import torch
from torch import Tensor

from fxremat.errors import TransferError
from fxremat.runtime import watch
from fxremat.runtime.lease import Lease
from fxremat.runtime.memory import Block, Bytes
from fxremat.units import format_bytes

_POLL_S = 1.0
"""How often a waiting thread checks by itself: an interrupt may have lost the signal."""

_LAST_COPY_S = 10.0
"""How long the interpreter's exit waits for a copy that is under way."""


class Transfer:
    """A copy of one array into another of the same size, which the worker makes."""

    def __init__(
        self, kind: watch.Kind, source: Bytes, target: Bytes, *, lease: WorkerLease
    ) -> None:
        self.kind: watch.Kind = kind
        self.nbytes = source.nbytes
        self._ends: tuple[Bytes, Bytes] | None = (source, target)
        self._lease: WorkerLease | None = lease
        # A queue and a flag, because an interrupt inside an Event would leave it locked, and the
        # worker would wait forever.
        self._ended = False
        self._end_signals: SimpleQueue[None] = SimpleQueue()
        self._times: tuple[float, float] | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the copy, unless an earlier transfer of the step failed. Called by the worker."""
        assert self._lease is not None
        if self._lease.failure is not None:
            self.fail(self._lease.failure)
            return
        begin_s = time.perf_counter()
        try:
            watch.perform(self._copy)
        except BaseException as error:  # otherwise the thread would end
            self.fail(error)
        else:
            self._times = (begin_s, time.perf_counter())
            self._finish()

    def fail(self, error: BaseException) -> None:
        """Mark this transfer and all later ones of its step as failed because of ``error``."""
        # The frames of the traceback hold the arrays and the lease.
        self._error = error.with_traceback(None)
        if self._lease is not None and self._lease.failure is None:
            self._lease.failure = self._error
        self._finish()

    def wait(self) -> None:
        """Wait until the copy has been made.

        Raises:
            TransferError: it was not made, and will not be.
        """
        self._wait_until_ended()
        if self._error is not None:
            raise failed(self.kind, self.nbytes, self._error) from self._error

    def record(self) -> watch.TransferRecord | None:
        """Wait for the copy, and return its times; ``None`` if it failed."""
        self._wait_until_ended()
        if self._times is None:
            return None
        return watch.TransferRecord(self.kind, self.nbytes, *self._times)

    def _wait_until_ended(self) -> None:
        while not self._ended:
            with contextlib.suppress(Empty):
                self._end_signals.get(timeout=_POLL_S)
                self._end_signals.put(None)  # for other waiting threads

    def _copy(self) -> None:
        assert self._ends is not None
        source, target = self._ends
        # One memcpy that releases the GIL; copying tensors would start another pool of threads
        # in addition to that of the computations.
        np.copyto(target, source)

    def _finish(self) -> None:
        # Before the signal: the waiting thread may drop the tensor next, which must then free
        # its memory.
        self._ends = None
        self._lease = None
        self._ended = True
        self._end_signals.put(None)


class Worker:
    """A daemon thread that makes the copies of the process in the order of submission.

    There is one per process, not per arena. Copies share the memory bus of the machine, so the cost
    model assumes that they run one at a time. It also makes slots safe to reuse: a copy into a slot
    comes after the copy that reads it, even if they belong to different steps.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fxremat-transfers", daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Queue ``transfer``, to be made after all that were submitted earlier."""
        if watch.recording():
            watch.started(transfer)
        if self._stopped:
            transfer.fail(RuntimeError(_EXITING))
        else:
            self._queue.put(transfer)

    def stop(self) -> None:
        """Wait for the copy that is under way, and end the thread."""
        self._stopped = True
        self._queue.put(None)
        self._thread.join(_LAST_COPY_S)

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Wait for the next transfer and make it; return ``False`` if the thread is to end.

        On return no reference to the transfer is left.
        """
        transfer = self._queue.get()
        if transfer is None:
            return False
        if self._stopped:
            transfer.fail(RuntimeError(_EXITING))
        else:
            transfer.run()
        return True


_EXITING = "the interpreter exits"
_current: list[Worker] = []
_starting = threading.Lock()


def current_worker() -> Worker:
    """Return the worker of the process, which is started on first use."""
    with _starting:
        if not _current:
            _current.append(Worker())
        return _current[0]


def _forget() -> None:
    """Forget, in a forked child, the parent's thread, and the lock that another thread may hold."""
    global _starting  # noqa: PLW0603
    _starting = threading.Lock()
    _current.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _stop() -> None:
    # A copy that runs while the interpreter frees its memory would crash.
    for worker in _current:
        worker.stop()


def failed(kind: str, nbytes: int, error: BaseException) -> TransferError:
    """Return the error to raise in a step if one of its transfers failed because of ``error``."""
    return TransferError(
        f"the {kind} of {format_bytes(nbytes)} was not made: {type(error).__name__}: {error}. "
        "The step cannot go on; its results must not be used. Repeat it",
        code="FXR722",
    )


def _copy_now(kind: watch.Kind, source: Bytes, target: Bytes) -> None:
    """Copy ``source`` to ``target`` in this thread.

    Raises:
        TransferError: the copy failed.
    """
    try:
        watch.perform(lambda: np.copyto(target, source))
    except Exception as error:
        raise failed(kind, source.nbytes, error) from error


class WorkerLease(Lease):
    """Transfers by the worker's thread, for which the computing thread waits.

    ``failure`` says why a transfer of the step failed; all later ones then fail, too.
    """

    def __init__(self, block: Block, *, nbytes: int, device: torch.device) -> None:
        super().__init__(block, nbytes=nbytes, device=device)
        self.failure: BaseException | None = None
        self._worker = current_worker()

    def recover(self) -> None:
        """Forget an earlier failure; each transfer still reports its failure."""
        self.failure = None

    def fill(self, fresh: Tensor, *, offset: int) -> None:
        """Copy from byte ``offset`` to ``fresh`` in this thread.

        Raises:
            TransferError: the copy failed.
        """
        self.check_process()
        _copy_now("prefetch", self._part(offset, fresh.numel()), fresh.numpy())

    def take(self, source: Tensor, *, offset: int) -> None:
        """Copy ``source`` to byte ``offset`` in this thread.

        Raises:
            TransferError: the copy failed.
        """
        self.check_process()
        _copy_now("offload", source.numpy(), self._part(offset, source.numel()))

    def _offload(self, source: Tensor, offset: int) -> Transfer:
        return self._submit("offload", source.numpy(), self._part(offset, source.numel()))

    def _release(self, copy: Transfer) -> None:
        copy.wait()
        self._raise_failure("release", copy.nbytes)

    def _prefetch(self, fresh: Tensor, offset: int) -> Transfer:
        return self._submit("prefetch", self._part(offset, fresh.numel()), fresh.numpy())

    def wait_for(self, copy: Transfer) -> None:
        """Let this thread wait for ``copy``."""
        copy.wait()
        self._raise_failure("prefetch", copy.nbytes)

    def abandon(self, copy: Transfer) -> None:
        """Do nothing: the worker keeps the target of the copy alive until it is done."""

    def _submit(self, kind: watch.Kind, source: Bytes, target: Bytes) -> Transfer:
        self._raise_failure(kind, source.nbytes)
        transfer = Transfer(kind, source, target, lease=self)
        self._worker.submit(transfer)
        return transfer

    def _raise_failure(self, kind: str, nbytes: int) -> None:
        if self.failure is not None:
            raise failed(kind, nbytes, self.failure) from self.failure

    def _part(self, offset: int, nbytes: int) -> Bytes:
        assert self.block.bytes is not None
        return self.block.bytes[offset : offset + nbytes]
