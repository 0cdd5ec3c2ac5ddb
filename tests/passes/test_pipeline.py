"""The list of passes: what runs, in which order, and what may be added to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fxremat.errors import ArgumentError
from fxremat.ir import TRACED, Form
from fxremat.passes import pipeline
from fxremat.passes.contract import Pass, PassConfig, statement_of
from fxremat.passes.fuse.unit import Units
from fxremat.passes.joint.digest import digest
from fxremat.passes.pipeline import PASSES, add_pass, run_passes
from fxremat.passes.step_graph import StepGraph
from tests.harness import capture

PAGE = Path(__file__).parents[2] / "docs" / "passes.md"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = [*PASSES]
    yield
    PASSES[:] = before


def nothing_left(*_args: object) -> None:
    """The kernel leaves its results as the fake one does."""


def names_run(monkeypatch: pytest.MonkeyPatch, config: PassConfig, **part: str) -> list[str]:
    """Names of the passes that run, none of which does anything."""
    ran: list[str] = []

    def noted(own: Pass) -> Pass:
        def run(graph: StepGraph, *, config: PassConfig) -> StepGraph:
            ran.append(own.name)
            return graph

        return replace(own, run=run)

    monkeypatch.setenv("FXREMAT_CHECK", "0")
    PASSES[:] = map(noted, PASSES)
    run_passes(StepGraph(torch.fx.symbolic_trace(nn.Tanh()), 1), config=config, **part)
    return ran


FIRST = ["nested", "scans", "sparse", "launches", "data sizes"]
EAGER = [*FIRST, "layouts", "sizes", "effects", "attention", "build", "linearize"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PassConfig(), [*FIRST, "sizes", "effects", "attention", "build", "linearize"]),
        (PassConfig(left=nothing_left), EAGER),
        (
            PassConfig(left=nothing_left, form=Form(parts_bytes=8)),
            [*EAGER[:-1], "split", EAGER[-1]],
        ),
        (
            PassConfig(left=nothing_left, target=torch.device("cuda")),
            [*FIRST, "sizes", "effects", "place", "attention", "build", "linearize"],
        ),
        (
            PassConfig(left=nothing_left, target=torch.device("cpu")),
            [*FIRST, "sizes", "effects", "attention", "build", "linearize"],
        ),
        (
            PassConfig(left=nothing_left, units=Units()),
            [
                *(*FIRST, "sizes", "effects", "channels last", "attention", "build"),
                *("linearize", "write twice", "linearize", "fuse", "linearize"),
            ],
        ),
    ],
)
def test_a_pass_runs_where_the_configuration_asks_for_it(
    config: PassConfig, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names_run(monkeypatch, config) == expected


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"before": "build"}, EAGER[:-2]),
        ({"first": "build", "before": "linearize"}, ["build"]),
        ({"first": "linearize"}, ["linearize"]),
    ],
)
def test_a_part_of_the_list_runs(
    part: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names_run(monkeypatch, PassConfig(left=nothing_left), **part) == expected


def digest_of(graph: StepGraph) -> str:
    return digest(
        graph.module,
        forward_output_count=graph.forward_output_count,
        mutated_primals=graph.mutated_primals,
    ).code


def test_parts_of_the_list_give_what_all_of_it_gives() -> None:
    step = capture(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Tanh()), (torch.randn(4, 8),))
    traced = StepGraph.captured(step.traced, forward_output_count=step.output_count)
    whole = run_passes(traced, config=PassConfig())
    graph = traced
    for first, before in ((None, "build"), ("build", "split"), ("split", None)):
        graph = run_passes(graph, config=PassConfig(), first=first, before=before)
    assert digest_of(whole) == digest_of(graph) != digest_of(traced)
    assert len(whole.line.stages) == len(graph.line.stages)


@pytest.mark.parametrize(("form", "is_exact"), [(TRACED, True), (Form(exact=False), False)])
def test_norms_are_undone_where_only_that_is_inexact(form: Form, is_exact: bool) -> None:
    """Parts that round otherwise read inputs of norms as they were traced."""
    assert PassConfig(form=form).is_exact == is_exact
    assert PassConfig(form=replace(form, parts_bytes=8)).is_exact


def same(graph: StepGraph, *, config: PassConfig) -> StepGraph:
    """Leave the graph as it is."""
    return graph


def test_a_pass_is_added_after_the_first_of_a_name() -> None:
    add_pass(Pass("own", same), after="linearize")
    names = [own.name for own in PASSES]
    assert names.index("own") == names.index("linearize") + 1
    assert pipeline.added_passes() == ("own",)


@pytest.mark.parametrize(
    ("name", "after", "words"),
    [
        ("own", "bild", "after must be one of nested.*, but got 'bild'"),
        ("fuse", "build", "name must be another one.*, but got 'fuse'"),
    ],
)
def test_a_pass_that_cannot_be_added_is_refused(name: str, after: str, words: str) -> None:
    before = [*PASSES]
    with pytest.raises(ArgumentError, match=words):
        add_pass(Pass(name, same), after=after)
    assert before == PASSES


def test_every_contract_can_be_printed() -> None:
    for own in PASSES:
        for described in (own.run, own.when, *own.requires, *own.ensures):
            assert len(statement_of(described)) > 5, (own.name, described)
        assert all(own.raises.values())


def test_the_page_of_the_documentation_is_what_the_list_prints() -> None:
    assert PAGE.read_text() == pipeline.passes_page() + "\n", (
        "python -m fxremat.passes > docs/passes.md"
    )
