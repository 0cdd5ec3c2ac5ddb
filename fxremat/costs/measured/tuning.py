"""Tunes users' Triton kernels before a step runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat.costs.measured.execute import tune, undisturbed
from fxremat.costs.measured.synthetic import Synthesizer
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.user_kernels import is_tuned
from fxremat.progress import Note
from fxremat.runtime.user_kernels import Launch


def tune_kernels(joint: JointGraph, real: Mapping[fx.Node, torch.Tensor], *, note: Note) -> None:
    """Let Triton choose a configuration of each kernel that it tunes and has not tuned yet.

    Measuring a step does so too. Where costs are cached and nothing is measured, the first step
    would tune, and hold the buffer of 256 MiB with which Triton flushes caches.

    Args:
        joint: the step.
        real: values of primals, where there are any. Others are made up.
        note: called with the bytes that each tuning held at once.

    Ensures:
        No tensor of ``real`` is written to, and the random generators are as before.
    """
    for node in filter(is_tuned, (*joint.forward, *joint.backward)):
        launch: Any = node.target
        if not _is_tuned(node, launch):
            with undisturbed(joint.device):
                values: Mapping[fx.Node, Any] = Synthesizer(joint, real).of(node.all_input_nodes)
                arguments = fx.node.map_arg(node.args, values.__getitem__)
                tune(launch, arguments, joint.device, note=note)


def _is_tuned(node: fx.Node, launch: Launch) -> bool:
    traced: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return launch.is_tuned_for(*traced)
