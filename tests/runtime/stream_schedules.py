"""Random training loops on a fake device: steps that overlap, that fail, that nobody ends.

The steps call the operators of the runtime as emitted code does. On which stream a call
runs is up to the loop, with the order that autograd sees to:

* a backward on another stream than its forward's waits for that before, and is waited for
  after; what its forward allocated is dropped in between, when nothing else is enqueued;
* a backward may run in a thread of its own, which is told the stream;
* where a backward fails autograd orders nothing: whoever goes on does, before memory of
  the one stream that was used on the other is handed out again.

The runtime relies on these and on nothing else: steps on the two streams are not ordered,
and share the lanes and, one after the other, the arena's blocks. The steps of one loop also
share parameters in host memory, which they copy to the device, read, and sometimes write.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fxremat.runtime import transfer
from fxremat.runtime.arena import Arena, lease_of
from fxremat.runtime.lease import Arrival
from tests.clocks import GRAIN_BYTES
from tests.fake_streams import Device, FakeStream, fake_device

N_PARAMETERS = 2
MOST_HOST_BYTES = 12 * 4 * GRAIN_BYTES
"""What no program needs more than."""


@dataclass(frozen=True, slots=True)
class Trip:
    """Where a value travels. Places are numbers of calls, and mean the instant before.

    Attributes:
        offload: its copy to the host begins.
        release: it is dropped on the device, once copied; ``None`` if it is held until it
            has come back.
        prefetch: its copy back begins. The next call that reads it waits for that.
    """

    offload: int
    release: int | None
    prefetch: int

    @staticmethod
    def drawn(draw: random.Random, first: int, last: int, *, turn: int) -> Trip:
        """Places in ``[first, last]``; one over the turn leaves before and comes back after."""
        if first <= turn <= last:
            offload, release = sorted(draw.randint(first, turn) for _ in range(2))
            prefetch = draw.randint(turn, last)
        else:
            offload, release, prefetch = sorted(draw.randint(first, last) for _ in range(3))
        return Trip(offload, release if draw.random() < 7 / 8 else None, prefetch)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a step.

    Attributes:
        nbytes: its size.
        counted_bytes: what the plan counts for it, which may be more.
        made: the call that makes it.
        last: the last call that reads it, but for the next.
        next: the call that reads it after it was away, the last of all.
        trip: how it travels in between, if it does.
        offset: where on the host.
    """

    nbytes: int
    counted_bytes: int
    made: int
    last: int
    next: int
    trip: Trip | None
    offset: int = 0

    @staticmethod
    def drawn(draw: random.Random, made: int, *, turn: int) -> Value:
        """What is made in the forward is mostly read by the call that mirrors its own."""
        calls = 2 * turn
        last = min(made + 1, calls - 1)
        mirrored = made < turn and draw.random() < 4 / 5
        following = calls - 1 - made if mirrored else draw.randint(last, calls - 1)
        travels = following > last + 1 and draw.random() < 4 / 5
        nbytes = GRAIN_BYTES * draw.choice([1, 1, 1, 2, 3])
        return Value(
            nbytes=nbytes,
            counted_bytes=nbytes + draw.choice([0, 0, GRAIN_BYTES]),
            made=made,
            last=last,
            next=following,
            trip=Trip.drawn(draw, last + 1, following, turn=turn) if travels else None,
        )

    def read_by(self, call: int) -> bool:
        """Whether that call reads it."""
        return self.made < call <= self.last or call == self.next != self.made


@dataclass(frozen=True, slots=True)
class Program:
    """What a step does: at each place transfers, then a call that makes one value.

    Attributes:
        values: one for each call.
        turn: the first call of the backward.
        host_bytes: what the transfers need.
        trips: number, value and trip of those that travel, the first to be read first.
    """

    values: tuple[Value, ...]
    turn: int
    host_bytes: int
    trips: tuple[tuple[int, Value, Trip], ...]

    @staticmethod
    def drawn(draw: random.Random) -> Program:
        """Values that are read again in the backward, and temporary ones of either half."""
        turn = draw.randint(2, 6)
        values = [Value.drawn(draw, made, turn=turn) for made in range(2 * turn)]
        trips = [(i, v, v.trip) for i, v in enumerate(values) if v.trip is not None]
        placed: list[tuple[int, Value, Trip]] = []
        for i, value, trip in trips:
            placed.append((i, replace(value, offset=_first_gap(value, trip, placed)), trip))
        placed.sort(key=lambda x: x[1].next)
        host_bytes = max((v.offset + v.counted_bytes for _, v, _ in placed), default=0)
        return Program(tuple(values), turn, host_bytes, tuple(placed))

    @property
    def last_prefetch(self) -> int:
        """The place after which nothing of the host is needed."""
        return max((trip.prefetch for _, _, trip in self.trips), default=0)


