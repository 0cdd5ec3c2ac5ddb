"""The statements of emitted code, before they are rendered: what each calls, reads and makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fxremat.runtime import transfer
from fxremat.runtime.host_parameter import fetch_early
from fxremat.runtime.views import tensor_in

PRIMALS = "primals"
"""AOTAutograd's name for parameters, buffers and inputs; here it names the list of them."""

HOST = "host"
"""The name of the step's host memory."""

ARGS = "args"
"""The name of the list in which code takes its inputs, and passes a stage its inputs."""

GRADIENTS = "gradients"
"""The name of the object that gradients are handed to."""

GIVE = f"{GRADIENTS}.give"
"""Target of statements that hand gradients over."""

RETURN = "return"
"""Target of the last statement."""

ARENA = "ARENA"
"""The name of the arena's number, which differs between processes."""

RUNTIME = (
    transfer.open_arena,
    transfer.offload,
    transfer.release,
    transfer.prefetch,
    transfer.wait,
    fetch_early,
    tensor_in,
)
"""Functions of the runtime that statements call, by bare names."""

_RESERVED = (ARGS, PRIMALS, HOST, GRADIENTS, ARENA, "torch", "device", "inf", "nan")


def _reserved_names() -> dict[str, object]:
    return dict.fromkeys((*_RESERVED, *(function.__name__ for function in RUNTIME)))


@dataclass(slots=True, eq=False)
class Variable:
    """A name in the code, from one statement that binds it to the next one that does.

    Attributes:
        name: the name in the code. A recomputed value has the same name as before.
        primal: its index among the primals that the code takes; ``None`` if it is none.
        given: whether it is held elsewhere anyway, as a primal or a constant.
        group: the list that it may be part of, together with others that are made and read
            together.
    """

    name: str
    primal: int | None = None
    given: bool = False
    group: str | None = None


@dataclass(slots=True, eq=False)
class Statement:
    """One statement of emitted code, which carries out an operation of the schedule.

    Attributes:
        target: name of a stage's code, a function of the runtime, :data:`GIVE`, or :data:`RETURN`.
        arguments: variables and plain values; for :data:`GIVE` the receiver, and gradients by
            primal.
        makes: the variables that it binds, in order.
        comment: what it does, for people.
        params: name of the list of primals that is passed to a stage.
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
    """The forward or the backward of a step, as statements.

    Attributes:
        takes: its inputs, in order.
        statements: its statements, in order; the last one returns.
        stages: modules that its statements call, by name; one module may have several names.
        constants: tensors of the traced code that it reads, by name.
    """

    takes: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    stages: dict[str, torch.nn.Module] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    _owners: dict[str, object] = field(default_factory=_reserved_names)

    def named(self, wish: str, owner: object) -> str:
        """Return the name of ``owner`` in the code: ``wish``, with a number if that is taken."""
        name, count = wish, 1
        while self._owners.setdefault(name, owner) != owner:
            count += 1
            name = f"{wish}_{count}"
        return name

    def stage(self, wish: str, module: torch.nn.Module) -> str:
        """Add ``module`` to ``stages``, and return the name by which statements call it."""
        name = self.named(wish, module)
        self.stages[name] = module
        return name
