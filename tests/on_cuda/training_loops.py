"""Ways to train a compiled model, on a device: in turn, at once, on two streams, cut short."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from tests.cuda import CUDA, Trained, copies
from tests.models import ZooModel
from tests.models.reference import move
from tests.on_cuda.transfer_programs import (
    interrupted_after_a_copy,
    interrupted_before_a_wait,
    streams,
)

STEPS = 3


class Training:
    """Forwards of a compiled model, each on other data, all of it on the device already.

    Attributes:
        trained: the model.
    """

    def __init__(self, entry: ZooModel, trained: Trained) -> None:
        self.trained = trained
        self._entry = entry
        batches = [move(entry.sample(seed), CUDA) for seed in range(STEPS)]
        self._batches = itertools.cycle(batches)
        size = len(tree_leaves(batches[0])[0])
        self._target = torch.zeros(size, dtype=torch.int64, device=CUDA)

    def loss(self) -> Tensor:
        """Of the next forward."""
        args, kwargs = next(self._batches)
        outputs = self.trained.call(*args, **kwargs)
        if self._entry.name == "resnet50":  # its own loss fetches the target from the host
            return functional.cross_entropy(outputs, self._target)
        return self._entry.loss(outputs)

    def step(self) -> None:
        """A forward and a backward."""
        self.loss().backward()
        self.trained.model.zero_grad()


def one_after_another(training: Training) -> None:
    for _ in range(STEPS):
        training.step()


def on_two_streams(training: Training) -> None:
    """For the host one after another, and unordered for the device."""
    with streams() as both:
        for stream in (*both, *both):
            with torch.cuda.stream(stream):
                training.step()


def two_at_once(training: Training) -> None:
    """Two forwards, and then their backwards."""
    for _ in range(2):
        for loss in [training.loss(), training.loss()]:
            loss.backward()
        training.trained.model.zero_grad()


def twice(training: Training) -> None:
    """A backward that runs again: what has travelled comes back a second time."""
    loss = training.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    training.trained.model.zero_grad()


def given_up(training: Training) -> None:
    """A forward that has no backward, between steps that have."""
    training.step()
    training.loss()
    training.step()


def interrupted(training: Training) -> None:
    """Steps that end at a copy or at a wait for one, and whole ones in between."""
    total = copies(training.trained.call)
    for number in range(0, total, max(1, total // 8)):
        for interrupted_at in (interrupted_after_a_copy, interrupted_before_a_wait):
            with interrupted_at(number):
                training.step()
            training.trained.model.zero_grad()
            training.step()


def without_host_memory(training: Training) -> None:
    """Host memory goes as soon as no step uses it, whatever the device is at."""
    host = training.trained.call._training.loop.host
    for end in (training.loss, training.step):
        end()
        host.drop_idle()
        assert not host.blocks


LOOPS: tuple[Callable[[Training], None], ...] = (
    one_after_another,
    on_two_streams,
    two_at_once,
    twice,
    given_up,
    interrupted,
    without_host_memory,
)
