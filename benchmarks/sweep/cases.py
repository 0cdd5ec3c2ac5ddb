"""Operators and modules of torch's test databases, each in a small model that trains."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SEED = 11

LOOKED_AT = 16
"""Samples of each, from which some are taken."""


@dataclass(frozen=True, slots=True)
class Case:
    """An operator, or a module in one of its modes.

    Attributes:
        kind: ``"op"``, ``"train"`` or ``"eval"``: the last two are of a module.
        name: in torch's database; operators with a variant have it after a dot.
        dtype: of what is differentiated.
        index: in the database.
        form: of the model, one of :data:`FORMS`.
    """

    kind: str
    name: str
    dtype: str
    index: int
    form: str = "embedded"

    @property
    def row(self) -> Row:
        """What rows of it have in common."""
        row = {"kind": self.kind, "name": self.name, "dtype": self.dtype, "index": self.index}
        return row if self.form == "embedded" else {**row, "form": self.form}


def databases() -> tuple[list[Any], list[Any]]:
    """Torch's operators and modules.

    Operators that draw random numbers do not seed the generator in each call, which Dynamo does
    not capture.
    """
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal.common_modules import module_db

    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return database.op_db, module_db


def cases(kinds: list[str], dtypes: list[str], form: str = "embedded") -> list[Case]:
    """All that can be differentiated on a CPU, one after the other."""
    operators, modules = databases()
    found = []
    for kind, dtype in itertools.product(kinds, dtypes):
        for index, info in enumerate(operators if kind == "op" else modules):
            if DTYPES[dtype] not in info.supported_dtypes("cpu"):
                continue
            if kind != "op":
                found.append(Case(kind, info.name, dtype, index, form))
            elif info.supports_autograd and DTYPES[dtype] in info.supported_backward_dtypes("cpu"):
                found.append(Case(kind, info.full_name, dtype, index, form))
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor among the arguments of a call.

    Attributes:
        number: of the parameter, or of the model's argument.
        trained: a parameter stands here.
    """

    number: int
    trained: bool


class Plain(nn.Module):
    """A call by itself: its differentiated tensors are parameters, and it returns what it returns.

    Args:
        call: an operator, or a module.
        args, kwargs: of one call.
        after: applied to the results before a loss is computed of them.
    """

    has_loss = False
    """Whether the first output is the loss."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.call, self.after = call, after
        self.weights = nn.ParameterList()
        self.given: list[Tensor] = []
        self.slots: dict[int, Slot] = {}
        self.args, self.kwargs = self._emptied(args), self._emptied(kwargs)

    def forward(self, *given: Tensor) -> Any:
        """Return the results of the call."""
        weights = list(self.weights)
        return self.call(*filled(self.args, weights, given), **filled(self.kwargs, weights, given))

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the sum of all numbers among the results that have a gradient."""
        loss = torch.zeros(())
        for y in tensors_of(outputs if self.after is None else self.after(outputs)):
            if is_trained(y) and y.requires_grad:
                y = y if y.layout is torch.strided else y.to_dense()
                loss = loss + (torch.real(y) + torch.imag(y) if y.is_complex() else y).float().sum()
        return loss

    def _emptied(self, tree: Any) -> Any:
        """``tree`` with slots in place of tensors, which are made parameters or arguments."""
        if isinstance(tree, Tensor):
            if id(tree) not in self.slots:
                self.slots[id(tree)] = self._slot_of(tree)
            return self.slots[id(tree)]
        if type(tree) in (list, tuple):
            return type(tree)([self._emptied(each) for each in tree])
        if type(tree) is dict:
            return {key: self._emptied(each) for key, each in tree.items()}
        return tree

    def _slot_of(self, tensor: Tensor) -> Slot:
        trained, copied = tensor.requires_grad, self._copied(tensor)
        self.weights.append(nn.Parameter(copied)) if trained else self.given.append(copied)
        return Slot(len(self.weights if trained else self.given) - 1, trained)

    @staticmethod
    def _copied(tensor: Tensor) -> Tensor:
        """A copy with the same strides, also where elements share their memory."""
        if tensor.layout is not torch.strided:
            return tensor.detach().clone()
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        stored = tensor.detach().as_strided((size,), (1,), 0)
        return stored.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Embedded(Plain):
    """A call between elementwise operations, and a loss of what it returns.

    Each tensor of the call that is differentiated is a parameter times one, so that it keeps its
    numbers. Each number that the call returns goes through ``tanh`` and a scale for its column.
    """

    has_loss = True

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(call, args, kwargs, after)
        self.register_buffer("one", torch.ones(()))
        with torch.no_grad():
            # A copy: a call changes a module's buffers, and makes a lazy one an ordinary one.
            found = self._called(self.given, copy.deepcopy(call))
        columns = [y.new_empty(y.shape[-1:]) for y in found if is_trained(y)]
        scales = [torch.linspace(0.5, 1.5, y.numel()).to(y).view_as(y) for y in columns]
        self.scales = nn.ParameterList(scales)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the loss, and what it is of."""
        number, loss, results = 0, torch.zeros(()), []
        for y in self._called(given, self.call):
            if is_trained(y):
                y = torch.tanh(y) * self.scales[number]
                number += 1
                loss = loss + (torch.real(y) + torch.imag(y) if y.is_complex() else y).float().sum()
            results.append(y)
        return loss, *results

    def _called(self, given: Any, call: Callable[..., Any]) -> list[Tensor]:
        before = [torch.neg(torch.neg(w * self.one.to(w.dtype))) for w in self.weights]
        found = call(*filled(self.args, before, given), **filled(self.kwargs, before, given))
        return tensors_of(found if self.after is None else self.after(found))

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the loss that the model has computed."""
        loss: Tensor = outputs[0]
        return loss

    @staticmethod
    def _copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone()


