"""Gradients, handed over as soon as they are made.

AOTAutograd returns all gradients of a step at once. A leaf's gradient can be put, or added, into
its ``.grad`` earlier where autograd would do just that with it and nothing else: memory, and the
hooks that run after an accumulation, see it early then. All others are returned as ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.errors import BackwardError

_accumulating = threading.RLock()
"""Threads may go back through graphs of the same leaves. What ends with a backward that has raised
may end anywhere, in here too."""

_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Contributors:
    """Who adds to the gradients of a captured graph's leaves, as its backwards have shown.

    Autograd sums up all that reaches a leaf in one backward, and adds that to what it had. Bits
    and hooks are the same only where the leaf gets one gradient in a backward. A penalty on the
    weights makes another, and so do two forwards with one backward.

    Attributes:
        alone: primals whose gradient nothing else was added to, so far.
        joined: those where something was.
        summing: the backward in which autograd sums up: several steps take part.
    """

    alone: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    summing: int = -1

    def join(self, primal: int) -> None:
        """The gradient of ``primal`` is not the only one of its leaf."""
        self.alone.discard(primal)
        self.joined.add(primal)


def leaves_among(values: Sequence[Any]) -> list[Tensor | None]:
    """``None`` in place of what is no leaf; of subclasses, too, which have their own ways."""
    return [value if type(value) in _PLAIN and value.is_leaf else None for value in values]


def with_gradients(leaves: Sequence[Tensor | None]) -> frozenset[int]:
    """Places of those that have one."""
    return frozenset(
        [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.grad is not None]
    )


def adds(leaf: Tensor) -> bool:
    """Whether a leaf has a gradient to which another is added in place."""
    existing = leaf.grad
    return (
        existing is not None
        and type(existing) is Tensor
        and existing.layout is torch.strided
        and existing.dtype == leaf.dtype
        and existing.device == leaf.device
        and not leaf._backward_hooks
    )


def takes(leaf: Tensor, gradient: Tensor) -> bool:
    """Whether autograd would let a gradient that nobody else has be the leaf's ``.grad``.

    It copies one whose strides are not the leaf's.
    """
    return (
        leaf.grad is None
        and gradient.stride() == leaf.stride()
        and gradient.dtype == leaf.dtype
        and not leaf._backward_hooks
    )


class Gradients:
    """What becomes of the gradients of one backward.

    Args:
        leaves: by primal; ``None`` for what is none.
        places: for each of them: the edge of the backward's node that leads to it.
        own: primals whose gradient is all there is in its storage, and nobody else's.
        contributors: to the leaves' gradients.
        others: whether other steps of the model wait for their backward.

    Attributes:
        asked_for: gradients are for the caller of ``torch.autograd.grad``, not for leaves.
    """

    __slots__ = (
        "__weakref__", "_contributors", "_early", "_expected", "_first", "_hooked", "_learned",
        "_leaves", "_left", "_nodes", "_own", "_places", "_plain", "_returned", "_task",
        "asked_for",
    )  # fmt: skip

    def __init__(
        self,
        leaves: Sequence[Tensor | None],
        *,
        places: Mapping[int, int],
        own: frozenset[int],
        contributors: Contributors,
        others: bool,
    ) -> None:
        self._leaves = leaves
        self._places = places
        self._nodes = nodes = torch_compat.next_nodes()
        self._plain = torch_compat.all_accumulate(nodes)
        self._own = own
        self._contributors = contributors
        self._returned: list[Tensor | None] = [None] * len(leaves)
        self.asked_for = False
        self._first: list[int] = []  # left to autograd, as no hook waits for them
        self._learned: dict[int, tuple[int, int]] = {}
        # Of them, leaves that got no others so far; where each gradient lies, and its version.
        self._left: list[tuple[int, int, int]] = []
        self._expected: dict[int, tuple[Tensor | None, int, bool]] = {}
        self._task = task = torch_compat.current_backward()
        self._hooked: list[tuple[_Hooks, int, _Hook]] = []
        if others:
            contributors.summing = task
        self._early = contributors.summing != task and not torch.is_anomaly_enabled()

    def give(self, made: dict[int, Tensor]) -> None:
        """Gradients, by primal."""
        leaves, returned, plain = self._leaves, self._returned, self._plain
        for primal, gradient in made.items():
            leaf = leaves[primal]
            if leaf is not None:
                if plain and leaf.grad is None and not leaf._post_accumulate_grad_hooks:
                    self._first.append(primal)  # handed over it would stay as well
                elif self._hand_over(primal, leaf, gradient):
                    continue
            returned[primal] = gradient

    def finish(self) -> list[Tensor | None]:
        """What autograd gets, by primal."""
        returned, self._returned = self._returned, []
        if self._early:
            self._note_first(returned)
        if self._learned or self._expected or self._left:
            torch_compat.after_backward(self._check)
        return returned

    def _note_first(self, returned: Sequence[Tensor | None]) -> None:
        """Note where first gradients lie: autograd lets just these be in ``.grad`` where the leaf
        gets no others.
        """
        alone, joined = self._contributors.alone, self._contributors.joined
        known = [primal for primal in self._first if primal in alone]
        made: list[Any] = [returned[primal] for primal in known]
        self._left = [(i, g.data_ptr(), g._version) for i, g in zip(known, made, strict=True)]
        if len(known) == len(self._first):
            return
        for primal in self._first:
            if primal in self._own and primal not in alone and primal not in joined:
                leaf: Any = self._leaves[primal]
                gradient: Any = returned[primal]
                if takes(leaf, gradient):
                    self._learned[primal] = gradient.data_ptr(), gradient._version

    def _hand_over(self, primal: int, leaf: Tensor, gradient: Tensor) -> bool:
        """Whether the gradient needs no returning."""
        wanted = torch_compat.will_accumulate(self._nodes[self._places[primal]])
        if not wanted:
            self.asked_for |= wanted is None
            return wanted is False  # nobody asked for it
        contributors = self._contributors
        if not self._early or primal in contributors.joined:
            return False
        if primal not in contributors.alone:
            if primal in self._own and takes(leaf, gradient):
                self._learned[primal] = gradient.data_ptr(), gradient._version
                own: Gradients = weakref.proxy(self)  # which goes when a backward raises
                for hook in self._hooks_of(leaf)[:1]:
                    hook.before = lambda: own._learn(primal)
            return False
        with _accumulating:
            if adds(leaf):
                assert leaf.grad is not None
                leaf.grad += gradient
            elif primal in self._own and takes(leaf, gradient):
                leaf.grad = gradient
            else:
                return False
        hooks = self._hooks_of(leaf)
        for hook in hooks:  # autograd calls them at its end, too: they skip that
            hook.has_run = True
            hook.hook(leaf)
        now = leaf.grad
        self._expected[primal] = now, -1 if now is None else now._version, bool(hooks)
        return True

    def _hooks_of(self, leaf: Tensor) -> list[_Hook]:
        """Those that follow an accumulation, wrapped until this backward has ended."""
        hooks: _Hooks = leaf._post_accumulate_grad_hooks or {}
        found = []
        with _accumulating:
            for key, hook in list(hooks.items()):
                if not isinstance(hook, _Hook) or hook.task != self._task:
                    hook = hooks[key] = _Hook(hook, self._task)
                    self._hooked.append((hooks, key, hook))
                    if len(self._hooked) == 1:  # also where the backward raises
                        weakref.finalize(self, _unhook, self._hooked).atexit = False
                found.append(hook)
        return found

    def _learn(self, primal: int) -> None:
        """Autograd has accumulated: was it just what was returned?"""
        made, leaf = self._learned.pop(primal, None), self._leaves[primal]
        now = None if leaf is None else leaf.grad
        if made is None or leaf is None or now is None:
            return
        if now.data_ptr() == made[0] and now._version == made[1]:
            self._contributors.alone.add(primal)
        elif leaf._backward_hooks:  # which may have made another of it
            self._contributors.alone.discard(primal)
        else:
            self._contributors.join(primal)

    def _is_as_left(self) -> bool:
        """Whether first gradients of leaves that never got others are what autograd was left."""
        leaves: Sequence[Any] = self._leaves
        for primal, place, version in self._left:
            now = leaves[primal].grad
            if now is None or now.data_ptr() != place or now._version != version:
                return False
        return True

    def _check(self) -> None:
        """The backward has ended: nothing else must have been added to what was handed over.

        Autograd's thread may hold this for longer than ``backward()`` takes: no gradient with it.

        Raises:
            BackwardError: something was, after the leaf's own hooks had run.
        """
        if self._hooked:
            _unhook(self._hooked)
        if not self._is_as_left():
            self._learned |= {primal: (place, version) for primal, place, version in self._left}
        for primal in list(self._learned):
            self._learn(primal)
        if not self._expected:
            return
        handed_over, self._expected = self._expected, {}
        while handed_over:
            primal, (expected, version, hooked) = handed_over.popitem()
            leaf = self._leaves[primal]
            now = None if leaf is None else leaf.grad
            if now is expected and (now is None or now._version == version):
                continue
            self._contributors.join(primal)
            if hooked and now is not None:
                raise BackwardError(
                    f"the parameter of shape {tuple(now.shape)} got another gradient from outside "
                    "the compiled model after its post-accumulate hooks had run, which was never "
                    "so before: its hooks have seen a part of the gradient. Repeat the step; from "
                    "now on they run once all of it is there"
                )


class _Hook:
    """In the place of a post-accumulate hook, in a backward in which it may have run already.

    Attributes:
        hook: the user's, or one that is in its place in another thread's backward.
        task: the backward.
        has_run: autograd must not run it again in there.
        before: called once, before autograd runs it in there.
    """

    __slots__ = ("before", "has_run", "hook", "task")

    def __init__(self, hook: Callable[[Tensor], None], task: int) -> None:
        self.hook = hook
        self.task = task
        self.has_run = False
        self.before: Callable[[], None] | None = None

    def __call__(self, tensor: Tensor) -> None:
        if torch_compat.current_backward() == self.task:
            if self.before is not None:
                before, self.before = self.before, None
                before()
            if self.has_run:
                return
        self.hook(tensor)


_Hooks = dict[int, Callable[[Tensor], None]]
"""Hooks of a leaf, by the keys of their handles."""


def _unhook(hooked: list[tuple[_Hooks, int, _Hook]]) -> None:
    """Put back what was there before, unless it was removed."""
    with _accumulating:
        while hooked:
            hooks, key, own = hooked.pop()
            above = hooks.get(key)
            if above is own:
                hooks[key] = own.hook
            while isinstance(above, _Hook):
                if above.hook is own:
                    above.hook = own.hook
                above = above.hook
