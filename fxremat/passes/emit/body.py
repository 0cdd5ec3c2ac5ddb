"""The statements of emitted code: what each calls, reads and makes, before they are text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fxremat.runtime import transfer
from fxremat.runtime.views import tensor_in

PRIMALS = "primals"
"""AOTAutograd's name for parameters, buffers and inputs; here the list of them."""

HOST = "host"
"""The step's host memory."""

ARGS = "args"
"""The list in which code takes what it is given, and gives a stage what it takes."""

GRADIENTS = "gradients"
"""What gradients are handed to."""

GIVE = f"{GRADIENTS}.give"
"""What a statement calls that hands gradients over."""

RETURN = "return"
"""What the last statement does."""

ARENA = "ARENA"
"""Where a step's host memory comes from: its number is another in each process."""

RUNTIME = (
    transfer.open_arena,
    transfer.offload,
    transfer.release,
    transfer.prefetch,
    transfer.wait,
    tensor_in,
)
"""What statements call of the runtime, by bare names."""

_RESERVED = (ARGS, PRIMALS, HOST, GRADIENTS, ARENA, "torch", "device", "inf", "nan")


def _reserved() -> dict[str, object]:
    """Names that are nobody's."""
    return dict.fromkeys((*_RESERVED, *(function.__name__ for function in RUNTIME)))


@dataclass(slots=True, eq=False)
class Variable:
    """A name in the code, from one statement that binds it to the next one that does.

    Attributes:
        name: in the code. Whatever is computed again goes by its name of before.
        primal: its place among the primals that the code takes; ``None``: it is none.
        given: somebody else holds it anyway, as a primal or a constant.
        group: the list that it may be in with others that are made and read together.
    """

    name: str
    primal: int | None = None
    given: bool = False
    group: str | None = None


@dataclass(slots=True, eq=False)
class Statement:
    """One operation of the schedule.

    Attributes:
        target: the name of a stage's code, an operation of the runtime, :data:`GIVE`, or
            :data:`RETURN`.
        arguments: variables, and plain values; of :data:`GIVE` who takes, and gradients by primal.
        makes: the variables that it binds, in order.
        comment: what it does, for people.
        params: what the list of primals is called that a stage is given.
    """

    target: str | Callable[..., object]
    arguments: Sequence[object]
    makes: Sequence[Variable] = ()
    comment: str = ""
    params: str = "params"

    @property
    def reads(self) -> Iterator[Variable]:
        """The variables among its arguments."""
        for argument in self.arguments:
            if isinstance(argument, Variable):
                yield argument
            elif isinstance(argument, dict):
                yield from argument.values()

    @property
    def calls_stage(self) -> bool:
        """Whether it calls the code of a stage."""
        return isinstance(self.target, str) and self.target not in (GIVE, RETURN)


@dataclass(slots=True)
class Body:
    """The forward or the backward of a step.

    Attributes:
        takes: what it is given, in order.
        statements: in order; the last one returns.
        stages: what its statements call, by name; one may have several.
        constants: tensors of the traced code that it reads, by name.
    """

    takes: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    stages: dict[str, torch.nn.Module] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    _owners: dict[str, object] = field(default_factory=_reserved)

    def named(self, wish: str, owner: object) -> str:
        """A name for ``owner`` alone: always the same, and ``wish`` if that is nobody else's."""
        name, count = wish, 1
        while self._owners.setdefault(name, owner) != owner:
            count += 1
            name = f"{wish}_{count}"
        return name

    def stage(self, wish: str, module: torch.nn.Module) -> str:
        """The name by which statements call ``module``."""
        name = self.named(wish, module)
        self.stages[name] = module
        return name
