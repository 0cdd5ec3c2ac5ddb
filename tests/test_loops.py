"""Loops as people write them: within the budget, and bit for bit the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from tests.loops.cell import LOOPS, Ran, at_least, reference, within
from tests.loops.job import digest
from tests.loops.memory import recording, sizes_known
from tests.loops.subjects import SUBJECTS

KIB = 1 << 10

MLP = (
    "backend", "tutorial", "two_forwards", "gan", "retain_later", "dropped_forward",
    "kept_forward", "failing", "optimizer_in_backward", "thawed", "halved_batches", "checkpointed",
    "second_thread", "parallel_inside",
)  # fmt: skip
"""Loops of which one of each kind is tried; the others in the slow suite."""

LONG = ("kept_forward", "retain_later", "failing")
"""Of these, the slow suite tries those whose like is short."""

REGIONS = ("two_forwards", "failing")
"""Those that are tried where each module of the model is captured by itself."""

TOO_CAUTIOUS = ("retain_later", "kept_forward")
"""Loops within their budget that may be warned of a step that takes more. A graph that is retained,
or never used, is assumed to exist until the next backward ends; these drop it before."""

CONV = ("amp",)
"""With BatchNorm, too. A checkpoint around it stops the second forward early, before buffers are
written: their statistics move once, not twice as in eager."""

LEAST = ("accumulate",)
"""At their least, too."""


def cells(*subjects: str) -> list[tuple[str, str]]:
    """Each loop with each model that suits it."""
    return [(n, s) for s in subjects for n, loop in LOOPS.items() if loop.suits(SUBJECTS[s])]


EVERY = cells("mlp", "conv", "gpt", "llama", "resnet", "unet")


@pytest.fixture(scope="module", autouse=True)
def _nobody_else_holds_anything() -> Iterator[None]:
    """Records that pytest keeps of torch's trace hold tensors."""
    trace = logging.getLogger("torch.__trace")
    trace.disabled = True
    yield
    trace.disabled = False


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in MLP]
)
def test_loops_keep_to_the_budget(name: str, quick_search: None):
    faults = within(name, "mlp", 0.6).faults
    if name in TOO_CAUTIOUS:
        faults = [fault for fault in faults if "earlier steps that wait" not in fault]
        faults = [fault for fault in faults if not fault.startswith("planned anew")]
    assert not faults


@pytest.mark.parametrize("name", REGIONS)
def test_loops_of_regions_keep_to_the_budget(name: str, quick_search: None):
    faults = within(name, "mlp", 0.6, regions=True).faults
    assert not faults


@pytest.mark.parametrize("name", CONV)
def test_loops_of_a_model_with_statistics(name: str, quick_search: None):
    faults = within(name, "conv", 0.6).faults
    assert not faults


@pytest.mark.parametrize("name", LEAST)
def test_loops_run_at_the_least_that_errors_ask_for(name: str, quick_search: None):
    cell = at_least(name, "mlp")
    assert not cell.faults
    assert cell.ran is not None
    assert cell.budget_bytes < cell.reference.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
@pytest.mark.parametrize(
    ("name", "subject"), cells("mlp", "conv", "gpt", "llama", "resnet", "unet")
)
def test_every_loop_of_every_model_keeps_to_the_budget(name: str, subject: str, share: float):
    faults = within(name, subject, share).faults
    assert not faults


CAPTURED_ANEW = ("halved_batches",)
"""Regions of sizes that come one after the other are planned for longer than a loop is taught."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, _ in cells("mlp") if n not in CAPTURED_ANEW])
def test_every_loop_of_regions_keeps_to_the_budget(name: str):
    faults = within(name, "mlp", 0.6, regions=True).faults
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "subject"), cells("mlp", "conv", "gpt", "llama", "resnet", "unet")
)
def test_every_loop_runs_at_the_least_that_errors_ask_for(name: str, subject: str):
    cell = at_least(name, subject)
    assert not cell.faults
    assert cell.ran is not None


def roomy(name: str) -> Ran:
    """Of a model with few activations, where nothing needs to be recomputed."""
    cell = within(name, "deep", 2.0)
    assert not cell.faults
    assert cell.ran is not None
    return cell.ran


def test_gradients_are_added_to_those_that_exist_without_a_second_set(quick_search: None):
    plain, accumulated = roomy("plain"), roomy("accumulate")
    assert accumulated.peak_bytes - plain.peak_bytes <= 0.02 * plain.gradient_bytes


@pytest.mark.slow
def test_gradients_that_are_dropped_early_are_not_there_at_once(quick_search: None):
    plain, dropped = roomy("plain"), roomy("optimizer_in_backward")
    assert plain.peak_bytes - dropped.peak_bytes >= 0.5 * plain.gradient_bytes


# The instrument.


def test_what_was_there_before_and_is_released_counts_from_the_start():
    with sizes_known():
        first, second = (torch.empty(KIB, dtype=torch.uint8) for _ in range(2))
        with recording() as memory:
            memory.mark("begin")
            del first
            third = torch.empty(3 * KIB, dtype=torch.uint8)
            memory.mark("end")
            later = torch.empty(100 * KIB, dtype=torch.uint8)
            del second, third, later
    held = memory.held_at_start()
    assert held == 2 * KIB
    peak, where = memory.peak("begin", "end", held_bytes=held)
    assert peak == 4 * KIB
    assert where == "aten::empty"


def test_the_bytes_of_a_loop_are_those_that_can_be_counted_by_hand():
    """SGD keeps nothing: parameters, their gradients, the last batch and its loss are there."""
    ran = reference("told_nothing", "mlp")
    parameters = ran.gradient_bytes
    batch = 512 * 64 * 4
    loss = 4
    assert ran.held_bytes == 2 * parameters + batch + loss


def test_a_digest_tells_every_bit_and_shape():
    value = torch.tensor([0.0, 1.0])
    assert digest(value) == digest(value.clone())
    assert digest(value) == digest(torch.tensor([0.0, 5.0, 1.0])[::2])
    for other in (torch.tensor([-0.0, 1.0]), value[None], value.bfloat16()):
        assert digest(value) != digest(other)
