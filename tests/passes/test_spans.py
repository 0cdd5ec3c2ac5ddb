"""Within which stages operations may run as one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest

from fxremat.passes.fuse.groups import MUCH, NEAR, Span, spans_of
from fxremat.passes.fuse.kinds import Kind, kinds_of
from fxremat.passes.joint import rng
from fxremat.passes.stages.linearize import Line
from tests.harness import ask_input_gradients, capture
from tests.models import ZOO


def zoo_line(name: str) -> Line:
    entry = ZOO[name]
    args, kwargs = entry.sample(0)
    ask_input_gradients((args, kwargs))
    with entry.context():
        return capture(entry.build(), args, kwargs, apart=True).line


LINES: dict[str, Callable[[], Line]] = {
    "unet": lambda: zoo_line("unet"),
    "gpt_logits": lambda: zoo_line("gpt_logits"),
    "siamese": lambda: zoo_line("siamese"),
    "tied": lambda: zoo_line("tied"),
}


@pytest.fixture(scope="module", params=LINES)
def line(request: pytest.FixtureRequest) -> Line:
    return LINES[request.param]()


def begins(line: Line, spans: list[Span]) -> list[int]:
    """The stages that spans begin before."""
    counts = list(accumulate((len(s.forward) for s in line.stages), initial=0))
    assert sum(len(r.forward) for r in spans) == counts[-1]
    starts = accumulate((len(r.forward) for r in spans), initial=0)
    return [counts.index(start) for start in starts][:-1]


def test_regions_are_runs_of_stages(line: Line):
    kinds = kinds_of(line.joint)
    spans = spans_of(line, kinds)
    forward = [n for span in spans for n in span.forward]
    assert set(forward) == {n for stage in line.stages for n in stage.forward}
    assert len(forward) == len(set(forward))
    backward = [n for span in spans for n in span.backward]
    assert len(backward) == len(set(backward))
    assert set(backward) == set(line.joint.backward) - set(line.sums)
    for span in spans:
        for nodes in (span.forward, span.backward):
            assert list(nodes) == sorted(nodes, key=line.order.__getitem__)
    stages = {n: i for i, span in enumerate(spans) for n in span.forward}
    of_stage = [{stages[n] for n in stage.forward} for stage in line.stages]
    assert all(len(found) <= 1 for found in of_stage)
    for span, after in zip(spans, begins(line, spans)[1:], strict=False):
        assert span.leaving == line.stages[after].boundary
    assert spans[-1].leaving == ()


def test_branches_and_the_turn_are_never_in_one_with_others(line: Line):
    spans = spans_of(line, kinds_of(line.joint))
    starts = begins(line, spans)
    assert set(line.segments.ends) <= set(starts)
    if line.ends_at_loss_point:
        assert spans[-1].forward == ()


def test_of_cuts_between_two_products_at_most_the_least_crossed_is_left(line: Line):
    kinds = kinds_of(line.joint)
    starts = begins(line, spans_of(line, kinds))
    fixed = {*line.segments.ends, len(line.stages) - 1 if line.ends_at_loss_point else 0, 0}
    table = line.joint.storages
    alone = 0
    runs: dict[int, list[int]] = {}
    for index in range(1, len(line.stages)):
        nodes = line.stages[index - 1].forward
        alone += sum(kinds[n] is Kind.ALONE and not rng.is_state(n) for n in nodes)
        runs.setdefault(alone, []).append(index)
    crossing = [table.total(table.of(stage.boundary)) for stage in line.stages]
    least = {run: min(crossing[i] for i in own) for run, own in runs.items()}
    for run, own in runs.items():
        left = [i for i in own if i in starts and i not in fixed]
        assert len(left) <= 1
        assert all(crossing[i] == least[run] for i in left)
        if not fixed.intersection(own):
            near = min(least[i] for i in least if abs(i - run) <= NEAR)
            assert len(left) == (least[run] <= MUCH * near)
