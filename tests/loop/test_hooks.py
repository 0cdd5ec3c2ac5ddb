"""What the source of a post-accumulate hook says: whether the gradient is gone after it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxremat.loop.hooks import takes_gradient

Hook = Callable[[Any], Any]

optimizers: dict[Any, Any] = {}


def sets_none(p: Tensor) -> None:
    optimizers[p].step()
    p.grad = None


def clears(parameter: Tensor) -> None:
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


def clears_to_none(parameter: Tensor) -> None:
    optimizers[parameter].zero_grad(set_to_none=True)


def deletes(p: Tensor) -> None:
    del p.grad


def guarded(p: Tensor) -> None:
    if p.grad is None:
        return
    with torch.no_grad():
        p.sub_(p.grad)
        p.grad = None


def guarded_inside(p: Tensor) -> None:
    if p.grad is not None:
        p.sub_(p.grad)
        p.grad = None


def in_both_branches(p: Tensor) -> None:
    if p.numel() > 3:
        p.grad = None
    else:
        optimizers[p].zero_grad()


def at_last(p: Tensor) -> None:
    try:
        optimizers[p].step()
    finally:
        p.grad = None


def passes_it_on(p: Tensor) -> None:
    sets_none(p)


def closed_over(offload: bool) -> Hook:
    stream: Any = None

    def hook(p: Any) -> None:
        if p not in optimizers:
            optimizers[p] = stream
        if offload:
            p.grad.record_stream(stream)
            p.grad = None

    return hook


class Stepper:
    """An optimizer that steps in the backward, in the ways that classes do."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes

    def step(self, p: Tensor) -> None:
        if self.takes:
            p.grad = None

    def step_of(self, rate: float, p: Tensor) -> None:
        self.step(p)

    def __call__(self, p: Tensor) -> None:
        self.step_of(0.1, p)
        self.step(p)


TAKES: dict[str, Hook] = {
    own.__name__: own
    for own in (
        sets_none, clears, clears_to_none, deletes, guarded, guarded_inside, in_both_branches,
        at_last, passes_it_on,
    )
} | {
    "closed over True": closed_over(True),
    "bound": Stepper().step,
    "partial": functools.partial(Stepper().step_of, 0.1),
    "object": Stepper(),
}  # fmt: skip


def reads(p: Any) -> None:
    optimizers[p] = p.grad.norm()


def sets_zero(p: Any) -> None:
    optimizers[p].zero_grad(set_to_none=False)


def of_another(p: Any) -> None:
    other = nn.Parameter(p)
    other.grad = None


def sometimes(p: Any) -> None:
    if p.numel() > 3:
        p.grad = None


def not_always(p: Any) -> None:
    if p.numel() > 3:
        return
    p.grad = None


def passes_to_what_keeps(p: Any) -> None:
    reads(p)


def endless(p: Any) -> None:
    endless(p)


KEEPS: dict[str, Hook] = {
    own.__name__: own
    for own in (
        reads, sets_zero, of_another, sometimes, not_always, passes_to_what_keeps, endless,
    )
} | {
    "closed over False": closed_over(False),
    "bound": Stepper(takes=False).step,
    "lambda": lambda p: setattr(p, "grad", None),
    "without source": print,
    "of no argument": Stepper().__init__,
}  # fmt: skip


@pytest.mark.parametrize("name", TAKES)
def test_a_hook_that_takes_the_gradient_says_so(name: str):
    hook, parameter = TAKES[name], nn.Parameter(torch.ones(2))
    assert takes_gradient(hook)
    parameter.grad = torch.ones(2)
    assert parameter.grad is not None  # nothing has run


@pytest.mark.parametrize("name", KEEPS)
def test_what_does_not_say_so_is_taken_to_keep_it(name: str):
    assert not takes_gradient(KEEPS[name])


def test_hooks_of_one_source_are_told_apart():
    assert [takes_gradient(closed_over(offload)) for offload in (True, False, True)] == [
        True, False, True,
    ]  # fmt: skip


def test_a_hook_may_go_and_none_is_kept():
    hook = closed_over(True)
    assert takes_gradient(hook)
    gone = weakref.ref(hook)
    del hook
    assert gone() is None
