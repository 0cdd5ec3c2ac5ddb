"""The command ``doctor``: its facts are those of what ``compile`` does, and its exit codes."""

from __future__ import annotations

import copy
import itertools
import json
import warnings

import pytest
import torch
from torch import nn

import fxremat
from fxremat.command import main
from fxremat.command.doctor import diagnose
from fxremat.command.source import Step
from fxremat.graph.shortfall import TOLERATED_BYTES
from fxremat.report.diagnosis import Diagnosis
from fxremat.report.peak import summed

HERE = "tests.command.test_doctor"


def block() -> nn.Sequential:
    """A block whose hidden layer is larger than its output."""
    return nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16))


def plain() -> tuple[nn.Module, object]:
    """A model of one graph."""
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block(), block()), torch.randn(256, 16)


class Branches(nn.Module):
    """A model whose graph breaks at an ``if`` on data, with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = block(), nn.BatchNorm1d(16), block()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(self.first(nn.functional.dropout(x, 0.1)))
        if y.sum() > -1e9:
            y = y * 2
        result: torch.Tensor = self.second(y)
        return result


def breaking() -> tuple[nn.Module, object]:
    """A model of several graphs."""
    torch.manual_seed(0)
    return Branches(), torch.randn(256, 16)


@torch.library.custom_op("fxremat_doctor::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Return half of ``x``."""
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda _context, gradient: gradient / 2)


class Mixed(nn.Module):
    """A model with a custom operator and sizes that depend on data, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = halved(self.layer(x))
        return {"loss": self.head(y).square().mean() + y[y > 0].square().sum()}


def mixed() -> tuple[nn.Module, object]:
    """A model with operations that are planned as one each."""
    return Mixed(), torch.randn(256, 16)


class Scored(nn.Module):
    """A model that returns its loss, and the large scores that it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(x)
        return scores.square().mean(), scores


def scored() -> tuple[nn.Module, object]:
    """A model that returns its loss."""
    return Scored(), torch.randn(256, 16)


def frozen() -> tuple[nn.Module, object]:
    """A model with nothing to train."""
    return block().requires_grad_(False), torch.randn(256, 16)


