"""Lightning: a callback with which a ``Trainer`` fits a model within a budget."""

from __future__ import annotations

from typing import Any

from fxremat.errors import ArgumentError
from fxremat.integrations.in_place import InPlace, check_options
from fxremat.module.compiled import CompiledModule
from fxremat.options.budget import Readable

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        "fxremat.integrations.lightning needs Lightning: pip install 'fxremat[lightning]'"
    ) from error


class FxrematCallback(Callback):  # type: ignore[misc]
    """``Trainer(callbacks=[FxrematCallback("20 GiB")])``.

    While a ``fit`` lasts, calls of the module run as planned; the plan is made at the first
    training call, of the batch as it is. The state of the trainer's optimizer is counted, if there
    is one of them, and with ``accumulate_grad_batches`` gradients that exist.

    The trainer's loggers get ``fxremat/budget_bytes``, ``fxremat/predicted_peak_bytes`` and, on
    CUDA, ``fxremat/measured_peak_bytes`` whenever one of them changes: the most allocated in any
    forward and backward so far, for which torch's own counter of the peak is set back at each
    batch.

    Args:
        budget: as for :func:`fxremat.compile`, for one process.
        module: the dotted name of the submodule to plan, such as ``"net"``, where
            ``training_step`` calls that; ``None``: the ``LightningModule``, whose ``training_step``
            then calls ``self(…)``.
        **options: of :func:`fxremat.compile`.

    Raises:
        BudgetError, ArgumentError: the budget or an option cannot be read.
    """

    def __init__(
        self, budget: Readable | None = None, *, module: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        check_options(budget, options)
        self._budget, self._module, self._options = budget, module, options
        self._fitting: InPlace | None = None
        self._told: dict[str, int] = {}

    @property
    def model(self) -> CompiledModule | None:
        """What is planned as ``fxremat.compile`` returns it; before a fit ``None``."""
        return None if self._fitting is None else self._fitting.compiled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what does not go with a plan.

        Raises:
            ArgumentError: the strategy shards the module.
        """
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ArgumentError(
                f"strategy {type(strategy).__name__} shards the module or has a step of its own: "
                "fxremat plans a whole step of one process, use 'auto' on one device, or 'ddp'",
                argument="strategy",
                value=strategy,
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the module run as planned, now that it is complete and there are optimizers."""
        options: dict[str, Any] = {"accumulate": trainer.accumulate_grad_batches > 1}
        if len(trainer.optimizers) == 1:
            options["optimizer"] = trainer.optimizers[0]
        self._told = {}
        self._fitting = InPlace(self._find(pl_module), self._budget, {**options, **self._options})

    def on_train_batch_start(self, *_given: Any) -> None:
        """Begin to measure."""
        if self._fitting is not None:
            self._fitting.begin_step()

    def on_after_backward(self, *_given: Any) -> None:
        """The step was measured."""
        if self._fitting is not None:
            self._fitting.end_step()

    def on_train_batch_end(self, trainer: Trainer, *_given: Any) -> None:
        """Tell the loggers what is new; the step must have been planned."""
        if self._fitting is None:
            return
        self._fitting.check_planned(
            "give module= the name of what training_step calls, or put it into training mode"
        )
        facts = self._fitting.facts()
        if facts != self._told:
            self._told = facts
            for logger in trainer.loggers:
                separator = logger.group_separator
                metrics = {f"fxremat{separator}{name}": value for name, value in facts.items()}
                logger.log_metrics(metrics, step=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The module is what it was."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same."""
        self._end()

    def _end(self) -> None:
        if self._fitting is not None:
            self._fitting.end()

    def _find(self, pl_module: LightningModule) -> Any:
        try:
            return pl_module.get_submodule(self._module or "")
        except AttributeError as error:
            names = ", ".join(name for name, _child in pl_module.named_children())
            raise ArgumentError(
                f"module is {self._module!r}, but {type(pl_module).__name__} has no such "
                f"submodule: it has {names or 'none'}",
                argument="module",
                value=self._module,
            ) from error
