"""Bad input: a typed error with object, numbers and remedy, and nothing changed."""

import importlib.metadata
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.options.readers import MOST_BYTES
from tests.models.bits import assert_bitwise_equal


def layers(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    parts = []
    for _ in range(3):
        parts += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*parts)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = y * 2
        return y


class Picks(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[x.sum(1) > 0]


def traces(model: nn.Module) -> dict[str, Any]:
    """What compiling must not touch."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        # torch.compile notes its own name in the modules that it was given.
        "attributes": [sorted(set(vars(m)) - {"_is_torch_compile"}) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
        "python": hash(random.getstate()),
    }


def refuse(
    error: type[Exception], act: Callable[[], object], model: nn.Module, *words: str
) -> Exception:
    """``act`` raises ``error`` with ``words`` in its message and leaves no trace."""
    before = traces(model)
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert_bitwise_equal(traces(model), before)
    return caught.value


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("much", ("'much'", "6 GiB")),
        ("12 parsecs", ("12 parsecs",)),
        (0, ("0", "at least one byte")),
        (-5, ("-5",)),
        (0.0, ("0.0", "(0, 1]")),
        (1.5, ("1.5", "(0, 1]")),
        (float("nan"), ("nan",)),
        (True, ("True", "bool")),
        (None, ("None",)),
    ],
)
def test_budgets_that_cannot_be_read(budget: Any, words: tuple[str, ...]):
    model = layers()
    refuse(fxremat.BudgetError, lambda: fxremat.compile(model, X, budget), model, *words)


def test_a_budget_below_the_least_feasible_one_names_it():
    model = layers()
    error = refuse(
        fxremat.BudgetError,
        lambda: fxremat.compile(model, X, 1000, assume="strict"),
        model,
        "1000",
        "least",
    )
    assert isinstance(error, fxremat.BudgetError)
    least = error.least_budget_bytes
    assert least is not None and str(least) in str(error)
    strict = {"assume": "strict"}
    assert fxremat.compile(model, X, least, **strict).plan.predicted_peak_bytes <= least
    refuse(fxremat.BudgetError, lambda: fxremat.compile(model, X, least - 1, **strict), model)


class TooLongError(LookupError):
    """A model's own."""


class Table(nn.Module):
    """Has room for 24 positions, and refuses more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            try:
                raise IndexError("no such row")
            except IndexError as error:
                raise TooLongError(f"{x.shape[1]} positions") from error
        return torch.relu(x + self.table[: x.shape[1]])


SAMPLED: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "compile": lambda model, x: fxremat.compile(model, x, "min"),
    "compile, one graph": lambda model, x: fxremat.compile(model, x, "min", regions="one"),
    "compile with a loss": lambda model, x: fxremat.compile(model, x, "min", loss=torch.sum),
    "plan": lambda model, x: fxremat.plan(model, x, "min"),
    "frontier": fxremat.frontier,
    "max_batch": lambda model, x: fxremat.max_batch(model, x, "1 GiB"),
    "estimate": fxremat.estimate,
    "first call": lambda model, x: fxremat.compile(model, budget="min")(x),
}


@pytest.mark.parametrize("act", SAMPLED.values(), ids=SAMPLED)
def test_what_the_model_raises_for_a_sample_is_raised_as_it_is(act: Any):
    model = Table()
    error = refuse(TooLongError, lambda: act(model, torch.zeros(4, 25, 8)), model, "25")
    assert isinstance(error.__cause__, IndexError)
    chain, context = [], error.__context__
    while context is not None:
        chain.append(type(context))
        context = context.__context__
    assert chain == [IndexError], "what led to it in the model, and nothing of ours"
    layer = layers()
    refuse(RuntimeError, lambda: act(layer, torch.zeros(16, 31)), layer, "31")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_an_error_of_the_model_has_a_note_of_the_sample():
    model = layers()
    wrong = torch.zeros(16, 31)
    error = refuse(RuntimeError, lambda: fxremat.compile(model, wrong, "min"), model)
    (note,) = error.__notes__
    assert "(16, 31)" in note and "Sequential" in note


def test_samples_that_are_no_call():
    model = layers()
    refuse(fxremat.SampleError, lambda: fxremat.compile(model, "text", "min"), model, "str")
    elsewhere = X.to("meta")
    refuse(fxremat.SampleError, lambda: fxremat.compile(model, elsewhere, "min"), model, "meta")


def test_nothing_to_train():
    model = layers().requires_grad_(False)
    refuse(fxremat.NoGradientError, lambda: fxremat.compile(model, X, "min"), model, "12")


def test_what_breaks_the_graph_is_named():
    model = Branches()
    refuse(
        fxremat.CaptureError,
        lambda: fxremat.compile(model, X, "min", regions="one"),
        model,
        "Branches",
        "if y.sum() > 0",
    )
    picks = Picks()
    refuse(
        fxremat.DataSizesError,
        lambda: fxremat.compile(picks, X, "min", regions="one"),
        picks,
        "x.sum(1) > 0",
    )


def test_no_module():
    with pytest.raises(fxremat.ArgumentError, match="function"):
        fxremat.compile(lambda x: x, X, "min")  # type: ignore[arg-type]


def test_budgets_of_numpy_are_as_good_as_pythons():
    plain = fxremat.plan(layers(), X, 1.0)
    for budget in (np.int64(plain.budget_bytes), np.float32(1.0), sys.maxsize, 10**30):
        plan = fxremat.plan(layers(), X, budget)
        assert plan.predicted_peak_bytes == plain.predicted_peak_bytes <= plan.budget_bytes
        assert type(plan.budget_bytes) is int


def test_the_greatest_reserve_is_a_budget_too_small():
    model = layers()
    error = refuse(
        fxremat.BudgetError,
        lambda: fxremat.compile(model, X, 1 << 30, reserve=MOST_BYTES, offload="auto"),
        model,
    )
    assert isinstance(error, fxremat.BudgetError)
    assert error.least_budget_bytes is not None and error.least_budget_bytes > MOST_BYTES


@pytest.mark.parametrize("offload", ["auto", "only", "conv"])
def test_budgets_and_limits_beyond_all_memory_are_as_good_as_none(offload: Any):
    for limit in (None, 10**30):
        plan = fxremat.plan(layers(), X, 10**30, offload=fxremat.HostMemory(offload, limit=limit))
        assert plan.host_bytes == 0


LOSSES: list[tuple[Any, str]] = [
    (lambda out: None, "None"),
    (lambda out: out, "(16, 32)"),
    (lambda out: out[:0].sum(0), "(32,)"),
    (lambda out: 3.0, "float"),
    (lambda out: (out.sum(), out.mean()), "tuple"),
    (lambda out: {"loss": out.sum()}, "dict"),
    (lambda out: out.sum().detach(), "gradient"),
    (lambda out: out.argmax(), "gradient"),
    (lambda out: torch.zeros(()), "gradient"),
    (lambda out: out.sum() * 1j, "complex"),
]


@pytest.mark.parametrize(("loss", "word"), LOSSES)
def test_losses_that_are_none(loss: Any, word: str):
    model = layers()
    error = refuse(
        fxremat.ArgumentError,
        lambda: fxremat.compile(model, X, "min", loss=loss),
        model,
        "loss",
        word,
        "scalar",
    )
    assert isinstance(error, fxremat.ArgumentError)
    assert error.argument == "loss" and error.value is loss


def test_what_a_loss_raises_comes_out_as_it_was_raised():
    class OwnError(Exception):
        pass

    raised = OwnError("of the loss")

    def loss(_out: object) -> Tensor:
        raise raised

    model = layers()
    assert refuse(OwnError, lambda: fxremat.compile(model, X, "min", loss=loss), model) is raised


OTHER = nn.Linear(2, 2)
Y = torch.randint(32, (16,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda model: fxremat.compile(model, "40 MiB"), fxremat.SampleError, ("40 MiB", "budget")),
        (lambda model: fxremat.compile(model, 0.5), fxremat.SampleError, ("0.5", "budget")),
        (lambda model: fxremat.compile(model, "min", X), fxremat.SampleError, ("min", "budget")),
        (lambda model: fxremat.plan(model, "1 GiB", X), fxremat.SampleError, ("1 GiB", "budget")),
        (lambda model: fxremat.max_batch(model, "1 GB", X), fxremat.SampleError, ("1 GB",)),
        (lambda model: fxremat.compile(model, X, X), fxremat.BudgetError, ("Tensor", "6 GiB")),
        (
            lambda model: fxremat.compile(model, X, "min", loss=nn.CrossEntropyLoss()),
            fxremat.ArgumentError,
            ("CrossEntropyLoss", "target="),
        ),
        (
            lambda model: fxremat.compile(model, X, "min", loss=nn.functional.mse_loss),
            fxremat.ArgumentError,
            ("mse_loss", "target="),
        ),
        (
            lambda model: fxremat.compile(model, X, "min", loss=fxremat.Loss(None, target=Y)),
            fxremat.ArgumentError,
            ("loss", "fxremat.Loss"),
        ),
        (
            lambda model: fxremat.compile(model, X, "min", loss=fxremat.Loss("own", target=Y)),
            fxremat.ArgumentError,
            ("target", "own"),
        ),
        (
            lambda model: fxremat.compile(
                model, X, "min", loss=fxremat.Loss(lambda out: out.sum(), target=Y)
            ),
            fxremat.ArgumentError,
            ("target", "only the outputs"),
        ),
        (
            lambda model: fxremat.compile(model, X, "min", loss="own"),
            fxremat.ArgumentError,
            ("own", "Tensor", "labels"),
        ),
        (
            lambda model: fxremat.compile(
                model, X, "min", optimizer=torch.optim.AdamW(OTHER.parameters())
            ),
            fxremat.ArgumentError,
            ("AdamW", "2 parameters", "Sequential", "reserve="),
        ),
        (
            lambda model: fxremat.estimate(
                model, X, optimizer=torch.optim.AdamW(OTHER.parameters())
            ),
            fxremat.ArgumentError,
            ("AdamW", "2 parameters", "Sequential", "reserve="),
        ),
    ],
)
def test_what_was_meant_is_named(
    act: Callable[[nn.Module], object], error: type[Exception], words: tuple[str, ...]
):
    model = layers()
    raised = refuse(error, lambda: act(model), model, *words)
    assert len(str(raised)) < 600


def test_an_optimizer_may_step_a_part_of_the_model_or_what_it_is_given():
    model, image = layers(), X.clone().requires_grad_()
    part = torch.optim.AdamW(model[0].parameters())
    assert fxremat.plan(model, X, 1.0, optimizer=part).predicted_peak_bytes
    given = torch.optim.AdamW([image])
    assert fxremat.plan(model, image, 1.0, optimizer=given).predicted_peak_bytes
    model.requires_grad_(False)
    assert fxremat.compile(model, budget=1.0, optimizer=given)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(10, 16), nn.Embedding(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.positions(torch.arange(ids.shape[1]))


@pytest.mark.parametrize("given", [True, False])
def test_a_sample_too_long_for_the_model_raises_what_the_model_does(given: bool):
    model, ids = Positions(), torch.zeros(2, 9, dtype=torch.long)
    with pytest.raises(IndexError) as own:
        model(ids)

    def act() -> object:
        if given:
            return fxremat.compile(model, ids, "1 GiB")
        return fxremat.compile(model, budget="1 GiB")(ids)

    assert str(refuse(IndexError, act, model)) == str(own.value)


def test_a_loss_and_its_target_are_counted():
    model, criterion = nn.Sequential(nn.Linear(32, 512), nn.Linear(512, 32)), nn.MSELoss()
    target = torch.randn(16, 32)
    given = fxremat.plan(model, X, 1.0, loss=fxremat.Loss(criterion, target=target))
    same = fxremat.plan(model, X, 1.0, loss=lambda out: criterion(out, target))
    assert given.predicted_peak_bytes == same.predicted_peak_bytes + target.nbytes
    shared = fxremat.plan(model, X, 1.0, loss=fxremat.Loss(criterion, target=X))
    assert shared.predicted_peak_bytes == same.predicted_peak_bytes
    dry = [
        fxremat.estimate(model, X, loss=fxremat.Loss(criterion, target=own)) for own in (target, X)
    ]
    assert dry[0].peak_bytes == dry[1].peak_bytes + target.nbytes


def test_a_step_with_a_criterion_keeps_to_its_budget():
    model, criterion = layers(256), nn.MSELoss()
    x, y = torch.randn(64, 256), torch.randn(64, 256)
    compiled = fxremat.compile(model, x, "min", loss=fxremat.Loss(criterion, target=y))

    def step() -> None:
        criterion(compiled(x), y).backward()
        compiled.zero_grad()

    step()
    peak_bytes = fxremat.measure_step(compiled, step).peak_bytes
    assert peak_bytes <= compiled.plan.budget_bytes


def test_a_loss_of_one_number_in_any_shape():
    for loss in (lambda out: out.sum().reshape(1, 1), lambda out: out.double().sum()):
        assert fxremat.plan(layers(), X, 1.0, loss=loss).predicted_peak_bytes


def test_an_optimizer_whose_state_cannot_be_found_is_refused():
    model = layers()
    for optimizer in (torch.optim.LBFGS(model.parameters()), torch.optim.Optimizer):
        with pytest.raises(fxremat.ArgumentError, match="reserve=") as caught:
            fxremat.compile(model, X, "min", optimizer=optimizer)
        assert caught.value.argument == "optimizer"


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_compiling_leaves_no_trace(budget: Any):
    model = layers()
    model(X).sum().backward()
    before = traces(model)
    fxremat.compile(model, X, budget)
    assert_bitwise_equal(traces(model), before)


def test_a_model_in_eval_mode_is_planned_for_training():
    model = layers()
    model[1].eval()
    model.eval()
    before = traces(model)
    compiled = fxremat.compile(model, X, 1.0)
    assert_bitwise_equal(traces(model), before)
    assert len(compiled.plans) == 1


def test_twice_differentiated_is_refused():
    compiled = fxremat.compile(layers(), X, "min")
    loss = compiled(X).square().sum()
    with pytest.raises(fxremat.BackwardError, match="create_graph"):
        torch.autograd.grad(loss, list(compiled.parameters()), create_graph=True)


def test_a_retained_graph_gives_the_same_gradients_again():
    compiled = fxremat.compile(layers(), X, "min")
    loss = compiled(X).square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in compiled.parameters()]
    compiled.zero_grad()
    loss.backward()
    assert_bitwise_equal([p.grad for p in compiled.parameters()], first)


def test_existing_gradients_and_reserves_are_counted():
    model = layers()
    plain = fxremat.plan(model, X, 1.0).predicted_peak_bytes
    gradients = sum(p.nbytes for p in model.parameters())
    assert fxremat.plan(model, X, 1.0, accumulate=True).predicted_peak_bytes == plain + gradients
    assert fxremat.plan(model, X, 1.0, reserve="1 KiB").predicted_peak_bytes == plain + 1024
    state = fxremat.plan(model, X, 1.0, optimizer=torch.optim.SGD(model.parameters(), 0.1, 0.9))
    assert state.predicted_peak_bytes == plain + gradients
    model(X).sum().backward()
    assert fxremat.plan(model, X, 1.0).predicted_peak_bytes == plain + gradients


def test_on_a_cpu_what_is_reserved_is_what_is_allocated():
    model = layers()
    allocated = fxremat.plan(model, X, 1.0)
    reserved = fxremat.plan(model, X, "100% reserved")
    assert (allocated.budget_on, reserved.budget_on) == ("allocated", "reserved")
    for plan in (allocated, reserved):
        assert plan.predicted_reserved_bytes == plan.predicted_peak_bytes == plan.counted_bytes
    assert reserved.predicted_peak_bytes == allocated.predicted_peak_bytes


def test_a_measured_loss_is_counted_instead_of_a_guess():
    model = layers()

    def costly(outputs: Tensor) -> Tensor:
        return (outputs.unsqueeze(0) * torch.ones(50, 1, 1)).square().sum()

    plan = fxremat.plan(model, X, 1.0, loss=costly)
    assert plan.predicted_peak_bytes > 2 * 50 * X.nbytes
    assert plan.predicted_peak_bytes > fxremat.plan(model, X, 1.0).predicted_peak_bytes


def test_what_a_limit_of_host_memory_makes_infeasible_says_so():
    model = layers()
    free = fxremat.plan(model, X, "min", offload="only", assume="strict")
    assert free.host_bytes
    limit = free.host_bytes // 2
    error = refuse(
        fxremat.BudgetError,
        lambda: fxremat.compile(
            model,
            X,
            free.budget_bytes,
            offload=fxremat.HostMemory("only", limit=limit),
            assume="strict",
            loss=None,
        ),
        model,
        "limit=",
        str(limit),
        str(free.budget_bytes),
    )
    named = re.search(r"with (\d+) ", str(error))
    assert named is not None
    enough = int(named[1])
    assert limit < enough
    plan = fxremat.plan(
        model,
        X,
        free.budget_bytes,
        offload=fxremat.HostMemory("only", limit=enough),
        assume="strict",
    )
    assert plan.predicted_peak_bytes <= free.budget_bytes


def test_what_cannot_travel_is_blamed_where_no_limit_binds():
    model = layers()
    for limit in (None, "1 GiB"):
        with pytest.raises(fxremat.BudgetError) as caught:
            fxremat.compile(model, X, 1000, offload=fxremat.HostMemory("only", limit=limit))
        assert "HostMemory" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["ArgumentError", "BudgetError", "HostMemoryError", "TransferError", "CaptureError"]
)
def test_every_error_is_one_of_the_package(name: str):
    assert issubclass(getattr(fxremat, name), fxremat.FxrematError)


def test_all_errors_are_exported():
    from fxremat import errors

    own = (kind for kind in vars(errors).values() if isinstance(kind, type))
    kinds = {kind.__name__ for kind in own if issubclass(kind, Exception)}
    assert {name for name in kinds if not name.startswith("_")} <= set(fxremat.__all__)
    assert all(hasattr(fxremat, name) for name in fxremat.__all__)
    assert dir(fxremat) == sorted(fxremat.__all__)


def test_the_version_is_that_of_the_package():
    assert fxremat.__version__ == importlib.metadata.version("fxremat")


def test_a_checkout_that_is_not_installed_has_a_version_as_well(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "unknown" in fxremat.__version__


def test_the_first_use_leaves_no_trace_in_the_generators():
    code = (
        "import random, fxremat; state = random.getstate(); fxremat.compile; "
        "raise SystemExit(random.getstate() != state)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
