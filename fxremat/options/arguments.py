"""The arguments of the public functions, read in one place before anything else is done.

The table of options (:mod:`fxremat.options.table`) lists them, and :mod:`fxremat.options.readers`
checks their values. :func:`fxremat.compile` documents each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from fxremat.effort import USUAL, Effort
from fxremat.errors import BudgetError, refuse
from fxremat.options.budget import Budget, Readable
from fxremat.options.loss import LossOfOutputs
from fxremat.options.plain import gathered
from fxremat.options.readers import READERS, Assume, Executor, Optimizer
from fxremat.options.table import BACKEND, OPTIONS, names_of, refuse_former, refuse_unknown
from fxremat.options.values import Bits
from fxremat.passes.joint.constraints import Policy
from fxremat.planner.transfers.transfers import HostMemory
from fxremat.ranks.peers import Ranks
from fxremat.report.plan import Plan
from fxremat.units import Counted, format_bytes

Split = Literal["exact"] | bool
"""Whether runs may be computed in parts: where that keeps bits, anyhow, or never."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Checked arguments of :func:`fxremat.compile`.

    Attributes that are not listed are the arguments of the same names.

    Attributes:
        reserve_bytes: the argument ``reserve``.
        optimizers: the argument ``optimizer``, as a tuple.
        loss: the argument ``loss``, as a function of the model's outputs.
        drop_unused: whether outputs that the loss does not use are not returned.
        host: the argument ``offload``, as the host memory to copy storages to, or ``None``.
        kept: the argument ``plan``, whose peak is within the budget.
        fullgraph: whether ``regions="one"``, so that a model that breaks the graph is refused.
        regions: the names of modules in ``regions``, each of which is captured separately.
    """

    budget: Budget
    reserve_bytes: int = 0
    optimizers: tuple[Optimizer, ...] = ()
    loss: LossOfOutputs | None = None
    drop_unused: bool = False
    accumulate: bool = False
    host: HostMemory | None = None
    bits: Bits = field(default_factory=Bits)
    effort: Effort = USUAL
    executor: Executor = "eager"
    dynamic: bool | None = None
    kept: Plan | None = None
    fullgraph: bool = False
    regions: tuple[str, ...] = ()
    in_flight: int = 1
    strict: bool = False
    assume: Assume = "usual"
    ranks: Ranks | None = None
    policy: Policy | None = None

    @property
    def fused(self) -> bool:
        """Whether Inductor compiles the operations, that is ``executor="inductor"``."""
        return self.executor == "inductor"

    @property
    def budget_on(self) -> Counted:
        """The bytes that the budget limits: ``"allocated"`` or ``"reserved"`` ones."""
        return self.budget.counted

    @property
    def exact(self) -> bool:
        """Whether inputs of BatchNorms must not be rebuilt from outputs, which changes rounding."""
        return self.bits.kind == "exact" or "norms" not in self.effort.forms

    @property
    def split(self) -> Split:
        """Whether operations may be computed in parts; ``"exact"``: only if that keeps bits."""
        if "parts" not in self.effort.forms:
            return False
        return "exact" if self.bits.kind == "exact" else True

    @property
    def verify_bits(self) -> int:
        """The interval in steps at which parts are compared with the whole result; 0: never."""
        return self.bits.verify_every

    @staticmethod
    def read(budget: Readable | None = None, **given: Any) -> Arguments:
        """Check the arguments of :func:`fxremat.compile` except model and sample, and return them.

        Raises:
            BudgetError: the budget cannot be read, or ``plan`` exceeds it.
            PlanError: ``plan`` is not a file with a plan.
            ArgumentError: another argument cannot be read, or has a former name.
            TypeError: there is no argument of a given name.
        """
        refuse_former(given)
        for name in given.keys() - READERS.keys():
            raise TypeError(f"fxremat.compile has no argument {name!r}")
        values = {
            option.name: READERS[option.name](option.name, given.get(option.name, option.default))
            for option in OPTIONS
        }
        kept, loss, regions = values["plan"], values["loss"], values["regions"]
        in_flight = values["in_flight"]
        if in_flight > 1 and isinstance(regions, tuple) and regions:
            must_be = "1 if regions= names modules, since only steps of one graph can overlap"
            refuse("in_flight", in_flight, must_be)
        return Arguments(
            budget=_read_budget(budget, kept),
            reserve_bytes=values["reserve"],
            optimizers=values["optimizer"],
            loss=loss and loss.of_outputs,
            drop_unused=loss is not None and loss.drop_unused,
            accumulate=values["accumulate"] or in_flight > 1,
            host=values["offload"],
            bits=values["bits"],
            effort=values["effort"],
            executor=values["executor"],
            dynamic=values["dynamic"],
            kept=kept,
            fullgraph=regions == "one",
            regions=regions if isinstance(regions, tuple) else (),
            in_flight=in_flight,
            strict=values["strict"],
            assume=values["assume"],
            ranks=values["ranks"],
            policy=values["policy"],
        )

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules of ``model`` that ``regions`` names.

        Raises:
            ArgumentError: ``model`` has no module of one of these names.
        """
        known = dict(model.named_modules(remove_duplicate=False))
        for name in self.regions:
            if name not in known:
                refuse("regions", self.regions, f"names of its modules, which has no {name!r}")
        return [known[name] for name in self.regions]

    @staticmethod
    def read_options(options: Mapping[str, Any] | None) -> Arguments:
        """Check the ``options`` of ``torch.compile(backend="fxremat")``, and return the arguments.

        Raises:
            BudgetError: the budget is missing or cannot be read.
            ArgumentError: an option does not exist, or cannot be read.
        """
        given = dict(options or {})
        refuse_unknown(given, names_of(BACKEND), knows="valid options are")
        if "budget" not in given:
            raise BudgetError(
                'there is no budget: pass options={"budget": "6 GiB"} to torch.compile',
                code="FXR001",
            )
        arguments = Arguments.read(**gathered(given))
        if arguments.drop_unused:
            must_be = "without drop_unused=True, since torch.compile returns all outputs"
            refuse("loss", given["loss"], must_be)
        return arguments


