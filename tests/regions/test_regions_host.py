"""A model that is captured in pieces, whose activations travel to host memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import BudgetError, BudgetWarning, TransferError
from fxremat.module.compiled import CompiledModule
from fxremat.runtime.arena import HostLimit
from tests.efforts import WHOLE
from tests.models.zoo import seeded
from tests.regions.test_regions import (
    BREAKS,
    BROKEN,
    LAYERS,
    LEARNED,
    broken,
    gradients,
    made,
    peak_of,
    taught,
    whole,
)
from tests.test_fork import in_a_child
from tests.test_interrupts import interrupted, interrupts

REGIONS = [f"layers.{place}" for place in range(LAYERS)]

WAYS = ("breaks", "regions")

one_way = pytest.mark.parametrize(
    "way",
    [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)],
)
"""The slow suite tries the other way, too."""


@pytest.fixture(autouse=True, scope="module")
def _nobody_else_has_left_anything() -> None:
    gc.collect()  # it is not to go while a step is watched


@pytest.fixture(autouse=True)
def _captured_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    linecache.cache.pop(BROKEN, None)
    gc.collect()


def compiled_as(
    way: str, budget: Any, **options: Any
) -> tuple[nn.Module, Tensor, CompiledModule, HostLimit]:
    model, x = made(broken(BREAKS[4]) if way == "breaks" else "")
    if way == "regions":
        options["regions"] = REGIONS
    call = fxremat.compile(model, x, budget, **options)
    return model, x, call, call._training.options.host.limit


def learned(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Steps until plans are chosen together, and were watched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        taught(model, call, x)


@functools.cache
def needed_bytes(way: str, budget: int) -> int:
    """Host memory that steps take where nothing limits it; found once a process."""
    model, x, call, limit = compiled_as(way, budget, offload="only")
    learned(model, call, x)
    needed = limit.allocated_bytes
    torch._dynamo.reset()
    return needed


@pytest.mark.parametrize(
    ("way", "offload"),
    [
        ("regions", "only"),
        pytest.param("breaks", "auto", marks=pytest.mark.slow),
        pytest.param("breaks", "only", marks=pytest.mark.slow),
        ("regions", "auto"),
    ],
)
def test_the_same_bits_within_half_of_what_it_takes(way: str, offload: str) -> None:
    expected, full_bytes, _ = whole()
    model, x, call, limit = compiled_as(way, full_bytes // 2, offload=offload)
    for _ in range(LEARNED):
        assert all(map(torch.equal, gradients(model, call, x), expected))
    learned(model, call, x)
    assert all(map(torch.equal, gradients(model, call, x), expected))
    assert peak_of(model, call, x) <= full_bytes // 2
    assert limit.lent_bytes == 0
    if offload == "only":
        assert limit.allocated_bytes > 0
        recomputes = (c.recomputes for c in call._training.plans)
        assert not any(recomputes)


@one_way
def test_a_limit_is_of_all_regions_together(way: str) -> None:
    """As little as it needs is enough, less says how much would do."""
    expected, full_bytes, _ = whole()
    budget = int(0.6 * full_bytes)
    needed = needed_bytes(way, budget)
    for host_limit, enough in ((needed, True), (needed // 2, False)):
        torch._dynamo.reset()
        host = fxremat.HostMemory("only", limit=host_limit)
        options = {"offload": host, "effort": WHOLE, "strict": True}
        model, x, call, limit = compiled_as(way, budget, **options)
        if not enough:
            with pytest.raises(BudgetError, match=r"limit=\) allows \d+ bytes .* suffice"):
                learned(model, call, x)
            continue
        for _ in range(2 * LEARNED):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BudgetWarning)
                assert all(map(torch.equal, gradients(model, call, x), expected))
            assert limit.allocated_bytes <= host_limit
        assert peak_of(model, call, x) <= budget


def test_where_little_may_travel_the_rest_is_computed_again() -> None:
    expected, _, least_bytes = whole()
    limit_bytes = 1 << 19
    options = {"offload": fxremat.HostMemory("auto", limit=limit_bytes)}
    model, x, call, limit = compiled_as("regions", "min", **options)
    learned(model, call, x)
    assert all(map(torch.equal, gradients(model, call, x), expected))
    assert peak_of(model, call, x) <= call.plan.budget_bytes < 1.1 * least_bytes
    assert limit.allocated_bytes <= limit_bytes


@one_way
def test_steps_that_overlap_share_the_limit(way: str) -> None:
    """The second one gets what the first one leaves; both backwards are right, in any order."""
    expected, full_bytes, _ = whole()
    limit_bytes = 4 << 20
    host = fxremat.HostMemory("auto", limit=limit_bytes)
    model, x, call, limit = compiled_as(way, full_bytes, offload=host)
    learned(model, call, x)
    for last_first in (True, False):
        model.zero_grad(set_to_none=True)
        losses = []
        for _ in range(2):
            with seeded(1), warnings.catch_warnings():
                warnings.simplefilter("ignore", BudgetWarning)
                losses.append(call(x))
            assert limit.allocated_bytes <= limit_bytes
        for loss in losses[::-1] if last_first else losses:
            model.zero_grad(set_to_none=True)
            loss.backward()
            found = [p.grad for p in model.parameters()]
            assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
        del loss, losses
        assert limit.lent_bytes == 0


def travelling() -> tuple[nn.Module, Tensor, CompiledModule, HostLimit, list[Tensor]]:
    """Layers whose activations travel, within just the host memory that a step needs."""
    expected, full_bytes, _ = whole()
    budget = full_bytes // 2
    host = fxremat.HostMemory("only", limit=needed_bytes("regions", budget))
    model, x, call, limit = compiled_as("regions", budget, offload=host)
    learned(model, call, x)
    return model, x, call, limit, expected


def test_what_ends_a_step_early_gives_host_memory_back() -> None:
    """A forward or a backward that raises, a forward without a backward, evaluation in between."""
    model, x, call, limit, expected = travelling()

    def raising(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.layers[7].register_forward_pre_hook(raising)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        gradients(model, call, x)
    handle.remove()
    assert limit.lent_bytes == 0
    assert all(map(torch.equal, gradients(model, call, x), expected))

    handle = model.layers[5].up.weight.register_hook(raising)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        gradients(model, call, x)
    handle.remove()
    # Torch itself keeps what is left of such a graph until the next backward.
    assert all(map(torch.equal, gradients(model, call, x), expected))
    assert limit.lent_bytes == 0

    model.zero_grad(set_to_none=True)
    loss = call(x)
    assert limit.lent_bytes > 0
    model.eval()
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    model.train()
    del loss
    assert limit.lent_bytes == 0
    assert all(map(torch.equal, gradients(model, call, x), expected))
    assert peak_of(model, call, x) <= call.plan.budget_bytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_takes_host_memory_of_its_own() -> None:
    model, x, call, limit, expected = travelling()

    def right() -> bool:
        return all(map(torch.equal, gradients(model, call, x), expected))

    assert in_a_child(right) is True
    assert right()
    model.zero_grad(set_to_none=True)
    with seeded(1):
        loss = call(x)

    def backward() -> str:
        try:
            loss.backward()
        except TransferError as error:
            return str(error)
        return "no error"

    assert "fork" in str(in_a_child(backward))
    loss.backward()
    found = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, found, expected))  # type: ignore[arg-type]
    assert limit.lent_bytes == 0


@pytest.mark.slow
def test_interrupts_lose_no_host_memory() -> None:
    """At any instant of a step: later ones are right, or say that they do not fit any more."""
    expected, full_bytes, _ = whole()
    model, x, call, limit = compiled_as("regions", full_bytes // 2, offload="only")
    learned(model, call, x)
    draw, hits, right = random.Random(0), 0, 0

    def step() -> None:
        with contextlib.suppress(BudgetError):
            gradients(model, call, x)

    with interrupts() as start:
        for number in range(200):
            hits += interrupted(step, draw.uniform(0, 0.1), start)
            if number % 20 == 0:
                with contextlib.suppress(BudgetError):
                    assert all(map(torch.equal, gradients(model, call, x), expected))
                    right += 1
    assert hits > 20 and right > 2
    gc.collect()
    assert limit.lent_bytes == 0
