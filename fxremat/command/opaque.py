"""Operations of captured graphs that are planned as one each, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from fxremat import torch_compat
from fxremat.passes.joint.data_sizes import is_composite
from fxremat.passes.joint.graph import JointGraph, is_getitem
from fxremat.report.diagnosis import Opaque
from fxremat.runtime.effects import Effect
from fxremat.runtime.nested import Nested
from fxremat.runtime.sparse import SparseOperation
from fxremat.runtime.user_kernels import Launch

_PLANNED = ("aten", "prims", "prim")
"""Namespaces of operators whose decompositions and costs are known."""


def operations_of(joint: JointGraph) -> list[fx.Node]:
    """Return the operations of the forward."""
    return [node for node in joint.forward if not is_getitem(node)]


def opaque_in(joints: Iterable[JointGraph]) -> tuple[Opaque, ...]:
    """Return the operations of forwards that are planned as one each, by name and reason."""
    listed: dict[tuple[str, str], Opaque] = {}
    for joint in joints:
        for node in operations_of(joint):
            why = why_opaque(node)
            if not why:
                continue
            key = _name_of(node), why
            before = listed.get(key)
            if before is None:
                module, line = torch_compat.module_path(node), line_of(node)
                listed[key] = Opaque(key[0], why, 1, module, line)
            else:
                listed[key] = replace(before, count=before.count + 1)
    return tuple(listed.values())


def why_opaque(node: fx.Node) -> str:
    """Return why an operation is planned as one, and what its plan can do; empty if it is not."""
    target = node.target
    if is_composite(node):
        return (
            "sizes between these operations depend on data; their results are kept or recomputed "
            "together"
        )
    if isinstance(target, Nested):
        return "it runs inner graphs; its results are kept or recomputed together"
    if isinstance(target, Launch):
        again = "kept or recomputed" if target.repeatable else "kept, since it may give other bits"
        return f"a Triton kernel of the model; its results are {again}"
    if isinstance(target, SparseOperation):
        return "it computes with sparse tensors; its result is kept or recomputed"
    if isinstance(target, Effect):
        return "it has an effect, so that it runs exactly once; its results are kept"
    if torch_compat.is_collective(node):
        return "other processes take part in it"
    if isinstance(target, torch._ops.OpOverload) and target.namespace not in _PLANNED:
        return "a custom operator; its results are kept or recomputed"
    return ""


def line_of(node: fx.Node) -> str:
    """Return the innermost line of the model that an operation comes from; empty if unknown."""
    lines = torch_compat.user_lines(node.stack_trace or "")
    return f"{shortened(lines[-1].file)}:{lines[-1].number}" if lines else ""


def shortened(file: str) -> str:
    """Return the path of a file relative to the folder of packages, or to the current one."""
    for folder in ("site-packages", "dist-packages"):
        before, folder_name, after = file.rpartition(f"/{folder}/")
        if folder_name and before:
            return after
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file


def _name_of(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, Launch):
        return target.kernel
    if isinstance(target, Nested):
        return str(getattr(target.function, "__name__", target.function))
    if is_composite(node):
        composite = next(own for own in (target, *node.args[2:3]) if hasattr(own, "label"))
        return str(getattr(composite, "label"))  # noqa: B009
    return str(target) if isinstance(target, torch._ops.OpOverload) else _function_name(node)


def _function_name(node: fx.Node) -> str:
    """Return the name of the function that a node calls."""
    return str(getattr(node.target, "__name__", node.target))
