"""Processes that train one model and follow one plan.

They agree through the store of their process group, not through collectives: a process that is
late or gone is named within a time limit, and no backend is involved. Each process sends one
message, and the leader, which is the first of them, sends one to all: see docs/design/0024.
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
from fxremat.errors import (
    ArgumentError,
    BudgetError,
    FxrematError,
    RankError,
    message_of,
    refuse,
)
from fxremat.report.codec import decode, encode

Budgets = Literal["same", "least"]

TIMEOUT_S = 600.0
"""The default time in seconds that a process waits for others, as torch waits for NCCL."""

HERE, ALL = "here", "all"
"""Keys of the leader's messages: that it has arrived, and what all agree on."""

COUNT, SAME = "count", "same"
"""Keys of an agreement that nothing has changed: how many processes have arrived, and whether all
of them are unchanged. A process that calls something else writes that they are not, so that no
other waits for it."""

GRACE_S = 10.0
"""Seconds that the others wait for the leader, beyond those that it waits for them."""

T = TypeVar("T")

_groups_made: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True, slots=True, init=False)
class Ranks:
    """The processes that train one model together and follow one plan.

    Args:
        group: a process group, or ranks. ``None`` uses the processes of the model's
            ``DistributedDataParallel``, ``fully_shard`` or ``DTensor``s, or else all ranks.
        budgets: ``"same"`` raises an error if budgets differ; with ``"least"`` all processes keep
            to the smallest.
        timeout: maximum time that a process waits for the others, as a ``timedelta`` or in
            seconds.

    Raises:
        ArgumentError: an argument cannot be read.
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
            refuse("timeout", timeout, "a positive timedelta or number of seconds")
        object.__setattr__(self, "timeout_s", float(seconds))


def _members(group: object) -> tuple[int, ...]:
    """Return the ranks of a process group or sequence; empty if ``group`` is ``None``."""
    if group is None:
        return ()
    if torch_compat.is_group(group):
        return torch_compat.ranks_in(group)
    ranks: list[Any] = (
        list(group) if isinstance(group, Iterable) and not isinstance(group, str) else [None]
    )
    if not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        refuse("group", group, "a process group that contains this process, or ranks")
    return tuple(sorted(set(ranks)))


class Peers:
    """The processes that train one model, from the point of view of one of them.

    All processes must make the same agreements in the same order.

    Args:
        members: the ranks of all processes; the first one leads.
        own: the rank of this process.
        store: the store that they share.
        timeout_s: the longest time in seconds that a process waits for another.
    """

    def __init__(
        self, members: Sequence[int], own: int, store: torch_compat.SharedStore, *, timeout_s: float
    ) -> None:
        self.members = tuple(members)
        self._has_reported = False  # the present failure is in the store
        self._store = store
        self._timeout_s = timeout_s
        self._own = own
        self._number = 0
        self._deadline_s = 0.0  # when other processes are late
        self._keys: list[str] = []  # the keys of the present agreement in the store
        self._older_keys: list[str] = []  # those of earlier agreements, which the leader drops

    @staticmethod
    def of(model: nn.Module, ranks: Ranks | None) -> Peers | None:
        """Return the processes that train a model, or ``None`` where this process plans by itself.

        Raises:
            ArgumentError: ``ranks`` is given, but there is no process group, or this process is
                not among the ranks.
        """
        if not torch_compat.has_processes():
            if ranks is not None:
                refuse("ranks", ranks, "None before torch.distributed.init_process_group")
            return None
        members = (ranks.members if ranks else ()) or torch_compat.ranks_of(model)
        if ranks is not None:
            members = members or torch_compat.ranks_in()
            if torch_compat.own_rank() not in members:
                must_be = f"a group with this process, rank {torch_compat.own_rank()}, and others"
                refuse("ranks", ranks, must_be)
        if len(members) < 2:
            return None
        _groups_made[members] += 1
        name = f"fxremat {' '.join(map(str, members))} {_groups_made[members]}"
        timeout_s = ranks.timeout_s if ranks else TIMEOUT_S
        store = torch_compat.SharedStore(name)
        return Peers(members, torch_compat.own_rank(), store, timeout_s=timeout_s)

    @staticmethod
    @contextlib.contextmanager
    def reporting_early_failures(model: object, ranks: object) -> Iterator[None]:
        """Return a context in which an exception, before any agreement, fails all processes.

        It is reported to the other processes if the arguments determine them. It counts as a
        compile, so that later compiles of the processes still match.

        Args:
            model: the model as the user gave it, of any type.
            ranks: the processes as the user gave them, of any type.
        """
        try:
            yield
        except BaseException:
            peers = Peers._of_unchecked(model, ranks)
            with peers.reporting_failures() if peers else contextlib.nullcontext():
                raise

    @staticmethod
    def _of_unchecked(model: object, ranks: object) -> Peers | None:
        """Return the result of :meth:`of`, or ``None`` if the arguments are invalid."""
        checked = torch_compat.uncompiled(model) if isinstance(model, nn.Module) else nn.Module()
        try:
            return Peers.of(checked, ranks if isinstance(ranks, Ranks) else None)
        except ArgumentError:
            return None

    @property
    def leads(self) -> bool:
        """Whether this process is the leader, that is the first of the members."""
        return self._own == self.members[0]

    def agree(
        self,
        what: str,
        kind: Callable[..., T],
        own: T,
        combine: Callable[[Mapping[int, T]], T],
    ) -> T:
        """Return one value that combines the values of all processes, the same in all of them.

        Args:
            what: the subject of the agreement, for errors.
            kind: the type of the value, which JSON can represent.
            own: the value of this process.
            combine: returns one value for all, from the values by rank; it may raise.

        Raises:
            RankError: a process did not arrive, failed, or agrees on another subject.
            FxrematError: ``combine`` has raised it.
        """
        self._begin()
        self._put(SAME, {"same": False})
        return self._combined(what, kind, own, combine)

    def agree_unless(
        self,
        alike: str | None,
        what: str,
        kind: Callable[..., T],
        own: T,
        combine: Callable[[Mapping[int, T]], T],
    ) -> T | None:
        """Return the result of :meth:`agree`, or ``None`` if all processes pass an equal ``alike``.

        That takes two requests of each process, which is cheaper than an agreement.

        Args:
            alike: the state of this process as text; ``None`` forces an agreement.
            what, kind, own, combine: see :meth:`agree`.

        Raises:
            RankError, FxrematError: see :meth:`agree`.
        """
        self._begin()
        return None if self._are_alike(alike) else self._combined(what, kind, own, combine)

    def _combined(
        self,
        what: str,
        kind: Callable[..., T],
        own: T,
        combine: Callable[[Mapping[int, T]], T],
    ) -> T:
        if not self.leads:
            self._put(self._own, {"what": what, "value": encode(kind, own)})
            return decode(kind, self._read_result(what))
        with self._failing_all():
            values = {self._own: own}
            for rank, value in self._read_others(what).items():
                values[rank] = decode(kind, value)
            self._drop_older()
            result = combine(values)
        self._put(ALL, {"value": encode(kind, result)})
        return result

    def _are_alike(self, alike: str | None) -> bool:
        """Return whether all processes have arrived and passed an equal ``alike``."""
        own = str(self._own) if alike is None else hashlib.sha256(alike.encode()).hexdigest()
        name, count = f"{self._number}/is {own}", f"{self._number}/{COUNT}"
        self._keys += [name, count, f"{self._number}/{SAME}"]
        self._store.count(name)
        if self._store.count(count) == len(self.members):  # this is the last one
            equal = self._store.count(name, 0)
            self._put(SAME, {"same": equal == len(self.members)})
        message = self._get(SAME, self._timeout_s)
        if message is None:  # an agreement finds out who has arrived
            self._deadline_s = monotonic() + min(GRACE_S, self._timeout_s)
        elif self.leads:
            self._drop_older()
        return message is not None and bool(message["same"])

    def follow(self, what: str, kind: Callable[..., T], make: Callable[[], T]) -> T | None:
        """Call ``make`` in the leader, and return its result in all other processes.

        Args:
            what: the subject, for errors.
            kind: the type of the result, which JSON can represent.
            make: makes the result.

        Returns:
            The result, or ``None`` in the leader, where ``make`` was called.

        Raises:
            RankError: the leader did not arrive in time, or failed.
            BudgetError: ``make`` has raised it in the leader.
        """
        self._begin()
        self._put(SAME, {"same": False})
        if not self.leads:
            return decode(kind, self._read_result(what))
        with self._failing_all():
            result = make()
        self._put(ALL, {"value": encode(kind, result)})
        return None

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Return a context in which an exception fails all processes at their next agreement."""
        try:
            yield
        except RankError:
            raise  # it comes from the others
        except BaseException as error:
            if not self._has_reported:
                self._begin()
                self._has_reported = True
                self._put(
                    ALL if self.leads else self._own, {"error": _encoded_error(error, self._own)}
                )
                self._put(SAME, {"same": False})
            raise

    def _begin(self) -> None:
        """Begin the next agreement: count it, set its deadline, and, in the leader, announce it."""
        self._number, self._has_reported = self._number + 1, False
        self._deadline_s = monotonic() + self._timeout_s
        keys, self._keys = self._keys, []
        if self.leads:
            self._older_keys += keys
            self._put(HERE, {})

    @contextlib.contextmanager
    def _failing_all(self) -> Iterator[None]:
        """Return a context in which an exception of the leader fails the agreement for all."""
        try:
            yield
        except BaseException as error:
            self._has_reported = True
            self._put(ALL, {"error": _encoded_error(error, self._own)})
            raise

    def _read_others(self, what: str) -> dict[int, Any]:
        """Return the encoded values of the other processes by rank, in the leader.

        Args:
            what: the subject of the agreement.

        Raises:
            RankError: a process did not arrive, failed, or agrees on another subject.
        """
        values, missing = {}, []
        for rank in self.members[1:]:
            self._keys.append(f"{self._number}/{rank}")
            message = self._get(rank, self._deadline_s - monotonic())
            if message is None:
                missing.append(rank)
            elif "error" in message:
                raise _decoded_error(message["error"])
            elif message["what"] != what:
                raise RankError(
                    f"rank {rank} waits for an agreement on {message['what']}, but rank "
                    f"{self._own} for one on {what}: they do not compile the same model in the "
                    "same order",
                    ranks=(rank,),
                    code="FXR733",
                )
            else:
                values[rank] = message["value"]
        if missing:
            raise RankError(
                f"{_named(missing)} did not arrive within {self._timeout_s:g} s to agree on "
                f"{what}: every process of the group must compile the model and make the same "
                f"calls. Pass fxremat.Ranks a longer timeout=, or a group= without "
                f"{_named(missing)}",
                ranks=missing,
                code="FXR731",
            )
        return values

    def _read_result(self, what: str) -> Any:
        """Return the leader's encoded result, in another process.

        Args:
            what: the subject of the agreement, for errors.

        Raises:
            RankError: the leader did not arrive or answer in time, or failed.
        """
        here = self._get(HERE, self._timeout_s) is not None
        message = self._get(ALL, self._timeout_s + GRACE_S) if here else None
        if message is None:
            self._has_reported = True
            raise RankError(
                f"rank {self.members[0]}, the first of its group, did not "
                f"{'answer' if here else 'arrive'} within {self._timeout_s:g} s to agree on "
                f"{what}: every process of the group must compile the model and make the same "
                "calls. Pass fxremat.Ranks a longer timeout= if that takes longer",
                ranks=self.members[:1],
                code="FXR731",
            )
        if "error" in message:
            self._has_reported = True
            raise _decoded_error(message["error"])
        return message["value"]

    def _put(self, who: int | str, message: Mapping[str, Any]) -> None:
        data = zlib.compress(json.dumps(message).encode())
        key = f"{self._number}/{who}"
        self._keys.append(key)
        self._store.put(key, data)

    def _drop_older(self) -> None:
        """Delete the keys of earlier agreements from the store; all processes have read them."""
        for key in self._older_keys:
            self._store.drop(key)
        self._older_keys = []

    def _get(self, who: int | str, timeout_s: float) -> dict[str, Any] | None:
        data = self._store.get(f"{self._number}/{who}", timeout_s)
        if data is None:
            return None
        message: dict[str, Any] = json.loads(zlib.decompress(data))
        return message


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _encoded_error(error: BaseException, rank: int) -> dict[str, Any]:
    """Return ``error`` of a process as a dict that JSON can represent."""
    if not isinstance(error, RankError | BudgetError):
        text = f"rank {rank} failed: {type(error).__name__}: {message_of(error)}"
        error = RankError(text, code="FXR734", ranks=[rank])
    encoded: dict[str, Any] = {"text": error.message, "code": error.code}
    if isinstance(error, BudgetError):
        return {**encoded, "least": error.least_budget_bytes}
    return {**encoded, "ranks": error.ranks}


def _decoded_error(message: Mapping[str, Any]) -> FxrematError:
    if "least" in message:
        return BudgetError(
            message["text"], code=message["code"], least_budget_bytes=message["least"]
        )
    return RankError(message["text"], code=message["code"], ranks=message["ranks"])
