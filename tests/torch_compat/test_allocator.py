"""The log of an allocator: what it records, and what it leaves to other observers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxremat import torch_compat


def test_a_log_has_allocations_and_marks_and_records_no_operator(monkeypatch: pytest.MonkeyPatch):
    disable: Any = torch._C._autograd._disable_profiler_legacy
    names: list[str] = []

    def disabled() -> Any:
        threads = disable()
        names.extend(r.name() for thread in threads for r in thread if r.kind() == "push")
        return threads

    monkeypatch.setattr(torch._C._autograd, "_disable_profiler_legacy", disabled)
    weight = torch.ones(1000, requires_grad=True)
    with torch_compat.AllocationLog(weight.device) as log:
        product = weight * 2
        log.mark("backward")
        product.sum().backward()
    assert len(names) == 1
    assert ("", 4000) in log.events
    assert ("backward", 4000) in log.events
