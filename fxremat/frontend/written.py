"""Options as a configuration file or a command line has them: numbers, flags and text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fxremat.errors import ArgumentError


@dataclass  # not frozen: Hydra could not override its fields
class Options:
    """Arguments of :func:`fxremat.compile` as plain values.

    A class from which OmegaConf and Hydra make a structured config, and ``HfArgumentParser``
    arguments of a command line. Nothing is checked here: who takes :meth:`arguments` does.

    Attributes:
        budget: ``"6 GiB"``, ``"6GB"`` (decimal), ``"50%"`` of what the step takes with everything
            kept, or ``"min"``.
        reserve: bytes of the budget to leave alone.
        optimizer: name of a class of ``torch.optim`` whose state is counted, such as ``"AdamW"``;
            ``"none"``: none is, not even that of a trainer that has one.
        loss: ``"own"``: the model returns its loss.
        drop_unused: outputs that the loss does not use are not returned.
        accumulate: gradients are accumulated.
        offload: ``"auto"``, ``"only"`` or ``"conv"``: activations may travel to host memory.
        host_limit: with ``offload``: most host memory, as ``"8 GiB"``.
        host_dir: with ``offload`` on a CPU: the folder of the file that stands for host memory.
        exact: gradients are bitwise those of the model as it is.
        budget_on: ``"allocated"`` or ``"reserved"``: what the budget is for.
        executor: ``"eager"`` or ``"inductor"``.
        dynamic: sizes are captured as symbols: always, never, or from the second size on.
        plan: file of a plan to follow.
        fullgraph: a model that breaks the graph is refused.
        in_flight: so many forwards may wait for their backward.
    """

    budget: str
    reserve: str = "0"
    optimizer: str | None = None
    loss: str | None = None
    drop_unused: bool = False
    accumulate: bool = False
    offload: str | None = None
    host_limit: str | None = None
    host_dir: str | None = None
    exact: bool = True
    budget_on: str = "allocated"
    executor: str = "eager"
    dynamic: bool | None = None
    plan: str | None = None
    fullgraph: bool = False
    in_flight: int = 1

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Options:
        """The options that a section of a configuration file has.

        Args:
            values: by the names of the attributes; what is left out is the default.

        Raises:
            ArgumentError: a name is none of them, or ``budget`` is missing.
        """
        names = [field.name for field in fields(Options)]
        for name in values:
            if name not in names:
                raise ArgumentError(
                    f"unknown option {name!r}: fxremat.Options has {', '.join(names)}",
                    argument=str(name),
                    value=values[name],
                )
        if "budget" not in values:
            raise ArgumentError(
                "no budget: give one, such as budget: 6 GiB", argument="budget", value=None
            )
        return Options(**values)

    def arguments(self) -> dict[str, Any]:
        """What differs from the defaults, as keywords of :func:`fxremat.compile` or a callback."""
        found = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        if found.get("optimizer") == "none":
            found["optimizer"] = None
        return found
