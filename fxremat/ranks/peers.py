"""Processes that train one model, and follow one plan.

What they agree on goes through the store of their process group, not through collectives: a
process that is late, or gone, is named within a time limit, and no backend is asked for anything.
Each sends one message, the first of them one for all: see docs/design/0024.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from fxremat import torch_compat
from fxremat.errors import ArgumentError, BudgetError, FxrematError, RankError, refuse
from fxremat.report.codec import decode, encode

Budgets = Literal["same", "least"]

TIMEOUT_S = 600.0
"""How long a process waits for others unless told otherwise; what torch waits for NCCL."""

HERE, ALL = "here", "all"
"""What the first of them says: that it has come, and what holds for all."""

COUNT, SAME = "count", "same"
"""How many have come to say whether all is as it was; and whether it is: whoever has something else
to say tells that it is not, so that nobody waits for it."""

GRACE_S = 10.0
"""Longer than the first of them waits for the others."""


T = TypeVar("T")

_made: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True, slots=True, init=False)
class Ranks:
    """Processes that train one model together, and follow one plan.

    Args:
        group: a process group, or ranks; ``None``: those of the model's
            ``DistributedDataParallel``, ``fully_shard`` or ``DTensor``s, else all.
        budgets: ``"same"``: budgets that differ are an error; ``"least"``: all keep to the least.
        timeout: the longest that one waits for the others, as a ``timedelta`` or in seconds.

    Raises:
        ArgumentError: one of them cannot be read.
    """

    members: tuple[int, ...]
    budgets: Budgets
    timeout_s: float

    def __init__(
        self,
        group: object = None,
        *,
        budgets: Budgets = "same",
        timeout: float | timedelta = TIMEOUT_S,
    ) -> None:
        object.__setattr__(self, "members", _members(group))
        if budgets not in get_args(Budgets):
            refuse("budgets", budgets, "'same' or 'least'")
        object.__setattr__(self, "budgets", budgets)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (number and math.isfinite(seconds) and seconds > 0):
            refuse("timeout", timeout, "a timedelta or seconds, more than none")
        object.__setattr__(self, "timeout_s", float(seconds))


def _members(group: object) -> tuple[int, ...]:
    """Ranks of a group; none: those that the model tells of."""
    if group is None:
        return ()
    if torch_compat.is_group(group):
        return torch_compat.ranks_in(group)
    ranks: list[Any] = (
        list(group) if isinstance(group, Iterable) and not isinstance(group, str) else [None]
    )
    if not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        refuse("group", group, "a process group of this process, or ranks")
    return tuple(sorted(set(ranks)))


class Peers:
    """The processes that train one model, as one of them sees them.

    All of them agree on the same things in the same order. They do on what a first step needs;
    what a later one meets, others need not meet.

    Args:
        members: ranks of all of them.
        own: that of this process.
        store: which they share.
        timeout_s: the longest that one waits for another.
    """

    def __init__(
        self, members: Sequence[int], own: int, store: torch_compat.SharedStore, *, timeout_s: float
    ) -> None:
        self.members = tuple(members)
        self._told = False  # that something failed
        self._store = store
        self._timeout_s = timeout_s
        self._own = own
        self._number = 0
        self._until = 0.0  # when others are late
        self._names: list[str] = []  # of what the first of them keeps for the others
        self._older: list[str] = []  # which was said before

    @staticmethod
    def of(model: nn.Module, ranks: Ranks | None) -> Peers | None:
        """The processes that train a model; ``None``: this process plans for itself.

        Raises:
            ArgumentError: there is no process group, or this process is in none of these ranks.
        """
        if not torch_compat.has_processes():
            if ranks is not None:
                refuse("ranks", ranks, "None before torch.distributed.init_process_group")
            return None
        members = (ranks.members if ranks else ()) or torch_compat.ranks_of(model)
        if ranks is not None:
            members = members or torch_compat.ranks_in()
            if torch_compat.own_rank() not in members:
                refuse("ranks", ranks, f"of rank {torch_compat.own_rank()} and others")
        if len(members) < 2:
            return None
        _made[members] += 1
        name = f"fxremat {' '.join(map(str, members))} {_made[members]}"
        timeout_s = ranks.timeout_s if ranks else TIMEOUT_S
        store = torch_compat.SharedStore(name)
        return Peers(members, torch_compat.own_rank(), store, timeout_s=timeout_s)

    @staticmethod
    @contextlib.contextmanager
    def told_of_refusals(model: object, ranks: object) -> Iterator[None]:
        """What fails in here, before all come to agree, fails for all.

        The others are told if it can be known who they are, and count this compile as they do
        their own: later ones find each other.

        Args:
            model: as it was given, of whatever type.
            ranks: likewise.
        """
        try:
            yield
        except BaseException:
            peers = Peers._known(model, ranks)
            with peers.telling() if peers else contextlib.nullcontext():
                raise

    @staticmethod
    def _known(model: object, ranks: object) -> Peers | None:
        """The processes of a call that nobody has checked; ``None``: nothing tells of them."""
        found = torch_compat.uncompiled(model) if isinstance(model, nn.Module) else nn.Module()
        try:
            return Peers.of(found, ranks if isinstance(ranks, Ranks) else None)
        except ArgumentError:
            return None

    @property
    def leads(self) -> bool:
        """Whether this is the first of them."""
        return self._own == self.members[0]

    def agree(
        self,
        what: str,
        kind: Callable[..., T],
        own: T,
        combine: Callable[[Mapping[int, T]], T],
    ) -> T:
        """What all of them take for true.

        Args:
            what: it is about, for the error.
            kind: its type, which has a form in JSON.
            own: that of this process.
            combine: makes one of all, by rank; it may raise.

        Raises:
            RankError: one of them did not come, failed, or agrees on something else.
            FxrematError: as ``combine`` raises it.
        """
        self._begin()
        self._put(SAME, {"same": False})
        return self._agreed(what, kind, own, combine)

    def agree_unless(
        self,
        alike: str | None,
        what: str,
        kind: Callable[..., T],
        own: T,
        combine: Callable[[Mapping[int, T]], T],
    ) -> T | None:
        """As :meth:`agree`, unless all of them say ``alike``: that takes two requests of each.

        Args:
            alike: what needs no agreement if all say it; ``None``: this process needs one.
            what, kind, own, combine: see :meth:`agree`.

        Returns ``None`` if all say it.

        Raises:
            RankError, FxrematError: as :meth:`agree`.
        """
        self._begin()
        return None if self._all_say(alike) else self._agreed(what, kind, own, combine)

    def _agreed(
        self,
        what: str,
        kind: Callable[..., T],
        own: T,
        combine: Callable[[Mapping[int, T]], T],
    ) -> T:
        if not self.leads:
            self._put(self._own, {"what": what, "value": encode(kind, own)})
            return decode(kind, self._verdict(what))
        with self._telling_all():
            found = {self._own: own}
            for rank, told in self._others(what).items():
                found[rank] = decode(kind, told)
            self._forget()
            result = combine(found)
        self._put(ALL, {"value": encode(kind, result)})
        return result

    def _all_say(self, alike: str | None) -> bool:
        """Whether all of them have come, and say the same."""
        own = str(self._own) if alike is None else hashlib.sha256(alike.encode()).hexdigest()
        name, count = f"{self._number}/is {own}", f"{self._number}/{COUNT}"
        self._names += [name, count, f"{self._number}/{SAME}"]
        self._store.count(name)
        if self._store.count(count) == len(self.members):  # all have said theirs by now
            said = self._store.count(name, 0)
            self._put(SAME, {"same": said == len(self.members)})
        told = self._get(SAME, self._timeout_s)
        if told is None:  # who has come says so now
            self._until = monotonic() + min(GRACE_S, self._timeout_s)
        elif self.leads:
            self._forget()
        return told is not None and bool(told["same"])

    def follow(self, what: str, kind: Callable[..., T], make: Callable[[], T]) -> T | None:
        """Let the first of them make something.

        Returns what it made; ``None`` for itself, which has it.

        Raises:
            RankError: it did not come in time, or failed.
            BudgetError: as ``make`` raises it there.
        """
        self._begin()
        self._put(SAME, {"same": False})
        if not self.leads:
            return decode(kind, self._verdict(what))
        with self._telling_all():
            made = make()
        self._put(ALL, {"value": encode(kind, made)})
        return None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What fails in here, fails for all: the others are told when they next agree."""
        try:
            yield
        except RankError:
            raise  # they know
        except BaseException as error:
            if not self._told:
                self._begin()
                self._told = True
                self._put(ALL if self.leads else self._own, {"error": _error(error, self._own)})
                self._put(SAME, {"same": False})
            raise

    def _begin(self) -> None:
        self._number, self._told = self._number + 1, False
        self._until = monotonic() + self._timeout_s
        said, self._names = self._names, []
        if self.leads:  # it drops what was said, once all have read it
            self._older += said
            self._put(HERE, {})

    @contextlib.contextmanager
    def _telling_all(self) -> Iterator[None]:
        """What fails in here, fails for all."""
        try:
            yield
        except BaseException as error:
            self._told = True
            self._put(ALL, {"error": _error(error, self._own)})
            raise

    def _others(self, what: str) -> dict[int, Any]:
        """What the others say, by rank."""
        found, missing = {}, []
        for rank in self.members[1:]:
            self._names.append(f"{self._number}/{rank}")
            told = self._get(rank, self._until - monotonic())
            if told is None:
                missing.append(rank)
            elif "error" in told:
                raise _raised(told["error"])
            elif told["what"] != what:
                raise RankError(
                    f"rank {rank} goes on to agree on {told['what']}, rank {self._own} on {what}: "
                    "they do not compile the same model in the same order",
                    ranks=(rank,),
                )
            else:
                found[rank] = told["value"]
        if missing:
            raise RankError(
                f"{_named(missing)} did not come within {self._timeout_s:g} s to agree on {what}: "
                "every process of the group has to compile the model, and make the same calls. "
                f"Give fxremat.Ranks another timeout=, or a group= without {_named(missing)}",
                ranks=missing,
            )
        return found

    def _verdict(self, what: str) -> Any:
        """What the first of them has made of it."""
        here = self._get(HERE, self._timeout_s) is not None
        told = self._get(ALL, self._timeout_s + GRACE_S) if here else None
        if told is None:
            self._told = True
            raise RankError(
                f"rank {self.members[0]}, which is the first one, did not "
                f"{'say' if here else 'come'} within {self._timeout_s:g} s to agree on {what}: "
                "every process of the group has to compile the model, and make the same calls. "
                "Give fxremat.Ranks another timeout= if it takes longer",
                ranks=self.members[:1],
            )
        if "error" in told:
            self._told = True
            raise _raised(told["error"])
        return told["value"]

    def _put(self, who: int | str, told: Mapping[str, Any]) -> None:
        data = zlib.compress(json.dumps(told).encode())
        name = f"{self._number}/{who}"
        self._names.append(name)
        self._store.put(name, data)

    def _forget(self) -> None:
        """All have come: whoever agrees on something has read what was said before."""
        for name in self._older:
            self._store.drop(name)
        self._older = []

    def _get(self, who: int | str, timeout_s: float) -> dict[str, Any] | None:
        data = self._store.get(f"{self._number}/{who}", timeout_s)
        if data is None:
            return None
        told: dict[str, Any] = json.loads(zlib.decompress(data))
        return told


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _error(error: BaseException, rank: int) -> dict[str, Any]:
    """An error as others are told of it."""
    if isinstance(error, RankError):
        return {"text": str(error), "ranks": error.ranks}
    if isinstance(error, BudgetError):
        return {"text": str(error), "least": error.least_budget_bytes}
    return {"text": f"rank {rank} failed: {type(error).__name__}: {error}", "ranks": [rank]}


def _raised(told: Mapping[str, Any]) -> FxrematError:
    if "least" in told:
        return BudgetError(told["text"], least_budget_bytes=told["least"])
    return RankError(told["text"], ranks=told["ranks"])