def _first_gap(value: Value, trip: Trip, placed: list[tuple[int, Value, Trip]]) -> int:
    """The first place on the host that is free while ``value`` is there.

    A place is taken again as soon as the copy from it has been enqueued: more than emitted
    graphs ask of the runtime, which must keep such copies in order all the same.
    """
    offset = 0
    for _, other, taken in sorted(placed, key=lambda x: x[1].offset):
        apart = trip.prefetch < taken.offload or taken.prefetch < trip.offload
        if not apart and other.offset < offset + value.counted_bytes:
            offset = max(offset, other.offset + other.counted_bytes)
    return offset


CPU = torch.device("cpu")
MOST_POINTS = 80
"""How many chances an error lets pass in calls of its operator: before and after each thing
that these ask of the device, and at their ends."""
OPERATORS = ("open_arena", "offload", "release", "prefetch", "wait", "compute")
OF_PARAMETERS = ("fill", "start_filling", "take", "wait")


P = ParamSpec("P")
R = TypeVar("R")


class Fault(BaseException):
    """What a call of the runtime raises; an interrupt, say."""


class Faults:
    """An error at a random point of what an operator does, once in most loops."""

    def __init__(self, draw: random.Random) -> None:
        self._operator = draw.choice(OF_PARAMETERS if draw.random() < 1 / 4 else OPERATORS)
        self._left = draw.randrange(MOST_POINTS) if draw.random() < 3 / 4 else None
        self._inside: dict[int, str] = {}

    def call(self, operator: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What ``operator`` returns; there may be an error within, and after it."""
        thread = threading.get_ident()
        self._inside[thread] = operator.__name__
        try:
            result = operator(*args, **kwargs)
            self.point()
        finally:
            del self._inside[thread]
        return result

    def point(self) -> None:
        """Raise if the time has come. Not in finalizers, where Python forgets errors."""
        if self._left is None or self._inside.get(threading.get_ident()) != self._operator:
            return
        self._left -= 1
        if self._left < 0:
            self._left = None
            raise Fault


class Turns:
    """Loops in threads of their own, of which one runs at a time; which one is drawn."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._gates: dict[int, threading.Semaphore] = {}
        self._running = 0
        self._errors: list[BaseException] = []
        self._end = threading.Semaphore(0)

    def pause(self) -> None:
        """Maybe let another loop go on."""
        if len(self._gates) > 1 and self._draw.random() < 1 / 4:
            me = self._running
            self._let_go_on([loop for loop in self._gates if loop != me])
            self._gates[me].acquire()

    def run(self, loops: Sequence[Callable[[], None]]) -> None:
        """Run ``loops`` to their ends."""
        self._gates = {number: threading.Semaphore(0) for number in range(len(loops))}
        for number, loop in enumerate(loops):
            threading.Thread(target=self._one, args=(number, loop), daemon=True).start()
        self._let_go_on(list(self._gates))
        self._end.acquire()
        if self._errors:
            raise self._errors[0]

    def _one(self, number: int, loop: Callable[[], None]) -> None:
        self._gates[number].acquire()
        try:
            loop()
        except BaseException as error:
            self._errors.append(error)
        del self._gates[number], loop
        if self._gates:
            self._let_go_on(list(self._gates))
        else:
            self._end.release()

    def _let_go_on(self, loops: list[int]) -> None:
        self._running = self._draw.choice(loops)
        self._gates[self._running].release()


def in_thread(run: Callable[[], None]) -> None:
    """Run in a thread of its own, as autograd does; what it raises is raised here."""
    errors: list[BaseException] = []

    def catching() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catching, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


class Parameters:
    """Values in host memory that outlive the steps of their loop.

    Attributes:
        nbytes: size of each value.
    """

    def __init__(self, device: Device, faults: Faults, number: Callable[[], int]) -> None:
        self.nbytes = 2 * GRAIN_BYTES
        self._device, self._faults, self._number = device, faults, number
        self._arena = Arena(N_PARAMETERS * self.nbytes, device=CPU)
        self._lease = lease_of(self._arena.open())
        self._numbers: list[int | None] = [None] * N_PARAMETERS
        for which in range(N_PARAMETERS):
            self.write(which)

    def fetch(self, which: int) -> Tensor:
        """Its value on the device."""
        fresh = self._device.allocate(self.nbytes)
        self._faults.call(self._lease.fill, fresh, offset=which * self.nbytes)
        return fresh

    def start_fetching(self, which: int) -> Tensor:
        """Its value on the device, once waited for."""
        fresh = self._device.allocate(self.nbytes)
        self._faults.call(self._lease.start_filling, fresh, offset=which * self.nbytes)
        return fresh

    def read(self, which: int, fetched: Tensor) -> None:
        """A computation that reads what was fetched, as long as nothing writes in between."""
        number = self._numbers[which]
        if number is not None:
            self._device.expect(fetched, number)

    def write(self, which: int) -> None:
        """A new value, made on the device, whose memory is handed out again at once."""
        fresh = self._device.allocate(self.nbytes)
        number = self._number()
        self._device.write(fresh, number)
        self._numbers[which] = None  # if that fails, either is there
        self._faults.call(self._lease.take, fresh, offset=which * self.nbytes)
        self._numbers[which] = number

    def close(self) -> None:
        """Give the memory back, while copies may be queued."""
        self._arena.close()


class Step:
    """One step of a loop, with all that it holds.

    Attributes:
        streams: of the forward, and of the backward.
    """

    def __init__(self, loop: Loop, streams: tuple[FakeStream, FakeStream]) -> None:
        self.streams = streams
        self._loop = loop
        self._device = loop.device
        self._program = Program.drawn(loop.draw)
        self._numbers = [loop.number() for _ in self._program.values]
        self._tensors: dict[int, Tensor] = {}
        self._coming: dict[int, Tensor] = {}
        self._host: Tensor | None = None
        self._early: dict[int, Tensor] = {}

    def forward(self) -> None:
        """All places before the turn; what leaves then has left."""
        self._host = self._loop.faults.call(
            transfer.open_arena, self._loop.arena.id, self._program.host_bytes
        )
        for place in range(self._program.turn):
            self._at(place)
        self._leave(self._program.turn)
        self._early.clear()

    def backward(self) -> None:
        """All places from the turn on."""
        for place in range(self._program.turn, len(self._program.values)):
            self._at(place)

    def drop(self) -> None:
        """What is still there goes in any order."""
        # Lists of one: dropping what is in them is dropping it.
        of_all = self._tensors, self._coming, self._early
        held = [[tensor] for tensors in of_all for tensor in tensors.values()]
        if self._host is not None:
            held.append([self._host])
        self._tensors, self._coming, self._early, self._host = {}, {}, {}, None
        self._loop.draw.shuffle(held)
        for one in held:
            one.clear()

    def _at(self, place: int) -> None:
        if place != self._program.turn:
            self._leave(place)
        self._come_back(place)
        self._use_parameters()
        values = self._program.values
        for i, tensor in self._tensors.items():
            if values[i].read_by(place):
                self._device.expect(tensor[: values[i].nbytes], self._numbers[i])
        self._tensors[place] = self._loop.faults.call(self.compute, place)
        for i in [i for i in self._tensors if values[i].next <= place]:
            del self._tensors[i]
        self._device.progress(self._loop.draw.randrange(4))

    def _use_parameters(self) -> None:
        """Maybe read one, which was fetched early or is now, and write one."""
        draw, parameters = self._loop.draw, self._loop.parameters
        which = draw.randrange(3 * N_PARAMETERS)
        if parameters is None or which >= N_PARAMETERS:
            return
        if which in self._early:
            self._loop.faults.call(Arrival.wait, self._early[which])
            parameters.read(which, self._early.pop(which))
        else:
            parameters.read(which, parameters.fetch(which))
        if draw.random() < 1 / 2:
            parameters.write(which)
        following = draw.randrange(N_PARAMETERS)
        if following not in self._early:
            self._early[following] = parameters.start_fetching(following)

    def compute(self, place: int) -> Tensor:
        """The value that is made there."""
        made = self._device.allocate(self._program.values[place].nbytes)
        self._device.write(made, self._numbers[place])
        return made

    def _leave(self, place: int) -> None:
        call, host = self._loop.faults.call, self._host
        for i, value, trip in self._program.trips:
            if trip.offload == place:
                assert host is not None
                call(transfer.offload, self._tensors[i], host, value.offset)
        for i, value, trip in self._program.trips:
            if trip.release == place:
                assert host is not None
                call(transfer.release, self._tensors[i], host, value.offset)
                del self._tensors[i]

    def _come_back(self, place: int) -> None:
        call = self._loop.faults.call
        for i, value, trip in self._program.trips:
            if trip.prefetch == place:
                assert self._host is not None
                self._coming[i] = call(
                    transfer.prefetch, self._host, value.offset, value.counted_bytes, CPU
                )
        if place == max(self._program.last_prefetch, self._program.turn):
            self._host = None
        for i, value, _ in self._program.trips:
            if value.next == place:
                call(transfer.wait, self._coming[i])
                self._tensors[i] = self._coming.pop(i)


class Loop:
    """Steps, one after another or overlapping.

    Attributes:
        device: on which.
        draw: what chooses.
        faults: errors of the runtime.
        arena: host memory that all loops share.
        number: what the values are filled with.
        parameters: in host memory, in half of the loops.
    """

    def __init__(
        self,
        device: Device,
        *,
        faults: Faults,
        arena: Arena,
        number: Callable[[], int],
        streams: Sequence[FakeStream],
    ) -> None:
        self.device, self.faults, self.arena, self.number = device, faults, arena, number
        self.draw = device.draw
        self._streams = streams
        self._open: list[Step] = []
        self.parameters: Parameters | None = None

    def run(self) -> None:
        """Some steps; the last is a whole one, whatever happened before."""
        try:
            if self.draw.random() < 1 / 2:
                self.parameters = Parameters(self.device, self.faults, self.number)
        except Fault:
            pass
        self._run()
        if self.parameters is not None:
            self.parameters.close()

    def _run(self) -> None:
        for _ in range(self.draw.randint(2, 4)):
            self._begin()
            while self._open and (len(self._open) > 2 or self.draw.random() < 2 / 3):
                step = self._open.pop(self.draw.randrange(len(self._open)))
                if self.draw.random() < 4 / 5:
                    self._finish(step)
                self._drop(step)
                del step
            self.device.progress(self.draw.randrange(20))
        self._begin()
        while self._open:
            step = self._open.pop()
            self._finish(step)
            self._drop(step)
            del step

    def _begin(self) -> None:
        step = Step(self, (self.draw.choice(self._streams), self.draw.choice(self._streams)))
        with self.device.on(step.streams[0]):
            try:
                step.forward()
            except Fault:
                failed = True
            else:
                failed = False
        if failed:
            self._drop(step)
        else:
            self._open.append(step)

    def _finish(self, step: Step) -> None:
        forward, backward = step.streams

        def run() -> None:
            with self.device.on(backward):
                step.backward()

        self.device.order(forward, backward)
        try:
            if self.draw.random() < 1 / 2:
                in_thread(run)
            else:
                run()
        except Fault:
            pass
        else:
            self.device.order(backward, forward)

    def _drop(self, step: Step) -> None:
        """Maybe in a thread that knows nothing of the streams, as a collection of garbage is."""
        if self.draw.random() < 1 / 4:
            in_thread(step.drop)
        else:
            step.drop()
        self.device.order(*reversed(step.streams))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Nothing is dropped but where it is said."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run_schedule(seed: int) -> Device:
    """The device after a random schedule: its races, and what was wrong."""
    with _no_collections(), fake_device(seed) as device:
        turns = Turns(device.draw)
        faults = Faults(device.draw)

        def between() -> None:
            turns.pause()
            faults.point()

        device.between = between
        _run_loops(device, turns, faults)
        device.give_up()
        device.progress()
        return device


def _run_loops(device: Device, turns: Turns, faults: Faults) -> None:
    """One loop, or two in threads; at the end the arena goes, while copies may be queued."""
    arena = Arena(MOST_HOST_BYTES, device=CPU)
    # Numbers that do not come again for long.
    number = (n % 255 + 1 for n in itertools.count()).__next__

    def loop(*streams: FakeStream) -> Callable[[], None]:
        return Loop(device, faults=faults, arena=arena, number=number, streams=streams).run

    a, b = device.compute
    loops = device.draw.choice([[loop(a)], [loop(a, b)], [loop(a), loop(b)], [loop(a), loop(a)]])
    if len(loops) == 1:
        loops[0]()
    else:
        turns.run(loops)
    if device.draw.random() < 1 / 2:
        device.progress()
    arena.close()
