"""Transformers: a callback with which a ``Trainer`` trains a model within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fxremat.errors import ArgumentError
from fxremat.integrations.in_place import InPlace, check_options
from fxremat.module.compiled import CompiledModule
from fxremat.options.budget import Readable
from fxremat.options.plain import Options

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "fxremat.integrations.transformers requires Transformers and Accelerate: "
        "pip install 'fxremat[transformers]'"
    ) from error

from fxremat.integrations.accelerate import check_state, unwrapped


class FxrematCallback(TrainerCallback):  # type: ignore[misc]
    """A callback that plans a model: ``Trainer(model, …, callbacks=[FxrematCallback("20 GiB")])``.

    From the beginning of training to its end, calls of the model run as planned. The plan is made
    in the first call, for the batch that the trainer collates. The state of the trainer's optimizer
    is counted. With ``gradient_accumulation_steps``, gradients that exist before a step are counted
    as well.

    Log entries with a loss also have ``budget_bytes`` and ``predicted_peak_bytes``. On CUDA they
    have ``measured_peak_bytes`` too: the maximum number of bytes allocated in any forward and
    backward so far. torch's peak statistics are reset at each step. Reporters that the trainer adds
    for ``report_to`` run before callbacks, and do not receive these values.

    Args:
        budget: the budget of one process, as for :func:`fxremat.compile`.
        **options: options of :func:`fxremat.compile`. With a large vocabulary ``loss="own"`` saves
            the gradient of the logits, unless the trainer computes a loss from them itself, for
            example with label smoothing.

    Raises:
        BudgetError, ArgumentError: the budget or an option cannot be read.
    """

    def __init__(self, budget: Readable | None = None, **options: Any) -> None:
        check_options(budget, options)
        self._budget, self._options = budget, options
        self._training: InPlace | None = None
        self._optimizer: object = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FxrematCallback:
        """Return a callback configured by a section of a configuration file.

        Args:
            values: values by the names of the attributes of :class:`fxremat.Options`; ``budget`` is
                required.

        Raises:
            BudgetError, ArgumentError: a name is not an attribute, or a value cannot be read.
        """
        return cls(**Options.from_dict(values).arguments())

    @property
    def model(self) -> CompiledModule | None:
        """The model as ``fxremat.compile`` returns it, with its plans; ``None`` before training."""
        return None if self._training is None else self._training.compiled

    def on_init_end(self, args: Any, _state: Any, _control: Any, **_others: Any) -> None:
        """Raise ``ArgumentError`` if training arguments conflict with a plan."""
        _check(args)

    def on_train_begin(
        self, args: Any, _state: Any, _control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Make calls of the model run as planned until :meth:`on_train_end`."""
        _check(args)
        if getattr(model, f"is_{_checkpointing(args)}", False):
            _refuse(_checkpointing(args), True, f"model.{_checkpointing(args)}_disable()")
        optimizer = others.get("optimizer")
        optimizer = None if optimizer is None else unwrapped(optimizer)
        options = {
            "optimizer": optimizer,
            "accumulate": args.gradient_accumulation_steps > 1,
            **self._options,
        }
        last = self._training
        if last is not None:
            last.end()
            if last.model is model and self._optimizer is optimizer:
                last.begin()
                return
        self._training, self._optimizer = InPlace(model, self._budget, options), optimizer

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_others: Any) -> None:
        """Begin to measure the peak memory of the step."""
        if self._training is not None:
            self._training.begin_step()

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_others: Any) -> None:
        """Record the peak memory of the step, and raise ``ArgumentError`` if it was not planned."""
        if self._training is not None:
            self._training.end_step()
            self._training.check_planned("call the model in compute_loss")

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add budget, predicted peak and measured peak to a log entry that has a loss."""
        if self._training is not None and logs is not None and "loss" in logs:
            facts = self._training.facts()
            logs.update(facts)
            state.log_history[-1].update(facts)

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_others: Any) -> None:
        """Make calls of the model run its own forward again."""
        if self._training is not None:
            self._training.end()


def _check(args: Any) -> None:
    """Raise ``ArgumentError`` if training arguments let others recompute or replace the step.

    These are gradient checkpointing, ``torch_compile``, ``DataParallel`` and sharding.

    Raises:
        ArgumentError: there is such an argument, which the error names.
    """
    if args.torch_compile:
        _refuse("torch_compile", True, "torch_compile=False")
    checkpointing = _checkpointing(args)
    if getattr(args, checkpointing):
        _refuse(checkpointing, True, f"{checkpointing}=False")
    if args.n_gpu > 1:
        _refuse("n_gpu", args.n_gpu, "one process per device (torchrun), not DataParallel")
    check_state(AcceleratorState())


def _checkpointing(args: Any) -> str:
    """Return the name of the training argument that enables gradient checkpointing."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    return new if hasattr(args, new) else old


def _refuse(argument: str, value: object, remedy: str) -> None:
    raise ArgumentError(
        f"{argument}={value} cannot be combined with FxrematCallback, which plans recomputation in "
        f"the whole step: use {remedy}",
        argument=argument,
        value=value,
        code="FXR407",
    )
