"""Gradients that are handed over as soon as they are computed.

AOTAutograd returns all gradients of a step at once. The gradient of a leaf can be put, or added,
into its ``.grad`` earlier, if autograd would do exactly that with it and nothing else. Memory is
then freed earlier, and post-accumulate hooks run earlier. All other gradients are returned to
autograd.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fxremat import torch_compat
from fxremat.errors import BackwardError
from fxremat.runtime.host_parameter import parameter_of
from fxremat.runtime.host_tensor import HostTensor

_accumulating = threading.RLock()
"""Guards the gradients of leaves: several threads may run backwards of graphs that share leaves. A
failed backward may be cleaned up at any point, also while the lock is held; so it is reentrant."""

_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class Contributors:
    """Records which leaves get their gradient from one captured graph only, as backwards show.

    Autograd sums up all gradients that reach a leaf in one backward, and adds the sum to ``.grad``.
    Handing a gradient over gives the same bits, and runs hooks at the same points, only if the leaf
    gets no other gradient in that backward. A penalty on the weights makes another one, and so do
    two forwards with one backward.

    Attributes:
        sole: primals whose gradient was the only one of their leaf so far.
        joined: primals whose leaf also got another gradient.
        taken: primals whose first gradient is taken away by a post-accumulate hook, such as that of
            an optimizer that steps in the backward.
        held: primals whose hooks have left such a gradient, or got it only at the end.
        summing: number of the backward in which several steps take part, so that autograd sums up.
    """

    sole: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    summing: int = -1

    def join(self, primal: int) -> None:
        """Record that the leaf of ``primal`` also got another gradient."""
        self.sole.discard(primal)
        self.joined.add(primal)


def leaves_among(values: Sequence[Any]) -> list[Tensor | None]:
    """Return ``values`` with ``None`` in place of non-leaves and tensor subclasses.

    In place of the bytes of a parameter in host memory there is the parameter.
    """
    leaves = [value if type(value) in _PLAIN and value.is_leaf else None for value in values]
    if not torch_compat.any_in_host():
        return leaves
    return [None if leaf is None else parameter_of(leaf) for leaf in leaves]


def with_gradients(leaves: Sequence[Tensor | None]) -> frozenset[int]:
    """Return the indices of the leaves whose ``.grad`` exists."""
    return frozenset(
        [i for i, leaf in enumerate(leaves) if leaf is not None and leaf.grad is not None]
    )


class HostedGradients(Protocol):
    """Moves gradients to host memory."""

    def take_gradient(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Return a leaf's first gradient, in host memory if it belongs in that memory."""

    def collect(self, leaves: Iterable[Tensor | None]) -> None:
        """Move the leaves' gradients that are on the device at the end of a backward."""


def adds(leaf: Tensor) -> bool:
    """Return whether another gradient can be added in place to the ``.grad`` of a leaf."""
    existing = leaf.grad
    return (
        existing is not None
        and (type(existing) is Tensor or isinstance(existing, HostTensor))
        and existing.layout is torch.strided
        and existing.dtype == leaf.dtype
        and existing.device == leaf.device
        and not leaf._backward_hooks
    )


def takes(leaf: Tensor, gradient: Tensor) -> bool:
    """Return whether autograd would make ``gradient`` the ``.grad`` of the leaf without a copy.

    The gradient must not be referenced elsewhere.
    """
    return (
        leaf.grad is None
        and gradient.layout is leaf.layout is torch.strided
        and gradient.stride() == leaf.stride()
        and gradient.dtype == leaf.dtype
        and not leaf._backward_hooks
    )


def _place(gradient: Tensor) -> int:
    """Return what identifies the memory of a gradient while that exists."""
    if isinstance(gradient, HostTensor):
        return id(gradient.content)
    return gradient.data_ptr()


