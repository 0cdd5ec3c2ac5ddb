"""Models with sizes that depend on data: same bits as without a plan, within the budget."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.passes.joint.data_sizes import is_bundle, is_composite
from fxremat.runtime.composite import BUNDLED, bundled
from tests.models import experts
from tests.models.experts import TOKENS, WIDTH, Experts, tokens

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "quick_search")

CAPTURED_WHOLE = [
    experts.Loop,
    experts.Masked,
    experts.Sorted,
    experts.Capacity,
    experts.ExpertsChoose,
    experts.Shared,
    experts.Grouped,
    experts.Repeated,
]
QUICK = (experts.Loop, experts.Sorted, experts.Grouped, experts.Capacity, experts.Repeated)
IN_PIECES = [
    experts.Counted,
    pytest.param(experts.Skipping, marks=pytest.mark.slow),
    pytest.param(experts.Chosen, marks=pytest.mark.slow),
]

Step = Callable[[Tensor], list[bytes]]


def model_of(kind: type[Experts], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return experts.experts(kind, **settings)


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def step_of(model: nn.Module, call: Callable[[Tensor], Tensor]) -> Step:
    """A step that returns the bits of its output and of gradients."""

    def step(x: Tensor) -> list[bytes]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        output = call(x)
        bits = [bits_of(output)]
        loss = output.square().mean()
        del output
        loss.backward()
        return bits + [bits_of(p.grad) for p in model.parameters() if p.grad is not None]

    return step


def reference_of(kind: type[Experts], **settings: Any) -> Step:
    """The step by torch's own backend, with the same capture."""
    model = model_of(kind, **settings)
    step = step_of(model, torch.compile(model, backend="aot_eager"))

    def captured(x: Tensor) -> list[bytes]:
        with torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
        ):
            return step(x)

    return captured if kind in CAPTURED_WHOLE else step


def compiled(
    kind: type[Experts],
    budget: float | str,
    *,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[fxremat.CompiledModule, Step]:
    model = model_of(kind, **settings)
    call = fxremat.compile(model, tokens(0), budget, **(options or {}))
    return call, step_of(call, call)


def check(kind: type[Experts], call: fxremat.CompiledModule, step: Step, **settings: Any) -> None:
    """Steps with other data each have the bits of torch's backend, and keep to the budget."""
    expected = reference_of(kind, **settings)
    for seed in (0, 1, 2):
        assert step(tokens(seed)) == expected(tokens(seed)), f"step {seed}"
    x = tokens(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = fxremat.measure_step(call, lambda: step(x)).peak_bytes
    if measured > call.plan.budget_bytes:  # these data take more: a warning, and then room for it
        assert [w for w in caught if issubclass(w.category, fxremat.BudgetWarning)]
        measured = fxremat.measure_step(call, lambda: step(x)).peak_bytes
    assert measured <= call.plan.budget_bytes


def cells() -> Iterator[Any]:
    """Each way at the least budget and at 0.6; most only in the slow suite."""
    for kind in CAPTURED_WHOLE:
        for budget in ("min", 0.6):
            is_quick = (kind in (experts.Loop, experts.Sorted)) == (budget == 0.6)
            marks = [] if is_quick and kind in QUICK else [pytest.mark.slow]
            yield pytest.param(kind, budget, marks=marks)


@pytest.mark.parametrize(("kind", "budget"), [*cells()])
def test_experts_train_within_the_budget(kind: type[Experts], budget: float | str):
    call, step = compiled(kind, budget, options={"regions": "one", "loss": _loss()})
    check(kind, call, step)


def _loss() -> Any:
    return lambda output: output.square().mean()


@pytest.mark.parametrize(
    "kind", [experts.Loop, pytest.param(experts.Sorted, marks=pytest.mark.slow)]
)
def test_an_ample_budget_recomputes_nothing(kind: type[Experts]):
    call, step = compiled(kind, 1.0)
    check(kind, call, step)
    assert call.plan.predicted_peak_bytes == call.plan.baseline_peak_bytes


@pytest.mark.parametrize(
    "kind", [experts.Loop, pytest.param(experts.Sorted, marks=pytest.mark.slow)]
)
def test_draws_inside_of_experts_are_repeated(kind: type[Experts]):
    call, step = compiled(kind, "min", dropout=0.3)
    check(kind, call, step, dropout=0.3)
    assert "redraw" in call.plan.backward_code or "again" in call.plan.backward_code


def test_one_capture_serves_other_numbers_of_tokens():
    call, step = compiled(experts.Loop, 0.7, options={"dynamic": True})
    expected = reference_of(experts.Loop)
    for seed, count in enumerate((TOKENS, TOKENS * 3 // 4, TOKENS // 2)):
        x = tokens(seed, count=count)
        assert step(x) == expected(x), f"{count} tokens"
    assert len(call._training.graphs) == 1


def test_an_expert_may_get_no_tokens():
    _call, step = compiled(experts.Loop, "min")
    expected = reference_of(experts.Loop)
    x = torch.zeros(TOKENS, WIDTH)
    assert step(x) == expected(x)


def test_indices_that_all_layers_read_do_not_join_them():
    torch.manual_seed(0)
    call = fxremat.compile(experts.Doubled(), tokens(0), 1.0)
    (graph,) = call._training.graphs
    composites = [node for node in graph.joint.forward if is_composite(node)]
    assert len(composites) == 1 + experts.LAYERS


def test_a_worse_distribution_is_reported_and_then_has_room():
    torch.manual_seed(0)
    call = fxremat.compile(experts.Doubled(), tokens(0), "min", loss=_loss())
    step = step_of(call, call)
    for seed in range(8):
        step(tokens(seed))
    worse = tokens(9)
    worse[:, 0] = 1.0
    with pytest.warns(fxremat.BudgetWarning, match="more than in all steps before"):
        step(worse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxremat.BudgetWarning)
        for _ in range(3):
            step(worse)
    latest = call.plan
    measured = fxremat.measure_step(call, lambda: step(worse)).peak_bytes
    assert measured <= latest.predicted_peak_bytes


def test_values_with_sizes_from_data_never_leave_the_device():
    call, step = compiled(experts.Loop, 0.6, options={"offload": "auto"})
    check(experts.Loop, call, step)
    graph = call._training.graphs[0]
    joint = graph.joint
    assert any(map(is_composite, joint.forward))
    bundles = joint.storages.of(filter(is_bundle, joint.forward))
    assert bundles


@pytest.mark.parametrize("kind", IN_PIECES)
def test_what_leads_out_of_the_graph_breaks_it(kind: type[Experts]):
    _call, step = compiled(kind, 1.0)
    expected = reference_of(kind)
    for seed in range(4):
        x = tokens(seed)
        assert step(x) == expected(x), f"step {seed}"


def test_calls_like_none_before_keep_everything_within_an_ample_budget():
    call, step = compiled(experts.Skipping, "64 MiB")
    recomputed = []
    for seed in range(12):
        step(tokens(seed))
        trace = call._training.regions._thread.trace
        assert trace is not None and len(trace.calls) > experts.LAYERS
        recomputed.append(any(own.compiled.recomputes for own in trace.calls))
    assert recomputed[0]  # what steps take was not known then
    assert not any(recomputed[2:])


def test_bundles_of_another_thread_do_not_count():
    BUNDLED.begin()
    thread = threading.Thread(target=lambda: bundled("cpu", torch.ones(64)))
    thread.start()
    thread.join()
    assert BUNDLED.total_bytes == 0
    bundle = bundled("cpu", torch.ones(8))
    assert BUNDLED.total_bytes == BUNDLED.largest_bytes == bundle.contents[0].nbytes
