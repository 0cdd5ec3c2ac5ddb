"""What a solver takes and what it returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from fxremat.ir.chain import Chain
from fxremat.ir.costs import Costs, SaveOption, StageCosts
from fxremat.ir.link import Link
from fxremat.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem of finding the fastest schedule of ``chain`` within ``budget_bytes``.

    Attributes:
        chain: the network.
        costs: seconds and bytes of its stages.
        budget_bytes: device memory in bytes, including ``costs.fixed_bytes``.
        link: link to host memory, for solvers that transfer; ``None`` where there is no host
            memory.

    Raises:
        ValueError: on construction, naming the field and index of the first malformed entry
            (negative, not finite, of wrong length, out of range, or bytes that are not a whole
            number).
    """

    chain: Chain
    costs: Costs
    budget_bytes: int
    link: Link | None = None

    def __post_init__(self) -> None:
        check_chain(self.chain)
        _check_costs(self.chain, self.costs)
        check_bytes(self.budget_bytes, name="budget_bytes")
        if self.link is not None:
            _check_link(self.link)


@dataclass(frozen=True, slots=True)
class Solved:
    """A schedule, and the seconds of its step (``makespan_s``) in the model it was planned with."""

    schedule: Schedule
    makespan_s: float


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No schedule that the solver considers fits; the least budget that suffices is
    ``least_budget_bytes``.
    """

    least_budget_bytes: int


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The solver reached its time limit before it proved a schedule optimal.

    Attributes:
        incumbent: the best schedule so far; ``None`` if there is none.
        bound_s: lower bound in seconds on the time of any schedule that the solver considers.
    """

    incumbent: Solved | None
    bound_s: float


Solution = Solved | Infeasible | TimedOut


def check_chain(chain: Chain, *, name: str = "chain") -> None:
    """Raise ``ValueError`` for the first malformed entry of ``chain``, called ``name`` there."""
    count = len(chain.stages)
    if count == 0:
        raise ValueError(f"{name}.stages is empty")
    if len(chain.boundaries) != count + 1:
        raise ValueError(
            f"{name}.boundaries has {len(chain.boundaries)} entries, expected {count + 1}"
        )
    for i, storage in enumerate(chain.storages):
        check_bytes(storage.nbytes, name=f"{name}.storages[{i}].nbytes")
    storage_ids = range(len(chain.storages))
    last_boundary: dict[int, int] = {}
    for i, boundary in enumerate(chain.boundaries):
        for storage_id in boundary:
            if storage_id not in storage_ids:
                raise ValueError(f"{name}.boundaries[{i}] names storage {storage_id}, unknown")
            if last_boundary.get(storage_id, i - 1) < i - 1:
                raise ValueError(
                    f"{name}.boundaries[{i}] has storage {storage_id} again after "
                    f"boundary {last_boundary[storage_id]}: a storage must be in a contiguous run"
                )
            last_boundary[storage_id] = i
    for i, stage in enumerate(chain.stages):
        for storage_id in stage.saved:
            if storage_id not in storage_ids:
                raise ValueError(f"{name}.stages[{i}].saved names storage {storage_id}, unknown")


def check_stage_costs(chain: Chain, stages: tuple[StageCosts, ...], *, name: str) -> None:
    """Raise ``ValueError`` for the first malformed entry of ``stages``, the costs of ``chain``.

    Args:
        stages: costs of each of its stages.
        name: what messages call ``stages``.
    """
    if len(stages) != len(chain.stages):
        raise ValueError(f"{name} has {len(stages)} entries, expected {len(chain.stages)}")
    for i, stage in enumerate(stages):
        _check_numbers(stage, f"{name}[{i}]")
        for k, option in enumerate(stage.options):
            option_name = f"{name}[{i}].options[{k}]"
            _check_numbers(option, option_name)
            for storage_id in option.kept:
                if storage_id not in range(len(chain.storages)):
                    raise ValueError(f"{option_name}.kept names storage {storage_id}, unknown")


def _check_numbers(costs: StageCosts | SaveOption, name: str) -> None:
    for field in fields(costs):
        value = getattr(costs, field.name)
        if isinstance(value, tuple):
            continue
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}.{field.name} is {value}, must be finite and at least 0")
        if field.name.endswith("_bytes"):
            check_bytes(value, name=f"{name}.{field.name}")


def check_bytes(value: int, *, name: str) -> None:
    """Raise ``ValueError`` unless ``value``, called ``name``, is a whole number of at least 0."""
    if value < 0:
        raise ValueError(f"{name} is {value}, must be at least 0")
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{name} is {value}, must be a whole number")


def _check_costs(chain: Chain, costs: Costs) -> None:
    check_stage_costs(chain, costs.stages, name="costs.stages")
    check_bytes(costs.fixed_bytes, name="costs.fixed_bytes")


def _check_link(link: Link) -> None:
    for name in ("offload_bytes_per_s", "prefetch_bytes_per_s"):
        value = getattr(link, name)
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"link.{name} is {value}, must be finite and above 0")