def read_model(model: object) -> nn.Module:
    """Return ``model``, if it is a module.

    Raises:
        ArgumentError: ``model`` is not a module, or is a ``ScriptModule``.
    """
    if not isinstance(model, nn.Module):
        refuse("model", model, "a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        refuse("model", model, "the module that was scripted, not a torch.jit.ScriptModule")
    return model


def _read_budget(value: Readable | None, kept: Plan | None) -> Budget:
    """Return the checked budget; with a plan, in bytes, by default those of the plan.

    Args:
        value: the budget as the user wrote it, or ``None``.
        kept: the plan to follow, or ``None``.

    Raises:
        BudgetError: the budget is missing, cannot be read, or is below the plan's peak.
    """
    if kept is None:
        if value is None:
            raise BudgetError(
                "budget is None: pass one, such as '6 GiB', or a plan= to follow", code="FXR001"
            )
        return Budget.read(value)
    if value is None:
        return Budget(kept.budget_bytes, nbytes=kept.budget_bytes, counted=kept.budget_on)
    budget = Budget.read(value)
    nbytes = budget.bytes_of(
        full_bytes=kept.baseline_peak_bytes, least_bytes=kept.least_budget_bytes
    )
    if kept.counted_bytes > nbytes:
        raise BudgetError(
            f"budget {value!r} is {nbytes} bytes ({format_bytes(nbytes)}), but the step of plan= "
            f"takes {kept.counted_bytes} ({format_bytes(kept.counted_bytes)}). Omit the budget, "
            "or omit plan= to plan for this budget",
            code="FXR003",
        )
    return replace(budget, nbytes=nbytes, share=None)