class Scaled(Plain):
    """A call on arguments that require gradients, times one parameter; it returns its sum."""

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        after: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(call, args, kwargs, after)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *given: Tensor) -> Tensor:
        """Return the sum of all results that have a gradient."""
        scaled = [x * self.scale.to(x.dtype) if x.requires_grad else x for x in given]
        found = self.call(*filled(self.args, (), scaled), **filled(self.kwargs, (), scaled))
        return super().loss_of(found)

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the sum that the model has computed."""
        loss: Tensor = outputs
        return loss

    def _slot_of(self, tensor: Tensor) -> Slot:
        self.given.append(self._copied(tensor).requires_grad_(tensor.requires_grad))
        return Slot(len(self.given) - 1, trained=False)


FORMS: dict[str, type[Plain]] = {"embedded": Embedded, "plain": Plain, "scaled": Scaled}


def is_trained(value: Tensor) -> bool:
    """Whether a result has a share in the loss."""
    return value.is_floating_point() or value.is_complex()


def filled(tree: Any, trained: Any, given: Any) -> Any:
    """``tree`` with tensors in its slots."""
    if isinstance(tree, Slot):
        return trained[tree.number] if tree.trained else given[tree.number]
    if type(tree) in (list, tuple):
        return type(tree)([filled(each, trained, given) for each in tree])
    if type(tree) is dict:
        return {key: filled(each, trained, given) for key, each in tree.items()}
    return tree


def tensors_of(results: Any) -> list[Tensor]:
    """All tensors that a call returned."""
    if isinstance(results, Tensor):
        return [results]
    if isinstance(results, dict):
        return tensors_of(list(results.values()))
    if isinstance(results, (list, tuple)):
        found = []
        for each in results:
            found += tensors_of(each)
        return found
    return []


Make = Callable[[], Plain]
"""Makes the same model each time."""


def models(case: Case, samples: int) -> Iterator[Make]:
    """A model for each of some samples in which something is differentiated.

    Of the first :data:`LOOKED_AT` that is the one of the most numbers, the first and the last.
    """
    operators, modules = databases()
    torch.manual_seed(SEED)
    if case.kind == "op":
        found = _operators(operators[case.index], case)
    else:
        found = _modules(modules[case.index], case)
    some = list(itertools.islice(found, LOOKED_AT))
    if some:
        largest = max(range(len(some)), key=lambda n: some[n][0])
        order = dict.fromkeys([largest, 0, len(some) - 1, *range(len(some))])
        yield from (some[n][1] for n in itertools.islice(order, samples))


def _operators(info: Any, case: Case) -> Iterator[tuple[int, Make]]:
    for sample in info.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=True):
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        tensors, after = tensors_of([args, kwargs]), sample.output_process_fn_grad
        if any(x.requires_grad for x in tensors):
            make = functools.partial(FORMS[case.form], info.op, args, kwargs, after)
            yield sum(x.numel() for x in tensors), make


def _modules(info: Any, case: Case) -> Iterator[tuple[int, Make]]:
    training = case.kind == "train"
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=DTYPES[case.dtype], requires_grad=True, training=training
    )
    for each in inputs:
        call = each.forward_input
        if call is not None:
            tensors = tensors_of([call.args, call.kwargs])
            make = functools.partial(_module, info, each, case, training=training)
            yield sum(x.numel() for x in tensors), make


def _module(info: Any, each: Any, case: Case, *, training: bool) -> Plain:
    torch.manual_seed(SEED)
    made = each.constructor_input
    inside = info.module_cls(*made.args, **made.kwargs).to(DTYPES[case.dtype]).train(training)
    return FORMS[case.form](inside, each.forward_input.args, each.forward_input.kwargs)
