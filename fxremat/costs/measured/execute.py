"""Runs blocks, either compiled or operation by operation with the allocator logged."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.costs.measured.cache import CostCache
from fxremat.costs.measured.measure import KernelClock
from fxremat.errors import CostError
from fxremat.ir import Request
from fxremat.passes.emit.code import compile_graph
from fxremat.passes.joint.graph import allocated_bytes, is_getitem, tensors_of
from fxremat.passes.parts.early_gradients import EarlyGradients
from fxremat.passes.stages.block import Block, Key, Mode, build_graph, call_of, node_key
from fxremat.progress import Note
from fxremat.runtime.effects import Effect
from fxremat.runtime.nested import Nested
from fxremat.runtime.sparse import SparseOperation
from fxremat.runtime.user_kernels import Launch

BLOCK_S, OPERATION_S = 0.01, 0.002
LEAST_RUNS, DOUBTFUL_RUNS, MOST_RUNS, AGREE = 2, 5, 20, 1.05
"""How often something is timed after it has run once. The fastest run counts, since other load on
the machine can only make a run slower.

| the fastest takes | runs of a block | runs of an operation by itself |
|---|---|---|
| 0.1 ms or less | 20 | 20 |
| 0.5 ms | 20 | 4 |
| 1 ms | 10 | 2 |
| 2 ms | 5 | 2 |
| 5 ms or more | 2 | 2 |

That is, runs end when their number times the fastest reaches 10 ms for a block, or 2 ms for an
operation. If there are fewer than 5, the two fastest must agree to within 5 %, else there are 5. An
operation's time is only used to distribute that of its block."""


def compile_block(block: Block) -> torch_compat.BoxedCallable:
    """Return a compiled function of a block, which takes its inputs in one list.

    It empties the list, and frees values on the way. Emitted code calls stages in the same way,
    except for collectives: no other process takes part. The gradient of a loss is assumed to be the
    expected one, as in most steps.
    """
    graph = build_graph(block)
    for node in graph.nodes:
        if isinstance(node.target, EarlyGradients):
            node.target = node.target.as_expected
        node.target, node.args = _stand_in(node.target), tuple(map(_stand_in, node.args))
    return compile_graph(graph).forward


def _stand_in(value: Any) -> Any:
    """Return the function to measure in place of ``value``, if that is an operation.

    A collective runs without other processes. An operation that runs graphs runs each of their
    branches, since made-up inputs decide nothing. An ordered effect has no effect. In place of a
    sparse tensor there are as many bytes.
    """
    if isinstance(value, (Nested, Effect, SparseOperation)):
        return value.stand_in
    return torch_compat.alone(value)


def least_s(
    run: Callable[[], Any], kept: list[Any], *, clock: KernelClock, enough_s: float
) -> float:
    """Return the seconds of the fastest of a few runs; see :data:`LEAST_RUNS`.

    Args:
        run: function to time, which has run before.
        kept: the result of that run, or empty. Each run drops it first, so that there are never
            two. Finally it is the result of the last run.
        clock: clock of the device.
        enough_s: seconds that the runs would take if all were as fast as the fastest; no further
            run begins after that.
    """

    def once() -> None:
        kept.clear()
        kept.append(run())

    seconds = list[float]()
    while not _are_enough(seconds, enough_s):
        seconds.append(clock.seconds_of(once))
        seconds.sort()
    return seconds[0]


def _are_enough(seconds: Sequence[float], enough_s: float) -> bool:
    """Return whether ``seconds`` of runs, which are sorted, make a further run unnecessary."""
    count = len(seconds)
    if count < LEAST_RUNS or (count < MOST_RUNS and count * seconds[0] < enough_s):
        return False
    return count >= DOUBTFUL_RUNS or seconds[1] <= AGREE * seconds[0]


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run operations inside on real data without gradients; restore random generators after."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch_compat.real_execution(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield


