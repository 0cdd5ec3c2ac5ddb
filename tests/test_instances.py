"""Instances of storages as bits."""

from __future__ import annotations

from fxremat.ir import Storage
from tests.reference.brute.instances import Instances, union

INSTANCES = Instances((Storage(3, "a"), Storage(50, "b"), Storage(700, "c")), copies=4)
A, B, C = 0, 1, 2


def test_the_first_instance_is_number_0():
    new = INSTANCES.new(frozenset({A, C}), held=0, source=0)
    assert new == 1 | 1 << 8
    assert INSTANCES.nbytes(new) == 703


def test_a_second_instance_is_another_bit():
    first = INSTANCES.new(frozenset({B}), held=0, source=0)
    second = INSTANCES.new(frozenset({B}), held=first, source=0)
    assert second == first << 1
    assert INSTANCES.nbytes(first | second) == 100
    third = INSTANCES.new(frozenset({B}), held=second, source=0)
    assert third == first, "the lowest number that is free"


def test_what_the_source_has_is_not_made_again():
    source = INSTANCES.new(frozenset({A}), held=0, source=0)
    assert INSTANCES.new(frozenset({A, B}), held=source, source=source) == 1 << 4


def test_within_are_all_instances():
    assert INSTANCES.within([A, B]) == 0xFF
    assert INSTANCES.within([]) == 0


def test_a_union_leaves_out_what_is_not_held():
    assert union((-1, 0, 5, 2, -1)) == 7
