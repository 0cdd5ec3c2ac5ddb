"""Workspaces of libraries, counted on a GPU that is not there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxremat import torch_compat
from fxremat.costs.measured import workspaces
from fxremat.costs.measured.workspaces import Product, library_workspaces, multiply
from fxremat.planner.context.context_bytes import Caller, context_bytes_of
from tests.harness import captured

MIB = 1 << 20


class Ran(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **kwargs or {})


def ran_at_once(product: Product) -> None:
    product()


def test_products_run_forward_and_backward():
    with Ran() as ran, torch.no_grad():
        multiply(torch.device("cpu"), torch.float32, ran_at_once)
    assert ran.names.count("mm") == 2
    assert ran.names.count("addmm") == 2


def test_a_cpu_has_none():
    assert library_workspaces(torch.device("cpu")) == ()


def test_what_both_threads_hold_is_measured_once(monkeypatch: pytest.MonkeyPatch):
    """Those of a first use stay allocated; those there are already are freed, to see them."""
    allocated = [100 * MIB + 7]
    held = {"main"}

    def clear() -> None:
        allocated[0] -= 32 * MIB * len(held)
        held.clear()

    def take(thread: str) -> torch.Tensor:
        if thread not in held:
            held.add(thread)
            allocated[0] += 32 * MIB
        return torch.empty(0)

    def products(device: torch.device, dtype: torch.dtype, run: Callable[[Product], None]) -> None:
        assert not torch.is_inference_mode_enabled()
        for thread in ("main", "autograd"):
            run(functools.partial(take, thread))

    monkeypatch.setattr(torch_compat, "clear_library_workspaces", clear)
    monkeypatch.setattr(workspaces, "multiply", products)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: allocated[0])
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=0)
    )
    device = torch.device("cuda", 7)
    try:
        assert library_workspaces(device) == (32 * MIB, 32 * MIB)
        allocated[0] += 5
        assert library_workspaces(device) == (32 * MIB, 32 * MIB)
    finally:
        workspaces._nbytes.clear()
        workspaces._measured.clear()


def test_they_are_given(monkeypatch: pytest.MonkeyPatch):
    joint = captured("gpt").joint
    without = context_bytes_of(joint, {}, Caller())
    monkeypatch.setattr(
        "fxremat.planner.context.context_bytes.library_workspaces",
        lambda device: (40 * MIB, 24 * MIB),
    )
    with_them = context_bytes_of(joint, {}, Caller())
    assert with_them.given_bytes - without.given_bytes == 64 * MIB
    assert {40 * MIB, 24 * MIB} <= {*with_them.given_each_bytes}
    assert with_them.loss_point_bytes == without.loss_point_bytes