class HeldBytes:
    """Counts the bytes of distinct storages that values hold on one device.

    Args:
        device: the device. Storages on other devices are not counted.
        given: keys of storages that exist in any case, and are not counted.

    Attributes:
        nbytes: bytes held at present.
    """

    def __init__(self, device: torch.device, given: frozenset[int] = frozenset()) -> None:
        self.nbytes = 0
        self._device = device
        self._given = given
        self._holders: dict[int, tuple[int, int]] = {}  # by key: how many hold it, and its bytes

    def add(self, value: object) -> None:
        """Count the storages of ``value``, a tensor or several, as held once more."""
        for key, nbytes in self._counted(value):
            holders, counted_bytes = self._holders.get(key, (0, nbytes))
            self._holders[key] = holders + 1, counted_bytes
            self.nbytes += 0 if holders else nbytes

    def drop(self, value: object) -> None:
        """Count the storages of ``value``, which was added, as held once less."""
        for key, _ in self._counted(value):
            holders, counted_bytes = self._holders.pop(key, (1, 0))
            if holders > 1:
                self._holders[key] = holders - 1, counted_bytes
            else:
                self.nbytes -= counted_bytes

    def _counted(self, value: object) -> Iterator[tuple[int, int]]:
        for tensor in _tensors(value):
            for key, nbytes in torch_compat.storages_of(tensor).items():
                if tensor.device == self._device and key not in self._given:
                    yield key, allocated_bytes(nbytes, tensor.device)


class Operations:
    """Runs blocks operation by operation, and measures the operations that are not in a cache.

    Args:
        cache: measurements. New ones are added.
        device: device of the step, whose memory is measured.
        given: tensors that exist whether or not anything is measured.

    Attributes:
        peak_bytes: most bytes that :meth:`run` has held at once, in addition to ``given``.
    """

    def __init__(
        self, cache: CostCache, *, device: torch.device, given: Iterable[torch.Tensor] = ()
    ) -> None:
        self.peak_bytes = 0
        self._cache = cache
        self._device = device
        self._given = frozenset(key for t in given for key in torch_compat.storages_of(t))
        self._keys: dict[tuple[fx.Node, Mode], Key] = {}
        self._clock = KernelClock(device)

    def keys(self, block: Block) -> dict[fx.Node, Key]:
        """Return, for each operation of ``block``, the key of its measurements in the cache."""
        return {node: self._key(node, block) for node in block.operations}

    def _key(self, node: fx.Node, block: Block) -> Key:
        """Return the key of the measurements of ``node`` as ``block`` runs it."""
        run = node, block.mode_of(node)
        if run not in self._keys:
            self._keys[run] = node_key(node, block)
        return self._keys[run]

    def run(
        self,
        block: Block,
        inputs: Mapping[fx.Node, torch.Tensor],
        *,
        keep: Sequence[fx.Node] = (),
        again: Block | None = None,
        also_held: Iterable[torch.Tensor] = (),
    ) -> dict[fx.Node, torch.Tensor]:
        """Run each operation of ``block``, and return the values of ``keep``.

        Bytes of workspaces and results that are not in the cache are measured and added to it.

        Args:
            block: the operations.
            inputs: values of all that they read from outside.
            also_held: further tensors that the caller holds meanwhile.
            keep: nodes whose results are returned. Others are dropped after their last reader.
            again: a recomputation whose operations are among the block's, and whose inputs exist
                when the block runs these. They are timed too.

        Raises:
            CostError: an operation failed, or returned a copy where the trace has a view.
        """
        timed = {} if again is None else dict.fromkeys(again.nodes, again)
        values: dict[fx.Node, Any] = dict(inputs)
        dying = _last_read(block, timed, keep)
        held = HeldBytes(self._device, self._given)
        for value in (*inputs.values(), *also_held):  # the caller holds them to the end
            held.add(value)
        for node in block.nodes:
            values[node] = self._result(node, block, timed.get(node), values)
            held.add(values[node])
            workspace_bytes = 0 if is_getitem(node) else self._workspace_bytes(node, block)
            self.peak_bytes = max(self.peak_bytes, held.nbytes + workspace_bytes)
            for dead in dying.get(node, ()):
                if dead not in inputs:
                    held.drop(values[dead])
                del values[dead]
        return {node: values[node] for node in keep}

    def run_single(self, block: Block, inputs: Mapping[fx.Node, torch.Tensor]) -> Any:
        """Run the only operation of ``block``, measure its bytes and seconds, and return its value.

        Raises:
            CostError: it failed; a :class:`TooLargeError` if the device's memory did not suffice.
        """
        (node,) = block.nodes
        return self.run(block, inputs, keep=(node,), again=block)[node]

    def _workspace_bytes(self, node: fx.Node, block: Block) -> int:
        """Return the bytes that ``node``, which has run, allocates temporarily, from the cache."""
        return self._cache.workspace_bytes[self._key(node, block)]

    def _result(
        self, node: fx.Node, block: Block, again: Block | None, values: Mapping[fx.Node, Any]
    ) -> Any:
        """Return the value of ``node``, and measure it as it runs in ``block`` and in ``again``."""
        if is_getitem(node):
            return _call(node, block, values)
        if again is not None and self._key(node, again) not in self._cache.operation_s:
            kept = [self._logged(node, again, values)]
            self._cache.operation_s[self._key(node, again)] = least_s(
                _bound(node, again, values), kept, clock=self._clock, enough_s=OPERATION_S
            )
            if self._key(node, again) == self._key(node, block):
                return kept[0]
            kept.clear()
        return self._logged(node, block, values)

    def _logged(self, node: fx.Node, block: Block, values: Mapping[fx.Node, Any]) -> Any:
        """Return the value of ``node``; cache the bytes that it allocates, if they are new."""
        key = self._key(node, block)
        if key in self._cache.workspace_bytes:
            return _call(node, block, values)
        if isinstance(node.target, Launch):
            tune(node.target, _bound(node, block, values).args, self._device, note=self._note)
        with torch_compat.AllocationLog(self._device) as log:
            value = _call(node, block, values)
        fresh = _fresh(node, block, value, values)
        sizes = [_allocated_bytes(t) if t.device == self._device else 0 for t in fresh]
        results = {torch_compat.storage_key(t): _allocated_bytes(t) for t in _tensors(value)}
        self._cache.result_bytes[key] = tuple(results.values())
        self._cache.as_traced[key] = _lies_as_traced(node, value)
        changes = [change for _mark, change in log.events if change]
        on_cuda = self._device.type == "cuda"  # only CUDA's allocator rounds requests up
        self._cache.asked[key] = requests_from(changes, sizes) if on_cuda else ()
        self._cache.workspace_bytes[key] = max(log.peak_bytes - sum(sizes), 0)
        return value

    def _note(self, nbytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, nbytes)


