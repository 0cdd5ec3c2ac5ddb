"""What a model of another library is to the benchmark: a name, where it is from, how it is made."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = {
    "torch": (),
    "diffusers": ("diffusers>=0.35",),
    "monai": ("monai>=1.4", "einops"),
    "neuralop": ("neuraloperator>=1",),
    "open_clip": ("open_clip_torch>=2.30",),
    "peft": ("peft>=0.17", "transformers>=5"),
    "scipy": ("scipy",),
    "segmentation_models_pytorch": ("segmentation_models_pytorch>=0.4",),
    "timm": ("timm>=1",),
    "torch_geometric": ("torch_geometric>=2.6",),
    "torchdiffeq": ("torchdiffeq>=0.2.4",),
    "transformers": ("transformers>=5", "accelerate>=1.1", "scipy"),
    "trl": ("trl>=0.20", "datasets>=3"),
    "x_transformers": ("x-transformers>=2",),
}
"""What is to be installed for a library."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a call of it.

    Attributes:
        model: in training mode.
        args: of the call.
        kwargs: of the call.
        loss: of what the call returns.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Wild:
    """An entry of the registry.

    Attributes:
        name: of the model.
        library: that must be there, a key of :data:`PACKAGES`.
        make: makes it, of a seed that was set before.
        trainer: trains it in a loop of the library's own: in so many bytes (``None``: as it is)
            it returns what was found, see ``benchmarks/wild_models/trainers.py``.
    """

    name: str
    library: str
    make: Callable[[], Case]
    trainer: Callable[..., Any] | None = None


WILD: dict[str, Wild] = {}
"""All, by name."""


def wild(library: str, name: str | None = None) -> Callable[[Callable[[], Case]], Any]:
    """Register what makes a model, under its own name."""

    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        add(name or make.__name__, library, make)
        return make

    return register


def add(
    name: str,
    library: str,
    make: Callable[[], Case],
    trainer: Callable[..., Any] | None = None,
) -> None:
    """Register what makes a model."""
    if name in WILD:
        raise ValueError(f"{name} is in the registry twice")
    assert library in PACKAGES, library
    WILD[name] = Wild(name, library, make, trainer)


def square(outputs: Any) -> Tensor:
    """A loss of outputs that are one tensor."""
    return outputs.float().square().mean()


def sample_of(outputs: Any) -> Tensor:
    """A loss of what diffusers' models return."""
    return square(outputs.sample)


def own(outputs: Any) -> Tensor:
    """The loss that the model has computed."""
    return outputs.loss


def itself(outputs: Any) -> Tensor:
    """The output is the loss."""
    return outputs


@dataclass(slots=True)
class _Libraries:
    """Libraries of operators that are declared as long as the process lives."""

    kept: list[Any] = field(default_factory=list)


_LIBRARIES = _Libraries()


def prepare() -> None:
    """Let libraries be imported, and be quiet.

    torchvision's extension may be that of another build of torch: what it declares is declared
    here then, so that what only wants its transforms can be imported.
    """
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _LIBRARIES.kept.append(library)
        for name in ("nms", "qnms"):
            try:
                library.define(name + schema)
            except RuntimeError:
                continue
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            warnings.warn(f"torchvision cannot be imported: {error}", stacklevel=2)
