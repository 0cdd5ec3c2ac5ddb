"""Choices of what is in host memory: they grow, and their bytes come true."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fxremat.ir import MeasuredLink
from fxremat.loop.hosting import Hosting
from fxremat.loop.optimizer_state import optimizer_bytes
from fxremat.loop.placement import (
    SMALL_SHARE,
    STEPS,
    placements,
    trained_parameters,
    with_least_memory,
)
from fxremat.runtime.arena import HostLimit
from fxremat.runtime.host_tensor import HostTensor

LINK = MeasuredLink(1e9, 1e9, 1e9, 1.0, True)


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = (129, 257, 65, 193, 33, 300)
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(nn.Linear(first, second) for first, second in pairs))


def hosting_of(own: nn.Module, optimizer: torch.optim.Optimizer, limit: HostLimit) -> Hosting:
    state = optimizer_bytes([optimizer], own)
    device = torch.device("cpu")
    return Hosting.of([optimizer], own, state, device=device, folder=None, limit=limit)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor"])
def test_choices_grow_from_nothing_to_everything(kind: str):
    own = model()
    optimizer = getattr(torch.optim, kind)(own.parameters(), lr=0.1)
    trained = trained_parameters([optimizer], own, optimizer_bytes([optimizer], own))
    choices = placements(trained, LINK, [p.nbytes for p in own.parameters()])
    first, *_, last = choices
    assert not (first.state or first.gradients or first.step_bytes or first.host_bytes)
    assert first.transfer_s == 0
    for before, after in itertools.pairwise(choices):
        assert before.state.keys() <= after.state.keys()
        assert before.gradients.keys() <= after.gradients.keys()
        assert before.host_bytes < after.host_bytes
        assert before.transfer_s <= after.transfer_s
        assert not after.gradients or after.state.keys() == last.state.keys()
    assert len(choices) <= 2 * STEPS + 1
    *_, least = with_least_memory(choices)
    assert least is last
    assert last.gradients.keys() == {one.parameter_id for one in trained}
    left_bytes = sum(p.nbytes for p in own.parameters()) - last.gradient_bytes
    assert left_bytes <= SMALL_SHARE * sum(p.nbytes for p in own.parameters())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_host_memory_of_a_choice_is_what_training_takes(amsgrad: bool):
    """To the byte, so that a limit is kept in the first step."""
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), amsgrad=amsgrad)
    limit = HostLimit()
    hosting = hosting_of(own, optimizer, limit)
    *_, everything = hosting.choices(LINK)
    limit.nbytes = everything.host_bytes
    hosting.use(everything)
    for _ in range(3):
        for parameter in own.parameters():
            parameter.grad = None
            parameter.grad = hosting.take_gradient(parameter, torch.ones_like(parameter))
        optimizer.step()
    assert limit.allocated_bytes == everything.host_bytes
    away = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, HostTensor)]
    assert sum(v.nbytes for v in away) == everything.state_bytes
    hosting.release()


def test_frozen_and_foreign_parameters_are_left_out():
    own, other = model(), nn.Linear(400, 400)
    own[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([*own.parameters(), *other.parameters()])
    trained = trained_parameters([optimizer], own, optimizer_bytes([optimizer], own))
    ids = {one.parameter_id for one in trained}
    assert ids <= {id(p) for p in own.parameters() if p.requires_grad}
    assert id(own[1].weight) in ids


@pytest.mark.parametrize("limit_bytes", [0, 1 << 16, 3 << 16, 1 << 20, None])
def test_no_choice_takes_more_than_the_limit(limit_bytes: int | None):
    own = model()
    optimizer = torch.optim.AdamW(own.parameters())
    trained = trained_parameters([optimizer], own, optimizer_bytes([optimizer], own))
    sizes = [p.nbytes for p in own.parameters()]
    all_choices = placements(trained, LINK, sizes)
    choices = placements(trained, LINK, sizes, limit_bytes=limit_bytes)
    assert not choices[0].host_bytes
    if limit_bytes is None:
        assert choices == all_choices
    else:
        assert max(choice.host_bytes for choice in choices) <= limit_bytes
        assert (len(choices) > 1) == (limit_bytes > 0)
