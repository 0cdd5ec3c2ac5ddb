"""Measurements, by the signature of what was measured."""

from __future__ import annotations

from fxremat.passes.stages.signature import Key


class CostCache:
    """Measurements by signature: what was measured once is not measured again.

    One cache serves all models of a process, so that plans of one model for several
    budgets rest on the same figures. It holds for one choice of the settings that choose
    kernels (``torch_compat.kernel_settings``).
    """

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}
        self.operation_s: dict[Key, float] = {}
        self.workspace_bytes: dict[Key, int] = {}
        self.result_bytes: dict[Key, tuple[int, ...]] = {}
        self.as_traced: dict[Key, bool] = {}