class Excluded(nn.Module):
    """A model that Dynamo does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(x)
        return result


def excluded() -> tuple[nn.Module, object]:
    """A model of which nothing can be captured."""
    return Excluded(), torch.randn(256, 16)


def wrong() -> tuple[nn.Module, object]:
    """A model that its sample does not fit."""
    return block(), torch.randn(256, 15)


EFFORT = fxremat.Effort(0.0, forms=())
"""Nothing is computed in parts, since searching these takes seconds."""


def diagnosis_of(step: tuple[nn.Module, object]) -> Diagnosis:
    return diagnose(Step(*step, own_loss=False), {"effort": EFFORT})


@pytest.fixture(scope="module")
def of_plain() -> Diagnosis:
    """The diagnosis of a model of one graph."""
    return diagnosis_of(plain())


@pytest.fixture(scope="module")
def of_breaking() -> Diagnosis:
    """The diagnosis of a model of several graphs, which is left as it was."""
    model, sample = breaking()
    assert isinstance(model, Branches)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    gradient = torch.ones_like(model.first[0].weight)
    model.first[0].weight.grad = gradient
    state = torch.get_rng_state()
    diagnosis = diagnosis_of((model, sample))
    assert diagnosis.steps_run > 0
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.first[0].weight.grad is gradient and model.second[0].weight.grad is None
    assert (model.calls, model.training) == (0, False)
    return diagnosis


@pytest.fixture(scope="module")
def of_mixed() -> Diagnosis:
    """The diagnosis of a model with operations that are planned as one each."""
    return diagnosis_of(mixed())


def test_bytes_are_those_that_compile_plans_with(of_plain: Diagnosis) -> None:
    model, sample = plain()
    plan = fxremat.plan(model, sample, "min", effort=EFFORT)
    assert of_plain.least is not None and of_plain.kept is not None
    assert of_plain.least.budget_bytes == plan.least_budget_bytes
    assert of_plain.kept.budget_bytes == plan.baseline_peak_bytes
    with pytest.raises(fxremat.BudgetError) as refused:
        fxremat.plan(model, sample, plan.least_budget_bytes - 1, effort=EFFORT)
    assert of_plain.least.needed_by in str(refused.value)


def test_the_least_budget_trains(of_plain: Diagnosis) -> None:
    model, sample = plain()
    assert of_plain.least is not None
    compiled = fxremat.compile(model, sample, of_plain.least.budget_bytes, effort=EFFORT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.BudgetWarning)
        for _ in range(3):
            y = compiled(sample)
            y.sum().backward()
            compiled.zero_grad()
    measured_bytes = compiled.plan.measured_peak_bytes
    most_bytes = of_plain.least.budget_bytes + TOLERATED_BYTES  # a scalar of the loop
    assert measured_bytes is not None and measured_bytes <= most_bytes


@pytest.mark.parametrize("name", ["of_plain", "of_breaking", "of_mixed"])
def test_what_holds_a_peak_adds_up(name: str, request: pytest.FixtureRequest) -> None:
    diagnosis: Diagnosis = request.getfixturevalue(name)
    for point in (diagnosis.kept, diagnosis.least):
        assert point is not None
        assert sum(point.at_peak.values()) == point.budget_bytes
        # Of several graphs, a plan does not know what is held before the step is for.
        held = "outside the step" if name == "of_breaking" else "parameters"
        assert point.at_peak[held] > 0


def test_the_recommended_budget_comes_true(of_plain: Diagnosis) -> None:
    kept, half = of_plain.kept, of_plain.half
    assert kept is not None and half is not None
    assert 2 * (kept.budget_bytes - half.budget_bytes) in (
        kept.at_peak["activations"],
        kept.at_peak["activations"] - 1,
    )
    model, sample = plain()
    plan = fxremat.plan(model, sample, half.budget_bytes, effort=EFFORT)
    assert plan.predicted_peak_bytes <= half.budget_bytes
    assert plan.predicted_s == pytest.approx(half.predicted_s, rel=0.5)  # measured again
    first = of_plain.advice[0]
    assert first.argument == f"budget={half.budget_bytes}"
    assert (first.budget_bytes, first.predicted_s) == (half.budget_bytes, half.predicted_s)


def test_a_recommended_optimizer_takes_what_is_said(of_plain: Diagnosis) -> None:
    model, sample = plain()
    plan = fxremat.plan(model, sample, "min", optimizer=torch.optim.AdamW, effort=EFFORT)
    (advice,) = [own for own in of_plain.advice if own.argument.startswith("optimizer")]
    nbytes = summed(plan.at_peak())["optimizer state"]
    assert f"{nbytes / 1024:.1f} KiB" in advice.effect


def test_one_graph_runs_nothing_and_its_plan_is_cached(of_plain: Diagnosis) -> None:
    assert (of_plain.graphs, of_plain.steps_run, of_plain.problem) == (1, 0, "")
    assert not (of_plain.breaks or of_plain.unplanned or of_plain.opaque)
    first = of_plain.first_step
    assert first is not None and first.plans_cached
    assert {"capture", "measure", "plan"} <= first.cold.keys()
    assert not {"measure", "plan"} & first.cached.keys()


def test_several_graphs_end_at_the_lines_that_break_them(of_breaking: Diagnosis) -> None:
    model, sample = breaking()
    lines = open(__file__, encoding="utf-8").read().splitlines()  # noqa: PTH123, SIM115
    number = next(i for i, line in enumerate(lines, 1) if line.strip().startswith("if y.sum()"))
    assert of_breaking.graphs == len(of_breaking.regions) == 2
    (found,) = of_breaking.breaks
    assert found.line.endswith(f"test_doctor.py:{number}")
    assert found.seconds is not None and found.count == 1
    assert of_breaking.steps_run >= 3
    compiled = fxremat.compile(model, sample, "min", effort=EFFORT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            y = compiled(sample)
            y.sum().backward()
            compiled.zero_grad()
    assert isinstance(compiled.plan, fxremat.StepPlan)
    assert of_breaking.least is not None
    assert of_breaking.least.budget_bytes == compiled.plan.least_budget_bytes
    assert len(compiled.plan.regions) == of_breaking.graphs


def test_operations_that_are_planned_as_one_are_listed(of_mixed: Diagnosis) -> None:
    whys = {own.name: own for own in of_mixed.opaque}
    assert whys["fxremat_doctor.halved.default"].count == 1
    assert "test_doctor.py" in whys["fxremat_doctor.halved.default"].line
    assert any("depend on data" in own.why for own in of_mixed.opaque)


def test_a_loss_that_the_model_returns_is_recommended() -> None:
    model, sample = scored()
    with_own = fxremat.plan(model, sample, "min", effort=EFFORT, loss="own")
    without = fxremat.plan(model, sample, "min", effort=EFFORT)
    options = {"effort": EFFORT, "loss": "own"}
    diagnosis = diagnose(Step(model, sample, own_loss=True), options)
    assert diagnosis.least is not None and diagnosis.loss == "own"
    assert diagnosis.least.budget_bytes == with_own.least_budget_bytes
    (advice,) = [own for own in diagnosis.advice if own.argument == 'loss="own"']
    assert advice.budget_bytes == without.least_budget_bytes > with_own.least_budget_bytes


def test_a_loss_is_noticed_where_sizes_depend_on_data(of_mixed: Diagnosis) -> None:
    assert (of_mixed.loss, of_mixed.graphs, of_mixed.steps_run) == ("own", 1, 0)


@pytest.mark.parametrize("name", ["of_plain", "of_breaking", "of_mixed"])
def test_text_fits_and_has_the_numbers(name: str, request: pytest.FixtureRequest) -> None:
    diagnosis: Diagnosis = request.getfixturevalue(name)
    lines = diagnosis.lines()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert diagnosis.least is not None
    assert f"{diagnosis.least.budget_bytes} bytes" in text
    assert diagnosis.least.needed_by in text
    for own in itertools.chain(diagnosis.breaks, diagnosis.opaque):
        assert own.line in text
    titles = ("captured", "planned", "memory", "first step", "recommended")
    places = [lines.index(title) for title in titles]
    assert places == sorted(places)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_PROGRESS", "0")


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{HERE}:plain", "--json", "--loss", "outside"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["graphs"] == 1 and facts["problem"] == ""
    assert facts["least"]["budget_bytes"] < facts["kept"]["budget_bytes"]
    assert facts["arguments"] == [["sample[0]", "float32[256, 16]"]]
    assert facts["first_step"]["plans_cached"] is True


def test_what_prevents_planning_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{HERE}:frozen"]) == 1
    said = capsys.readouterr()
    assert "requires_grad_" in said.out and not said.err
    assert main(["doctor", f"{HERE}:frozen", "--json"]) == 1
    assert "requires_grad_" in json.loads(capsys.readouterr().out)["problem"]


def test_a_model_that_cannot_be_captured_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{HERE}:excluded"]) == 1
    said = capsys.readouterr()
    text = " ".join(said.out.split())
    assert "not planned" in text and "can be captured" in text
    assert "training steps of the sample were run" in text and not said.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nothing"], 2),
        ([f"{HERE}:plain", "--device", "abacus"], 2),
        ([f"{HERE}:plain", "--optimizer", "Guess"], 2),
        ([f"{HERE}:wrong"], 3),
    ],
)
def test_exit_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == code
    said = capsys.readouterr()
    assert said.err.startswith("fxremat: ") and not said.out
