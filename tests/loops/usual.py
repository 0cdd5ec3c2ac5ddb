"""Loops of one model in one process.

Each reads like a script: what a name held in one iteration it holds until it is bound anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.utils._pytree import tree_leaves

from tests.loops.job import Job, also, loop
from tests.loops.memory import storage_bytes


@loop()
def plain(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(job.model))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


also("told_of_loss", plain, tells=frozenset({"optimizer", "loss"}))
also("told_nothing", plain, tells=frozenset(), optimizer=lambda found: SGD(found, 1e-3))
also("foreach", plain, optimizer=lambda found: AdamW(found, foreach=True))
also("backend", plain, backend=True)


@loop()
def tutorial(job: Job) -> Iterator[None]:
    for batch in job.batches():
        outputs = batch.through(job.model)
        loss = job.loss(outputs)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def same_batch(job: Job) -> Iterator[None]:
    batch = next(job.batches())
    while True:
        loss = job.loss(batch.through(job.model))
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.show(loss)
        yield


@loop()
def zero_in_place(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad(set_to_none=False)
        loss = job.loss(batch.through(job.model))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def accumulate(job: Job) -> Iterator[None]:
    batches = job.batches()
    while True:
        job.optimizer.zero_grad()
        for _ in range(3):
            loss = job.loss(next(batches).through(job.model)) / 3
            loss.backward()
            job.show(loss)
        job.optimizer.step()
        yield


@loop()
def two_forwards(job: Job) -> Iterator[None]:
    batches = job.batches()
    while True:
        job.optimizer.zero_grad()
        real = job.loss(next(batches).through(job.model))
        fake = job.loss(next(batches).through(job.model))
        (real - 0.5 * fake).backward()
        job.optimizer.step()
        job.show(real, fake)
        yield


@loop()
def siamese(job: Job) -> Iterator[None]:
    batches = job.batches()
    while True:
        job.optimizer.zero_grad()
        left = _largest(next(batches).through(job.model))
        right = _largest(next(batches).through(job.model))
        loss = (left - right).square().mean()
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop(floats=True)
def gan(job: Job) -> Iterator[None]:
    scale = nn.Parameter(torch.ones(()))
    maker = SGD([scale], 1e-3)
    batches = job.batches()
    while True:
        (noise,) = next(batches).args
        fake = scale * noise
        job.optimizer.zero_grad()
        loss = job.loss(next(batches).through(job.model)) - job.loss(job.model(fake.detach()))
        loss.backward()
        job.optimizer.step()
        maker.zero_grad()
        job.module.requires_grad_(False)
        judged = job.loss(job.model(fake))
        judged.backward()
        job.module.requires_grad_(True)
        maker.step()
        job.show(loss, judged, scale)
        yield


@loop(floats=True)
def adversarial(job: Job) -> Iterator[None]:
    for batch in job.batches():
        (inputs,) = batch.args
        inputs.requires_grad_()
        job.optimizer.zero_grad()
        (direction,) = torch.autograd.grad(job.loss(job.model(inputs)), [inputs])
        loss = job.loss(job.model((inputs + 0.01 * direction.sign()).detach()))
        loss.backward()
        job.optimizer.step()
        job.show(direction, loss)
        yield


def _two_backwards(job: Job, *, first_last: bool) -> Iterator[None]:
    batches = job.batches()
    while True:
        job.optimizer.zero_grad()
        first = job.loss(next(batches).through(job.model))
        second = job.loss(next(batches).through(job.model))
        for loss in (second, first) if first_last else (first, second):
            loss.backward()
            job.show(loss)
        job.optimizer.step()
        yield


@loop()
def two_backwards(job: Job) -> Iterator[None]:
    yield from _two_backwards(job, first_last=False)


@loop()
def two_backwards_turned(job: Job) -> Iterator[None]:
    yield from _two_backwards(job, first_last=True)


@loop(context=lambda: torch.autocast("cpu", torch.bfloat16))
def amp(job: Job) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu")
    for batch in job.batches():
        job.optimizer.zero_grad()
        loss = _cross_entropy(batch.through(job.model))
        with torch.autocast("cpu", enabled=False):
            scaler.scale(loss).backward()
            scaler.unscale_(job.optimizer)
            torch.nn.utils.clip_grad_norm_(job.trained(), 1.0)
            scaler.step(job.optimizer)
            scaler.update()
        job.show(loss)
        yield


def _largest(outputs: object) -> Tensor:
    """The largest output with a gradient."""
    leaves = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    return max(leaves, key=Tensor.numel)


def _cross_entropy(outputs: object) -> Tensor:
    logits = _largest(outputs)
    classes = torch.arange(logits.numel() // logits.shape[-1]) % logits.shape[-1]
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), classes)


@loop(begins=2)  # only then is there a step beside one that is retained
def retain_later(job: Job) -> Iterator[None]:
    for number, batch in enumerate(job.batches()):
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(job.model))
        loss.backward(retain_graph=number > 0)
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def backward_twice(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(job.model))
        loss.backward(retain_graph=True)
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def dropped_forward(job: Job) -> Iterator[None]:
    batches = job.batches()
    while True:
        job.show(job.loss(next(batches).through(job.model)))
        loss = job.loss(next(batches).through(job.model))
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def kept_forward(job: Job) -> Iterator[None]:
    batches = job.batches()
    while True:
        logged = job.loss(next(batches).through(job.model))
        loss = job.loss(next(batches).through(job.model))
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.show(logged, loss)
        yield


@loop()
def failing(job: Job) -> Iterator[None]:
    batches = job.batches()
    while True:
        for number in range(2):
            try:
                loss = job.loss(next(batches).through(job.model))
                if number == 0:
                    raise ArithmeticError
                job.optimizer.zero_grad()
                loss.backward()
                job.optimizer.step()
            except ArithmeticError:
                continue
            job.show(loss)
        yield


@loop()
def autograd_grad(job: Job) -> Iterator[None]:
    for batch in job.batches():
        loss = job.loss(batch.through(job.model))
        gradients = torch.autograd.grad(loss, job.trained())
        for parameter, gradient in zip(job.trained(), gradients, strict=True):
            parameter.grad = gradient
        del gradients, gradient
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.show(loss)
        yield


@loop()
def backward_inputs(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(job.model))
        loss.backward(inputs=job.trained()[::2])
        job.optimizer.step()
        job.show(loss)
        yield


@loop()
def tensor_hooks(job: Job) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:
        for parameter in job.trained():
            hooks.callback(parameter.register_hook(lambda gradient: 0.5 * gradient).remove)
        yield from plain(job)


@loop()
def late_hooks(job: Job) -> Iterator[None]:
    seen: dict[Tensor, list[Tensor]] = {}

    def watch(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.setdefault(parameter, []).append(parameter.grad.sum())

    with contextlib.ExitStack() as hooks:
        watched = job.trained()[::3]
        for parameter in watched:
            hooks.callback(parameter.register_post_accumulate_grad_hook(watch).remove)
        for _ in plain(job):
            for parameter in watched:  # in which order the hooks run is nobody's promise
                job.show(*seen.pop(parameter))
            yield


@loop()
def optimizer_in_backward(job: Job) -> Iterator[None]:
    optimizers = {p: AdamW([p], lr=1e-3) for p in job.trained()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    with contextlib.ExitStack() as hooks:
        for parameter in job.trained():
            hooks.callback(parameter.register_post_accumulate_grad_hook(step).remove)
        for batch in job.batches():
            loss = job.loss(batch.through(job.model))
            loss.backward()
            job.show(loss)
            yield


@loop()
def thawed(job: Job) -> Iterator[None]:
    frozen = job.trained()[: len(job.trained()) // 2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    rounds = plain(job)
    yield next(rounds)
    for parameter in frozen:
        parameter.requires_grad_(True)
    yield from rounds


@loop()
def clipped(job: Job) -> Iterator[None]:
    for batch in job.batches():
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(job.model))
        loss.backward()
        job.show(loss, torch.nn.utils.clip_grad_norm_(job.trained(), 0.1))
        job.optimizer.step()
        yield


@loop()
def held_output(job: Job) -> Iterator[None]:
    outputs = None
    for batch in job.batches():
        job.optimizer.zero_grad()
        before, outputs = outputs, batch.through(job.model)
        loss = job.loss(outputs)
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        if before is not None:
            job.show(_largest(before))
        yield


@loop()
def evaluation(job: Job) -> Iterator[None]:
    batches = job.batches()
    for _ in plain(job):
        job.module.eval()
        with torch.no_grad():
            job.show(job.loss(next(batches).through(job.model)))
        job.module.train()
        yield


@loop()
def halved_batches(job: Job) -> Iterator[None]:
    for batch in job.batches(halved=lambda number: number % 2 == 1):
        job.optimizer.zero_grad()
        loss = job.loss(batch.through(job.model))
        loss.backward()
        job.optimizer.step()
        job.show(loss)
        yield


def _lbfgs(parameters: list[nn.Parameter]) -> LBFGS:
    return LBFGS(parameters, lr=1e-3, max_iter=2, history_size=2)


@loop(
    optimizer=_lbfgs,
    tells=frozenset(),
    reserve_bytes=lambda model: 9 * storage_bytes(model.parameters()),
)
def closure(job: Job) -> Iterator[None]:
    for batch in job.batches():

        def evaluate() -> Tensor:
            job.optimizer.zero_grad()
            loss = job.loss(batch.through(job.model))  # noqa: B023 - called before the next batch
            loss.backward()
            job.show(loss)
            return loss

        job.optimizer.step(evaluate)
        yield
