"""Plans of real models, which know which tensors are held when; each is made once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fxremat.frontend.compiled import CompiledModule
from fxremat.report.plan import Plan
from tests.models import ZOO
from tests.trials import compiled


@functools.cache
def compiled_once(name: str, offload: str = "") -> tuple[CompiledModule, Callable[[], None]]:
    """A model of the zoo within seven tenths of its peak, and a step of it."""
    entry = ZOO[name]
    _, call = compiled(entry, 0.7, **({"offload": offload} if offload else {}))
    args, kwargs = entry.sample(0)

    def step() -> None:
        call.zero_grad()
        entry.loss(call(*args, **kwargs)).backward()

    return call, step


def plan_of_model(name: str, offload: str = "") -> Plan:
    """Its plan."""
    return compiled_once(name, offload)[0].plan
