"""Loops in which something is wrapped around the model, or stands beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.loops.job import Job, also, loop
from tests.loops.memory import storage_bytes
from tests.loops.usual import plain, tutorial


class TwoOutputs(nn.Module):
    """A model that returns something more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        outputs = self.inner(*args, **kwargs)
        floats = (x for x in tree_leaves(outputs) if isinstance(x, Tensor))
        return outputs, next(floats).tanh()


class Counting(nn.Module):
    """A model that counts its calls, and is told of a number that changes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.count = 0

    def forward(self, *args: Any, epoch: int = 0, **kwargs: Any) -> Any:
        self.count += 1
        return self.inner(*args, **kwargs)


@loop(wrap=TwoOutputs)
def unused_output(job: Job) -> Iterator[None]:
    for batch in job.batches():
        outputs, extra = batch.through(job.model)
        loss = job.loss(outputs)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.show(loss, extra)
        yield


@loop(wrap=Counting)
def counting(job: Job) -> Iterator[None]:
    for epoch, batch in enumerate(job.batches()):
        job.optimizer.zero_grad()
        loss = job.loss(job.model(*batch.args, epoch=epoch, **batch.kwargs))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def checkpointed(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad()
        outputs = checkpoint(job.model, *batch.args, use_reentrant=False, **batch.kwargs)
        loss = job.loss(outputs)
        del outputs
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def saved_on_cpu(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = job.loss(batch.through(job.model))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


def _copy_bytes(model: nn.Module) -> int:
    return storage_bytes([*model.parameters(), *model.buffers()])


@loop(reserve_bytes=_copy_bytes)
def ema(job: Job) -> Iterator[None]:
    average = copy.deepcopy(job.module)
    for _ in plain(job):
        with torch.no_grad():
            for mean, now in zip(average.parameters(), job.module.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        yield
        job.show(next(average.parameters()))


@loop(reserve_bytes=lambda model: _copy_bytes(model) + 8)
def swa(job: Job) -> Iterator[None]:
    average = AveragedModel(job.module)
    for _ in plain(job):
        average.update_parameters(job.module)
        yield
        job.show(next(average.parameters()))


@loop(assume="strict")  # what the other copy holds is not measured
def second_thread(job: Job) -> Iterator[None]:
    """Another copy has its forward between this one's forward and backward, then its backward."""
    other = copy.deepcopy(job.module)
    optimizer = AdamW(other.parameters(), lr=1e-3)

    def apart() -> Iterable[Tensor]:
        states = [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, Tensor)]
        gradients = [p.grad for p in other.parameters() if p.grad is not None]
        return [*other.parameters(), *other.buffers(), *gradients, *states]

    job.apart.append(apart)
    compiled = job.compile(other)
    batches = job.batches()
    losses: list[Tensor] = []

    def forward() -> None:
        optimizer.zero_grad()
        losses.append(job.loss(next(batches).through(compiled)))

    def backward() -> None:
        job.show(losses[-1])
        losses.pop().backward()
        optimizer.step()

    with ThreadPoolExecutor(1) as thread:
        for batch in job.batches():
            job.optimizer.zero_grad()
            loss = job.loss(batch.through(job.model))
            thread.submit(forward).result()
            loss.backward()
            thread.submit(backward).result()
            job.optimizer.step()
            job.show(loss)
            yield


def _parallel(job: Job, *, view: bool) -> Iterator[None]:
    model = DistributedDataParallel(job.model, gradient_as_bucket_view=view)
    for batch in job.batches():
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(model))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop(distributed=True)
def parallel(job: Job) -> Iterator[None]:
    yield from _parallel(job, view=False)


@loop(distributed=True)
def parallel_view(job: Job) -> Iterator[None]:
    yield from _parallel(job, view=True)


@loop(distributed=True)
def parallel_no_sync(job: Job) -> Iterator[None]:
    model = DistributedDataParallel(job.model)
    batches = job.batches()
    while True:
        job.optimizer.zero_grad()
        with model.no_sync():
            for _ in range(2):
                job.loss(next(batches).through(model)).backward()
        loss = job.loss(next(batches).through(model))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


_INSIDE = {"wrap": DistributedDataParallel, "distributed": True, "whole": False}

also("parallel_inside", tutorial, **_INSIDE)
also("parallel_inside_backend", tutorial, backend=True, **_INSIDE)
