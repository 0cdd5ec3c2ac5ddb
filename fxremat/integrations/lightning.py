"""Lightning: a callback with which a ``Trainer`` trains a module within a budget."""

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
        "fxremat.integrations.lightning requires Lightning: pip install 'fxremat[lightning]'"
    ) from error


class FxrematCallback(Callback):  # type: ignore[misc]
    """A callback that plans a module: ``Trainer(callbacks=[FxrematCallback("20 GiB")])``.

    During a ``fit``, calls of the module run as planned. The plan is made in the first training
    call, for its batch. The state of the trainer's optimizer is counted if there is exactly one.
    With ``accumulate_grad_batches``, gradients that exist before a step are counted as well.

    The trainer's loggers receive ``fxremat/budget_bytes``, ``fxremat/predicted_peak_bytes`` and, on
    CUDA, ``fxremat/measured_peak_bytes`` whenever one of them changes. The latter is the maximum
    number of bytes allocated in any forward and backward so far. torch's peak statistics are reset
    at each batch.

    Args:
        budget: the budget of one process, as for :func:`fxremat.compile`.
        module: the dotted name of the submodule to plan, such as ``"net"``, if ``training_step``
            calls that. ``None`` plans the ``LightningModule``, whose ``training_step`` must then
            call ``self(…)``.
        **options: options of :func:`fxremat.compile`.

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
        self._logged: dict[str, int] = {}

    @property
    def model(self) -> CompiledModule | None:
        """The module as ``fxremat.compile`` returns it; ``None`` before a fit."""
        return None if self._fitting is None else self._fitting.compiled

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ``ArgumentError`` if the trainer's strategy cannot follow a plan.

        Raises:
            ArgumentError: the strategy shards the module.
        """
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ArgumentError(
                f"strategy {type(strategy).__name__} shards the module or replaces the training "
                "step, but fxremat plans a whole step of one process: use 'auto' on one device, or "
                "'ddp'",
                argument="strategy",
                value=strategy,
                code="FXR409",
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make calls of the module run as planned; module and optimizers are complete by now."""
        options: dict[str, Any] = {"accumulate": trainer.accumulate_grad_batches > 1}
        if len(trainer.optimizers) == 1:
            options["optimizer"] = trainer.optimizers[0]
        self._logged = {}
        self._fitting = InPlace(self._find(pl_module), self._budget, {**options, **self._options})

    def on_train_batch_start(self, *_given: Any) -> None:
        """Begin to measure the peak memory of the step."""
        if self._fitting is not None:
            self._fitting.begin_step()

    def on_after_backward(self, *_given: Any) -> None:
        """Record the peak memory of the step."""
        if self._fitting is not None:
            self._fitting.end_step()

    def on_train_batch_end(self, trainer: Trainer, *_given: Any) -> None:
        """Check that the step ran as planned, and log budget and peaks if any has changed."""
        if self._fitting is None:
            return
        self._fitting.check_planned(
            "pass the name of the submodule that training_step calls as module=, or put it into "
            "training mode"
        )
        facts = self._fitting.facts()
        if facts != self._logged:
            self._logged = facts
            for logger in trainer.loggers:
                separator = logger.group_separator
                metrics = {f"fxremat{separator}{name}": value for name, value in facts.items()}
                logger.log_metrics(metrics, step=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make calls of the module run its own forward again."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Make calls of the module run its own forward again."""
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
                f"submodule; its submodules are {names or 'none'}",
                argument="module",
                value=self._module,
            ) from error