def tune(launch: Launch, arguments: Sequence[Any], device: torch.device, *, note: Note) -> None:
    """Let Triton tune a user's kernel for ``arguments``, unless it has.

    ``note`` is called with the bytes that this held, which are not a workspace of a step.
    """
    if not launch.is_tuned_for(*arguments):
        with torch_compat.noted_bytes(device, note):
            launch.tune(*arguments)


def requests_from(changes: Sequence[int], sizes: Sequence[int]) -> tuple[Request, ...]:
    """Derive the requests of an operation from the changes that it made to allocated memory.

    The order matters to an allocator. A fused dropout requests its mask before its output, and the
    backward of attention requests several workspaces that do not all exist at once.

    Args:
        changes: changes of the allocator while the operation ran: bytes allocated, or, if negative,
            freed.
        sizes: bytes of the results in the order of their return; 0 where the device has none.

    Returns:
        Requests in order: ``(place, 0)`` for a result, ``(key, bytes)`` for a piece of workspace,
        which is freed under the same key. Keys are below 0. It is empty where the requests cannot
        be derived, or are the results only, in the order of their return.
    """
    live: list[int] = []
    ends: dict[int, int] = {}
    for i, change in enumerate(changes):
        if change > 0:
            live.append(i)
        else:  # any live block of that size will do
            start = next((j for j in reversed(live) if changes[j] == -change), None)
            if start is None:
                continue  # it was allocated before the operation
            live.remove(start)
            ends[i] = start
    places: dict[int, int] = {}
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        fitting = [(changes[i], i) for i in live if changes[i] >= sizes[place] > 0]
        if sizes[place] and not fitting:
            return ()
        if fitting:
            places[min(fitting)[1]] = place
            live.remove(min(fitting)[1])
    requests: list[Request] = [(place, 0) for place, nbytes in enumerate(sizes) if not nbytes]
    keys = {i: -1 - j for j, i in enumerate((*ends.values(), *live))}
    for i, change in enumerate(changes):
        if i in places:
            requests.append((places[i], 0))
        elif i in keys:
            requests.append((keys[i], change))
        elif i in ends:
            requests.append((keys[ends[i]], change))
    requests += [(keys[i], -changes[i]) for i in live]  # not returned, so it is freed soon
    return () if requests == [(place, 0) for place in range(len(sizes))] else tuple(requests)


