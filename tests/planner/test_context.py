"""What a call finds, and what of it is held when."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import fx

from fxremat.planner.context.context_bytes import Caller, ContextBytes, context_bytes_of
from fxremat.planner.context.step_context import NO_CORRECTION, Correction, StepContext
from tests.harness import bare, captured
from tests.sized import at_size, symbolic

EACH = (10, 20, 40, 80)
"""Bytes of the gradients of four primals."""

BASE = ContextBytes(
    given_bytes=1_000,
    loss_point_bytes=500,
    tangent_bytes=300,
    given_each_bytes=(600, 400),
    gradient_each_bytes=EACH,
)


def around(context: StepContext, base: ContextBytes = BASE) -> ContextBytes:
    return context.around(base)


def test_nothing_found_changes_nothing():
    assert around(StepContext()) == BASE


def test_gradients_that_exist_are_given_one_by_one():
    some = [0, 1, 3]
    found = around(StepContext(existing=frozenset(some)))
    assert found.given_bytes == BASE.given_bytes + 10 + 20 + 80
    assert found.given_each_bytes == (*BASE.given_each_bytes, 10, 20, 80)
    assert (found.loss_point_bytes, found.tangent_bytes) == (
        BASE.loss_point_bytes,
        BASE.tangent_bytes,
    )
    assert not found.added


def test_those_that_are_added_to_are_given_back_as_they_are_made():
    some = frozenset({0, 1, 3})
    found = around(StepContext(existing=some, added=some))
    assert found.added == some
    assert found.given_bytes == around(StepContext(existing=some)).given_bytes


def test_those_that_are_cleared_are_there_in_the_forward_only():
    some = [0, 1, 3]
    total = 10 + 20 + 80
    found = around(StepContext(existing=frozenset(some), added=frozenset(some), cleared=True))
    assert found.given_bytes == BASE.given_bytes + total
    assert found.loss_point_bytes == BASE.loss_point_bytes
    assert found.given_bytes + found.tangent_bytes == BASE.given_bytes + BASE.tangent_bytes
    assert not found.added


@pytest.mark.parametrize(
    "name", ["waiting_bytes", "kept_bytes", "state_bytes", "wrapped_bytes", "buffer_bytes"]
)
def test_what_others_hold_is_given(name: str):
    found = around(StepContext(waiting=2, **{name: 77}))
    assert found == replace(BASE, given_bytes=BASE.given_bytes + 77)


def test_buckets_are_given_one_by_one():
    found = around(StepContext(bucket_bytes=(7, 9)))
    each = (*BASE.given_each_bytes, 7, 9)
    assert found == replace(BASE, given_bytes=BASE.given_bytes + 16, given_each_bytes=each)


@pytest.mark.parametrize(
    ("correction", "given", "loss_point", "tangents"),
    [
        (Correction(loss_point_bytes=800), 1_000, 800, 300),
        (Correction(loss_point_bytes=400), 1_000, 500, 300),
        (Correction(room_bytes=70), 1_000, 570, 300),
        (Correction(loss_point_bytes=800, room_bytes=70), 1_000, 870, 300),
        (Correction(left_bytes=310), 1_000, 500, 310),
        (Correction(left_bytes=290), 1_000, 500, 300),
        (Correction(more_bytes=5), 1_005, 500, 300),
    ],
)
def test_lessons_leave_room_where_it_was_needed(
    correction: Correction, given: int, loss_point: int, tangents: int
):
    found = around(StepContext(correction=correction))
    assert (found.given_bytes, found.loss_point_bytes, found.tangent_bytes) == (
        given,
        loss_point,
        tangents,
    )


def test_what_was_learned_twice_is_the_most_of_both():
    one, other = Correction(1, 5, 2, 8), Correction(3, 4, 6, 7)
    assert one | other == other | one == Correction(3, 5, 6, 8)
    assert one | NO_CORRECTION == one


def test_lessons_grow_with_outputs_and_are_rounded_up():
    assert Correction(10, 0, 3, 7).times(1.5) == Correction(15, 0, 5, 11)
    assert Correction(10, 0, 3, 7).times(1.0) == Correction(10, 0, 3, 7)


def test_all_that_is_found_is_told_of_and_nothing_else():
    some = frozenset({1, 2})
    numbers = {"waiting_bytes": 11, "kept_bytes": 12, "state_bytes": 13}
    correction = Correction(514, 15, 316, 17)
    found = StepContext(
        existing=some, waiting=3, bucket_bytes=(18, 19), correction=correction, **numbers
    ).described(BASE)
    assert sorted(n for _, n in found) == sorted([20 + 40, 18 + 19, 11, 12, 13, 514, 15, 316, 17])
    assert len({what for what, _ in found}) == len(found)
    assert StepContext().described(BASE) == ()
    as_assumed = Correction(BASE.loss_point_bytes, 0, BASE.tangent_bytes)
    assert StepContext(correction=as_assumed).described(BASE) == ()


def test_steps_are_of_a_kind_by_others_and_gradients():
    some = frozenset({1, 2})
    kinds = [
        StepContext().kind,
        StepContext(existing=some).kind,
        StepContext(waiting=1).kind,
        StepContext(waiting=1, existing=some).kind,
    ]
    assert len(set(kinds)) == 4
    assert StepContext(existing=some, kept_bytes=5, correction=Correction(1)).kind == kinds[1]


@pytest.mark.parametrize("sizes", [(5, 17), (2, 64)])
def test_gradients_of_inputs_are_as_large_as_at_the_call(sizes: tuple[int, int]):
    """Those of parameters are the same at all sizes."""
    other = at_size("gpt", (3, 24), sizes)
    joint = symbolic("gpt", (3, 24)).joint
    tensors = [i for i, p in enumerate(other.primals) if isinstance(p, torch.Tensor)]
    found = context_bytes_of(joint, {}, Caller(), values=other.values).gradient_each_bytes
    assert [found[i] for i in tensors] == [other.primals[i].nbytes for i in tensors]
    assert context_bytes_of(joint, {}, Caller()).gradient_each_bytes != found


def test_evaluations_follow_what_is_found():
    """Gradients that exist weigh on the whole step, unless new ones go into them."""
    own = captured("tied")
    outputs, each = own.joint.backward_outputs, own.context_bytes.gradient_each_bytes
    some = frozenset(i for i, gradient in enumerate(outputs) if isinstance(gradient, fx.Node))
    total = sum(own.primals[i].nbytes for i in some)
    base = replace(bare(own.joint), gradient_each_bytes=each)

    def held(context: StepContext) -> tuple[int, int, int]:
        evaluator = own.evaluator(around(context, base))
        found = evaluator.evaluation(evaluator.keep_all())
        return found.held_bytes[0], found.loss_point_bytes, found.end_bytes

    begin, loss_point, end = held(StepContext())
    assert held(StepContext(existing=some)) == (begin + total, loss_point + total, end + total)
    assert held(StepContext(existing=some, cleared=True)) == (
        begin + total,
        loss_point + total,
        end,
    )
    assert held(StepContext(existing=some, added=some)) == (begin + total, loss_point + total, end)


def test_every_number_of_a_situation_counts():
    """A field that is added must be counted, and told of."""
    plain = StepContext()
    for field in fields(StepContext):
        if not field.name.endswith("bytes") or field.name in ("host_bytes", "step_bytes"):
            continue
        value = (5,) if isinstance(getattr(plain, field.name), tuple) else 5
        other = replace(plain, **{field.name: value})
        assert around(other).given_bytes == BASE.given_bytes + 5
        assert [n for _, n in other.described(BASE)] == [5]


def test_a_step_of_the_optimizer_counts_at_the_end():
    assert around(StepContext(step_bytes=7)).end_bytes == max(7, BASE.end_bytes)
    assert around(StepContext(step_bytes=7)).given_bytes == BASE.given_bytes


def test_gradients_in_host_memory_count_only_while_another_is_added():
    each = BASE.gradient_each_bytes
    hosted = frozenset(range(len(each)))
    assert around(StepContext(hosted=hosted)).given_bytes == BASE.given_bytes
    existing = StepContext(existing=hosted, added=hosted, hosted=hosted)
    assert around(existing).given_bytes == BASE.given_bytes + max(each)
    assert around(existing).added == hosted
    assert existing.described(BASE) == ()


def test_a_regions_call_has_just_what_is_beside_it():
    """No loss of its own, less in its backward where that is so, and its share of the host."""
    beside = Correction(loss_point_bytes=40, left_bytes=-7, more_bytes=9)
    context = StepContext(correction=beside, region=True, host_bytes=5)
    found = around(context)
    assert (found.given_bytes, found.loss_point_bytes, found.tangent_bytes) == (1_009, 40, -7)
    assert found.host_bytes == 5
    assert found.loss_point_bytes != around(replace(context, region=False)).loss_point_bytes
    assert context.loss_point_bytes(BASE) == 0
    assert context.described(BASE) == ()
