"""Plan files that somebody changed: they are refused as plans, or they work."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import BudgetError, PlanError
from tests.efforts import WHOLE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

VALUES: list[Any] = [
    *(10**30, -(10**30), 2**63, -1, 0, 1, 7, 10**6, 10**400),
    *(1e308, -1.5, 1e-320, float("nan"), float("inf")),
    *("", "x", "\x1b[31mred\x07", "[/x]", "<script>", None, True, [], {}, [[]]),
]
OPTIONS: dict[str, Any] = {"offload": "only", "effort": WHOLE}

Place = tuple[str | int, ...]
Change = tuple[Place, Callable[[Any, Any], None]]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes) for _ in range(3) for sizes in ((16, 64), (64, 16))]
    return nn.Sequential(*layers)


def sample() -> Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


@functools.cache
def saved(folder: Path) -> Any:
    """What a plan with transfers is in its file."""
    plan = fxremat.plan(model(), sample(), "min", **OPTIONS)
    assert plan.host_bytes
    plan.save(folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())


def places(data: Any, at: Place = ()) -> Iterator[Place]:
    """Where the data has values: of a list in its first item, in the middle and in the last."""
    if at:
        yield at
    if isinstance(data, dict):
        for key, value in data.items():
            yield from places(value, (*at, key))
    elif isinstance(data, list) and data:
        for index in sorted({0, len(data) // 2, len(data) - 1}):
            yield from places(data[index], (*at, index))


def delete(data: Any, key: Any) -> None:
    del data[key]


def repeat(data: Any, key: Any) -> None:
    if isinstance(data, list):
        data.append(data[key])


def put(value: Any, data: Any, key: Any) -> None:
    data[key] = value


def changes(good: Any) -> list[Change]:
    """All changes of one value, kinds of places mixed."""
    alike: dict[Place, list[Place]] = {}
    for place in places(good):
        alike.setdefault(tuple("" if isinstance(k, int) else k for k in place), []).append(place)
    how = [delete, repeat, *(functools.partial(put, value) for value in VALUES)]
    found = [
        (place, change)
        for own in alike.values()
        for place in dict.fromkeys((own[0], own[-1]))
        for change in how
    ]
    random.Random(0).shuffle(found)
    return found


def write_changed(good: Any, change: Change, file: Path) -> None:
    (*path, last), act = change
    data = copy.deepcopy(good)
    act(functools.reduce(lambda at, key: at[key], path, data), last)
    file.write_text(json.dumps(data))


def shown(plan: fxremat.Plan, folder: Path) -> None:
    """All that can be seen of it; what is not there to be seen is a ``PlanError``."""
    texts = [plan.explain(), repr(plan), plan._repr_html_(), str(plan.actions)]
    assert not any("\x1b[31m" in text for text in (*texts, plan.forward_code, plan.model))
    for save in (plan.save_html, plan.save_trace, plan.save):
        with contextlib.suppress(PlanError):
            save(folder / "shown")
    assert "<script>" not in plan._repr_html_()


def check_views(tmp_path: Path, good: Any, some: list[Change]) -> int:
    """How many of the changed plans can be looked at."""
    readable = 0
    for change in some:
        write_changed(good, change, tmp_path / "changed.json")
        try:
            plan = fxremat.Plan.load(tmp_path / "changed.json")
        except PlanError:
            continue
        try:
            shown(plan, tmp_path)
        except Exception as error:
            pytest.fail(f"{change}: {type(error).__name__}: {error}")
        readable += 1
    return readable


@pytest.mark.parametrize(
    "part",
    [
        slice(0, 200),
        pytest.param(slice(200, None), marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_a_changed_plan_is_refused_or_can_be_looked_at(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, part: slice
):
    good = saved(tmp_path_factory.getbasetemp())
    assert check_views(tmp_path, good, changes(good)[part]) > 10


def test_a_changed_plan_is_refused_or_followed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    """What decides about the step, and what was measured of it; ten of each kind."""
    good = saved(tmp_path_factory.getbasetemp())
    told = ("schedule", "decision", "measured", "form", "origin", "sizes", "timeline", "costs")
    compiled = 0
    for name in told:
        own = [change for change in changes(good) if change[0][1:2] == (name,)]
        for change in own[:10]:
            write_changed(good, change, tmp_path / "changed.json")
            torch._dynamo.reset()
            try:
                call = fxremat.compile(model(), sample(), plan=tmp_path / "changed.json", **OPTIONS)
                call(sample()).sum().backward()
            except (PlanError, BudgetError):
                continue
            except Exception as error:
                pytest.fail(f"{change}: {type(error).__name__}: {error}")
            compiled += 1
    assert compiled > 5