class Gradients:
    """Passes the gradients of one backward to leaves as soon as possible, and the rest to autograd.

    Args:
        leaves: leaves by primal; ``None`` for other primals.
        places: for each leaf, the edge of the backward's node that leads to it.
        own: primals whose gradient fills a storage that nothing else uses.
        contributors: which leaves get their gradient from this graph only.
        others: whether other steps of the model have a pending backward.
        hosting: moves gradients to host memory; ``None``: all stay on the device.
        assumed: primals whose gradient the step's plan assumes to be taken by a hook at once.
        note_held: called at the end of the backward with those whose gradient was not.

    Attributes:
        asked_for: whether gradients are for ``torch.autograd.grad``, not for leaves.
    """

    __slots__ = (
        "__weakref__", "_assumed", "_candidates", "_contributors", "_early", "_expected",
        "_fed", "_first", "_hooked", "_hosting", "_kept_first", "_leaves", "_nodes",
        "_note_held", "_own", "_places", "_plain", "_returned", "_task", "_waiting",
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
        hosting: HostedGradients | None = None,
        assumed: frozenset[int] = frozenset(),
        note_held: Callable[[frozenset[int]], None] = lambda _primals: None,
    ) -> None:
        self._leaves = leaves
        self._hosting = hosting
        self._places = places
        self._nodes = nodes = torch_compat.next_nodes()
        self._plain = torch_compat.all_accumulate(nodes)
        self._own = own
        self._contributors = contributors
        self._returned: list[Tensor | None] = [None] * len(leaves)
        self.asked_for = False
        self._first: list[int] = []  # first gradients, returned to autograd: no hook waits
        # Address and version of gradients that may turn out to be the only ones of their leaves.
        self._candidates: dict[int, tuple[int, int]] = {}
        # Primal, address and version of first gradients of leaves that never got others.
        self._kept_first: list[tuple[int, int, int]] = []
        self._expected: dict[int, tuple[Tensor | None, int, bool]] = {}
        self._task = task = torch_compat.current_backward()
        self._hooked: list[tuple[_Hooks, int, _Hook]] = []
        if others:
            contributors.summing = task
        self._early = contributors.summing != task and not torch.is_anomaly_enabled()
        self._assumed, self._note_held = assumed, note_held
        # First gradients of leaves with hooks: whether hooks have taken them away at once.
        self._waiting: dict[int, bool] = {}
        self._fed: tuple[set[Any] | None] | None = None  # nodes that others feed, once it is asked

    def give(self, made: dict[int, Tensor]) -> None:
        """Put gradients into their leaves' ``.grad`` where allowed; keep others for :meth:`finish`.

        ``made`` has the gradients by primal.
        """
        leaves, returned, plain = self._leaves, self._returned, self._plain
        for primal, gradient in made.items():
            leaf = leaves[primal]
            if leaf is not None:
                if self._hosting is not None and torch_compat.will_accumulate(
                    self._nodes[self._places[primal]]
                ):
                    gradient = made[primal] = self._hosting.take_gradient(leaf, gradient)
                if plain and leaf.grad is None and not leaf._post_accumulate_grad_hooks:
                    self._first.append(primal)  # handing it over would free nothing
                elif self._hand_over(primal, leaf, gradient):
                    continue
            returned[primal] = gradient

    def finish(self) -> list[Tensor | None]:
        """Return the gradients for autograd, by primal; ``None`` for those that leaves have got."""
        returned, self._returned = self._returned, []
        if self._early:
            self._note_first(returned)
        if self._candidates or self._expected or self._kept_first or self._waiting:
            torch_compat.after_backward(self._check)
        if self._hosting is not None:
            hosting, leaves = self._hosting, self._leaves
            torch_compat.after_backward(lambda: hosting.collect(leaves))
        return returned

    def _note_first(self, returned: Sequence[Tensor | None]) -> None:
        """Record the addresses of leaves' first gradients, to see later whether autograd kept them.

        It keeps them if the leaf gets no others. ``returned`` has the gradients by primal.
        """
        sole, joined = self._contributors.sole, self._contributors.joined
        first = [primal for primal in self._first if primal in sole]
        made: list[Any] = [returned[primal] for primal in first]
        self._kept_first = [(i, _place(g), g._version) for i, g in zip(first, made, strict=True)]
        if len(first) == len(self._first):
            return
        for primal in self._first:
            if primal in self._own and primal not in sole and primal not in joined:
                leaf: Any = self._leaves[primal]
                gradient: Any = returned[primal]
                if takes(leaf, gradient):
                    self._candidates[primal] = _place(gradient), gradient._version

    def _hand_over(self, primal: int, leaf: Tensor, gradient: Tensor) -> bool:
        """Put a gradient into the ``.grad`` of its leaf if allowed; return whether that was done.

        Also returns ``True`` for a gradient that nobody asked for. Others are for autograd.
        """
        wanted = torch_compat.will_accumulate(self._nodes[self._places[primal]])
        if not wanted:
            self.asked_for |= wanted is None
            return wanted is False  # nobody asked for it
        contributors, has_hooks = self._contributors, bool(leaf._post_accumulate_grad_hooks)
        is_first = has_hooks and leaf.grad is None
        if is_first:
            self._waiting[primal] = False
        if not self._early or primal in contributors.joined:
            return False
        is_only = self._is_only(primal) if has_hooks else None
        if is_only is False:
            contributors.join(primal)
            return False
        if primal not in contributors.sole and not is_only:
            if primal in self._own and takes(leaf, gradient):
                self._candidates[primal] = _place(gradient), gradient._version
                proxy: Gradients = weakref.proxy(self)  # freed when a backward raises
                for hook in self._hooks_of(leaf)[:1]:
                    hook.before = lambda: proxy._judge(primal)
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
        for hook in hooks:  # autograd calls them again at the end; they ignore that
            hook.has_run = True
            hook.hook(leaf)
        now = leaf.grad
        self._expected[primal] = now, -1 if now is None else now._version, bool(hooks)
        if is_first:
            self._waiting[primal] = now is None
        return True

    def _is_only(self, primal: int) -> bool | None:
        """Return whether the leaf of ``primal`` gets no other gradient in this backward.

        ``None``: it is not known.
        """
        if self._fed is None:
            self._fed = (torch_compat.fed_by_others(),)
        (fed,) = self._fed
        return None if fed is None else self._nodes[self._places[primal]] not in fed

    def _hooks_of(self, leaf: Tensor) -> list[_Hook]:
        """Return the post-accumulate hooks of a leaf, wrapped until this backward has ended."""
        hooks: _Hooks = leaf._post_accumulate_grad_hooks or {}
        wrapped = []
        with _accumulating:
            for key, hook in list(hooks.items()):
                if not isinstance(hook, _Hook) or hook.task != self._task:
                    hook = hooks[key] = _Hook(hook, self._task)
                    self._hooked.append((hooks, key, hook))
                    if len(self._hooked) == 1:  # unwraps them if the backward raises
                        weakref.finalize(self, _unhook, self._hooked).atexit = False
                wrapped.append(hook)
        return wrapped

    def _judge(self, primal: int) -> None:
        """Record whether the leaf of ``primal`` got just the gradient that autograd was given."""
        made, leaf = self._candidates.pop(primal, None), self._leaves[primal]
        now = None if leaf is None else leaf.grad
        if made is None or leaf is None or now is None:
            return
        if _place(now) == made[0] and now._version == made[1]:
            self._contributors.sole.add(primal)
        elif leaf._backward_hooks:  # these may have replaced it
            self._contributors.sole.discard(primal)
        else:
            self._contributors.join(primal)

    def _first_unchanged(self) -> bool:
        """Return whether leaves that never got other gradients still have their first ones."""
        leaves: Sequence[Any] = self._leaves
        for primal, place, version in self._kept_first:
            now = leaves[primal].grad
            if now is None or _place(now) != place or now._version != version:
                return False
        return True

    def _check(self) -> None:
        """Check at the end of the backward that leaves with an early gradient got no other one.

        Autograd's thread may hold this object for longer than ``backward()`` takes, so it keeps no
        gradient.

        Raises:
            BackwardError: another one was added after the leaf's hooks had run.
        """
        if self._hooked:
            _unhook(self._hooked)
        if not self._first_unchanged():
            self._candidates |= {i: (place, version) for i, place, version in self._kept_first}
        for primal in list(self._candidates):
            self._judge(primal)
        if self._waiting:
            self._note_hooks()
        handed_over, self._expected = self._expected, {}
        while handed_over:
            primal, (expected, version, hooked) = handed_over.popitem()
            leaf = self._leaves[primal]
            now = None if leaf is None else leaf.grad
            if now is expected and (now is None or now._version == version):
                self._contributors.sole.add(primal)
                continue
            self._contributors.join(primal)
            if hooked and now is not None:
                raise BackwardError(
                    f"the parameter of shape {tuple(now.shape)} got another gradient from outside "
                    "the compiled model after its post-accumulate hooks had run, for the first "
                    "time: its hooks received only a part of the gradient. Repeat the step; from "
                    "now on they run once the gradient is complete",
                    code="FXR707",
                )

    def _note_hooks(self) -> None:
        """Record whose first gradients hooks have taken away, and whose were held nevertheless."""
        contributors, held = self._contributors, set[int]()
        for primal, has_left in self._waiting.items():
            leaf: Any = self._leaves[primal]
            is_taken = has_left or (leaf.grad is None and primal not in self._expected)
            (contributors.taken if is_taken else contributors.held).add(primal)
            if not has_left and primal in self._assumed:
                held.add(primal)
                if not self._early or primal in contributors.sole:
                    contributors.held.add(primal)
        self._waiting.clear()
        if held:
            self._note_held(frozenset(held))


class _Hook:
    """Wraps a post-accumulate hook in a backward in which it may run early.

    Attributes:
        hook: the user's hook, or the wrapper of another thread's backward.
        task: the backward.
        has_run: whether it has run early, so that autograd's call is ignored.
        before: called once, before autograd runs the hook in this backward.
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
    """Put hooks back in place of their wrappers, unless they were removed.

    ``hooked`` has the hooks of a leaf, a key among these, and the wrapper; it is emptied.
    """
    with _accumulating:
        while hooked:
            hooks, key, wrapper = hooked.pop()
            outer = hooks.get(key)
            if outer is wrapper:
                hooks[key] = wrapper.hook
            while isinstance(outer, _Hook):
                if outer.hook is wrapper:
                    outer.hook = wrapper.hook
                outer = outer.hook
