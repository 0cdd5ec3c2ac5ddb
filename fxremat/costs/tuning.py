"""Kernels of a user's are tuned before a step runs, and apart from all that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat.costs.execute import give_back, undisturbed
from fxremat.costs.synthetic import Synthesizer
from fxremat.passes.joint.graph import JointGraph
from fxremat.passes.joint.user_kernels import is_tuned
from fxremat.runtime.user_kernels import Launch


def tune_kernels(joint: JointGraph, real: Mapping[fx.Node, torch.Tensor]) -> None:
    """Have Triton choose a configuration of each kernel that it tunes, where it did not yet.

    Measuring a step does so, too. Where the costs of a step were known, the first step would
    do it, with all that it holds beside the buffer by which Triton empties caches: 256 MiB.

    Args:
        joint: the step.
        real: values of primals, where known; others are made up.

    Ensures: no tensor of ``real`` is written to; the random generators are as before.
    """
    for node in filter(is_tuned, (*joint.forward, *joint.backward)):
        launch: Any = node.target
        if not _is_known(node, launch):
            with undisturbed(joint.device):
                values: Mapping[fx.Node, Any] = Synthesizer(joint, real).of(node.all_input_nodes)
                launch.tune(*fx.node.map_arg(node.args, values.__getitem__))
            give_back(joint.device)


def _is_known(node: fx.Node, launch: Launch) -> bool:
    traced: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    return launch.is_tuned_for(*traced)
