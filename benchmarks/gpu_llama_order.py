"""The contenders of ``benchmarks.gpu_llama``, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.rows import Row

Executor = Literal["eager", "inductor"]

COMPILED = "torch.compile"
CHECKPOINTED = "checkpoint per block"
COMPILED_CHECKPOINTED = f"{COMPILED} + {CHECKPOINTED}"
EAGER = "eager"
SELECTED = "per-op SAC"
LIGER = "Liger loss + checkpoint per block"

SHARE = 0.57
"""Of the peak of ``torch.compile``."""

MEMORY_BUDGETS = (0.5, 0.3, 0.2, 0.1, 0.8)
"""Settings of ``activation_memory_budget``, the most telling first."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What others offer.

    Attributes:
        name: of its row.
        way: by which the module is called.
        compiled: by ``torch.compile``.
        memory_budget: its setting of ``activation_memory_budget``.
    """

    name: str
    way: str
    compiled: bool = False
    memory_budget: float | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of fxremat.

    Attributes:
        executor: of its kernels.
        budget: bytes as a text, ``"min"``, or a share of the peak of ``reference``.
        reference: the name of the row whose peak it gets, or with which it is compared.
        offload: whether activations may travel to host memory.
    """

    executor: Executor
    budget: str | float
    reference: str
    offload: bool = False

    @property
    def name(self) -> str:
        """Of its row."""
        return f"fxremat ({self.executor}) {self._place}"

    @property
    def _place(self) -> str:
        if isinstance(self.budget, str):
            place = "at the least" if self.budget == "min" else f"at {self.budget}"
            return f"{place}, with offloading" if self.offload else place
        share = "" if self.budget == 1.0 else f"{self.budget:.0%} of "
        return f"at {share}the peak of {self.reference}"


@dataclass(frozen=True, slots=True)
class Start:
    """The first step of another contender once more, in another process, with warm caches."""

    of: str

    @property
    def name(self) -> str:
        """Of its row."""
        return f"first step with warm caches: {self.of}"


Contender = Peer | Planned | Start


def memory_budget_name(setting: float) -> str:
    """The row of ``torch.compile`` with that ``activation_memory_budget``."""
    return f"{COMPILED}, memory budget {setting}"


def contenders(network: str, fixed_budget: str) -> Sequence[Contender]:
    """All of a network, the most telling first.

    Args:
        network: ``"llama"`` or ``"resnet50"``.
        fixed_budget: bytes as a text, for a Llama.
    """
    return tuple(_of_llama(fixed_budget) if network == "llama" else _of_resnet())


def _of_llama(fixed_budget: str) -> Iterator[Contender]:
    compiled_checkpointed = Peer(COMPILED_CHECKPOINTED, CHECKPOINTED, compiled=True)
    yield Peer(COMPILED, EAGER, compiled=True)
    yield Planned("inductor", 1.0, COMPILED)
    yield Planned("inductor", SHARE, COMPILED)
    yield compiled_checkpointed
    yield Planned("inductor", 1.0, compiled_checkpointed.name)
    for setting in MEMORY_BUDGETS:
        name = memory_budget_name(setting)
        yield Peer(name, EAGER, compiled=True, memory_budget=setting)
        yield Planned("inductor", 1.0, name)
    yield from _warm_starts()
    yield from _without_peak("inductor", COMPILED, fixed_budget)
    for name in (EAGER, CHECKPOINTED, SELECTED, LIGER):
        yield Peer(name, name)
        yield Planned("eager", 1.0, name)
        yield Planned("inductor", 1.0, name)
    yield from _without_peak("eager", EAGER, fixed_budget)
    yield Planned("eager", 1.0, COMPILED)
    yield Planned("eager", SHARE, COMPILED)
    yield Planned("eager", 1.0, COMPILED_CHECKPOINTED)
    for setting in MEMORY_BUDGETS:
        yield Planned("eager", 1.0, memory_budget_name(setting))


def _without_peak(executor: Executor, reference: str, fixed_budget: str) -> Iterator[Contender]:
    yield Planned(executor, fixed_budget, reference)
    yield Planned(executor, "min", reference)
    yield Planned(executor, "min", reference, offload=True)


def _of_resnet() -> Iterator[Contender]:
    half = memory_budget_name(0.5)
    yield Peer(COMPILED, EAGER, compiled=True)
    yield Planned("inductor", 1.0, COMPILED)
    yield Planned("inductor", SHARE, COMPILED)
    yield Peer(half, EAGER, compiled=True, memory_budget=0.5)
    yield Planned("inductor", 1.0, half)
    yield Planned("inductor", "min", COMPILED)
    yield Peer(EAGER, EAGER)
    yield Planned("eager", 1.0, COMPILED)
    yield Planned("eager", SHARE, COMPILED)
    yield Planned("eager", 1.0, half)
    yield Planned("eager", "min", EAGER)
    yield from _warm_starts()


def _warm_starts() -> Iterator[Contender]:
    yield Start(COMPILED)
    yield Start(Planned("inductor", 1.0, COMPILED).name)


def remaining(
    wanted: Sequence[Contender], rows: Sequence[Row], chosen: Sequence[str] = ()
) -> list[Contender]:
    """Those that a call still has to measure.

    Args:
        wanted: all of a network.
        rows: of that network, from earlier calls; one that waits for a peak is tried again.
        chosen: texts; if there are some, the contenders whose names contain one, measured or not.
    """
    if chosen:
        return [each for each in wanted if any(text in each.name for text in chosen)]
    done = {row["what"] for row in rows if "waits" not in row}
    return [each for each in wanted if each.name not in done]
