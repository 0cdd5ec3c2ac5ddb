"""The zoo itself: built alike each time, trainable, and with a reference that repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.models import BENCH, ZOO, ZooModel
from tests.models.bits import assert_bitwise_equal, bitwise_equal, first_difference
from tests.models.reference import StepResult, reference_step, run_step, train
from tests.trials import reference

every_model = pytest.mark.parametrize("name", ZOO)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@every_model
def test_builds_and_samples_alike_and_leaves_the_generator_alone(name: str):
    before = torch.get_rng_state()
    entry = ZOO[name]
    assert_bitwise_equal(entry.build().state_dict(), entry.build().state_dict())
    assert_bitwise_equal(entry.sample(3), entry.sample(3))
    assert not bitwise_equal(entry.sample(3), entry.sample(4))
    assert torch.equal(before, torch.get_rng_state())


@every_model
def test_one_step_gives_every_trainable_parameter_a_gradient(name: str):
    entry = ZOO[name]
    model = entry.build()
    assert model.training
    result = run_step(entry, model)
    assert result.loss.shape == ()
    assert math.isfinite(result.loss.item())
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    received = {name for name, gradient in result.gradients.items() if gradient is not None}
    assert received == trainable - entry.without_gradient
    assert all(g.isfinite().all() for g in result.gradients.values() if g is not None)


@every_model
def test_draws_says_whether_the_seed_matters(name: str):
    entry = ZOO[name]
    first = run_step(entry, entry.build(), step_seed=1)
    second = run_step(entry, entry.build(), step_seed=2)
    assert bitwise_equal(first, second) == (not entry.draws)


@every_model
def test_reference_repeats_itself_and_is_the_model(name: str):
    entry = ZOO[name]
    before = torch.get_rng_state()
    first = reference(name)
    # A fresh model; the code that was compiled for the first one is taken again if it is there.
    assert_bitwise_equal(first, reference_step(entry, input_gradients=True))
    assert torch.equal(before, torch.get_rng_state())
    _assert_same_function(entry, first, run_step(entry, entry.build(), input_gradients=True))


def _assert_same_function(entry: ZooModel, expected: StepResult, eager: StepResult) -> None:
    """Eager may accumulate in another order, and in bfloat16 computes gradients elsewhere.

    What this is for: a reference that is wrong, as ``aot_eager`` is for ``inplace``.
    """
    coarse = entry.autocast is not None or entry.name.startswith("autocast")
    share = 0.1 if coarse else 1e-5
    assert expected.differentiable == eager.differentiable
    pairs = {"loss": (expected.loss, eager.loss)}
    for name, gradient in eager.gradients.items():
        pairs[name] = (expected.gradients[name], gradient)
    for name, buffer in eager.buffers.items():
        pairs[name] = (expected.buffers[name], buffer)
    for name, (compiled, plain) in pairs.items():
        assert (compiled is None) == (plain is None), name
        if compiled is not None:
            error = (compiled.double() - plain.double()).norm()
            assert error <= share * plain.double().norm(), f"{name}: {error}"


def test_training_repeats_itself_and_accumulates():
    entry = ZOO["gpt"]
    runs = [train(entry, entry.build(), steps=3, accumulate=2) for _ in range(2)]
    assert_bitwise_equal(*runs)
    assert len(runs[0]["losses"]) == 6
    assert not bitwise_equal(runs[0]["state"], entry.build().state_dict())
    assert not bitwise_equal(runs[0]["state"], train(entry, entry.build(), steps=3)["state"])


def test_names_are_those_of_the_registry():
    for registry in (ZOO, BENCH):
        assert all(name == entry.name for name, entry in registry.items())
    assert {"gpt16", "gpt16_dropout", "llama8", "resnet50", "densenet121"} <= set(BENCH)


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "1 of 2 entries differ"),
        (torch.tensor([NAN]), torch.tensor([1.0]), "nan against 1.0"),
        (torch.ones(2), torch.ones(2).double(), "torch.float64"),
        (torch.ones(2), torch.ones(2, 1), "(2, 1)"),
        ({"x": [torch.ones(3), None]}, {"x": [torch.ones(3), 1]}, "result['x'][1]: NoneType"),
        ({"x": 1}, {"y": 1}, "keys ['x'] against ['y']"),
        ((1, 2), (1, 2, 3), "2 entries against 3"),
        ("a", "b", "'a' against 'b'"),
        (torch.ones(2, 2), torch.ones(2, 2).fill_diagonal_(2), "the first at (0, 0)"),
        (torch.ones(2).bfloat16(), torch.tensor([1.0, 2.0]).bfloat16(), "at (1,)"),
    ],
)
def test_first_difference_is_named(a, b, says: str):
    difference = first_difference(a, b)
    assert difference is not None
    assert says in difference
    assert not bitwise_equal(a, b)
    with pytest.raises(AssertionError, match="result"):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([NAN, 1.0]),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(True),
        torch.tensor([1 + 2j]),
        {"a": (torch.zeros(0), None, "text")},
    ],
)
def test_equal_to_itself_whatever_the_strides(x):
    copy = torch.utils._pytree.tree_map(
        lambda t: t.clone(memory_format=torch.contiguous_format) if torch.is_tensor(t) else t, x
    )
    assert_bitwise_equal(x, copy)