def _last_read(
    block: Block, timed: Mapping[fx.Node, Block], keep: Sequence[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Return, for each operation, the values to drop after it, since nothing reads them later.

    Args:
        block: the operations, in order.
        timed: blocks of recomputations that are timed along with an operation.
        keep: nodes whose values are never dropped.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in block.nodes:
        also = timed[node].sources(node) if node in timed else ()
        last.update(dict.fromkeys((*block.sources(node), *also, node), node))
    kept = set(keep)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        if value not in kept:
            dying.setdefault(reader, []).append(value)
    return dying


class TooLargeError(CostError):
    """An operation that was to be measured does not fit in what the device has free."""


def _call(node: fx.Node, block: Block, values: Mapping[fx.Node, Any]) -> Any:
    try:
        return _bound(node, block, values)()
    except Exception as error:
        target, _args, _kwargs = call_of(node, block.mode_of(node))
        too_large = isinstance(error, torch.OutOfMemoryError)
        raise (TooLargeError if too_large else CostError)(
            f"operation {node.name} ({target}) of stage {block.stage} cannot be run separately: "
            f"{error}",
            code="FXR612",
        ) from error


def _bound(node: fx.Node, block: Block, values: Mapping[fx.Node, Any]) -> functools.partial[Any]:
    """Return a function without arguments that computes ``node`` as ``block`` runs it.

    It computes everything afresh, also gradients that a forward has computed early.
    """
    target, args, kwargs = call_of(node, block.mode_of(node))
    target = target.compute_again if isinstance(target, EarlyGradients) else _stand_in(target)
    real_args = torch.fx.map_arg(tuple(map(_stand_in, args)), lambda n: values[n])
    real_kwargs = torch.fx.map_arg(kwargs, lambda n: values[n])
    return functools.partial(target, *real_args, **real_kwargs)


def _tensors(value: object) -> list[torch.Tensor]:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _allocated_bytes(t: torch.Tensor) -> int:
    nbytes = torch_compat.storages_of(t).values()
    return sum(allocated_bytes(n, t.device) for n in nbytes)


def _lies_as_traced(node: fx.Node, value: object) -> bool:
    """Return whether the tensors of ``value`` have the strides, offsets and devices of their trace.

    Seed and offset of an attention's dropout are traced on the GPU, but are on the CPU.
    """

    def places(tensors: Iterable[torch.Tensor]) -> list[tuple[object, ...]]:
        return [(t.stride(), t.storage_offset(), t.device) for t in tensors]

    return places(_tensors(value)) == places(tensors_of(node))


def _fresh(
    node: fx.Node, block: Block, value: object, values: Mapping[fx.Node, Any]
) -> list[torch.Tensor]:
    """Return one tensor for each storage that running ``node`` allocated for its ``value``."""
    key, sources = torch_compat.storage_key, block.sources(node)
    read = (t for n in sources for t in _tensors(values[n]))
    given = {own for t in read for own in torch_compat.storages_of(t)}
    made = (t for t in _tensors(value) if torch_compat.host_owner(t) is None)
    fresh = {key(t): t for t in made if key(t) not in given}
    traced_given = {key(t) for n in sources for t in tensors_of(n)}
    traced = {key(t) for t in tensors_of(node)} - traced_given
    if len(fresh) > len(traced):
        raise CostError(
            f"operation {node.name} ({node.target}) of stage {block.stage} allocates "
            f"{len(fresh)} storages where its trace has {len(traced)}, so its memory cannot be "
            "planned. Its fake implementation must return what it allocates: torch.library.opcheck "
            "tests that",
            code="FXR612",
        )
    return list(fresh.values())
