"""The chains of the paper benchmarks are those of the published networks."""

from __future__ import annotations

import pytest

from benchmarks.papers.networks import NAMES, network
from fxremat.ir import Problem

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 23_834_568,
}
"""As torchvision counts them; Inception without its auxiliary classifier."""


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_as_published(name: str) -> None:
    found = network(name)
    biases = 1000  # of the classifier; left out there
    assert found.costs.fixed_bytes == 8 * (PARAMETERS[name] - biases)
    Problem(found.chain, found.costs, 0)  # validates


def test_sizes_and_times_grow_with_the_batch() -> None:
    once, twice = network("resnet50", batch=1), network("resnet50", batch=2)
    for a, b in zip(once.chain.boundaries, twice.chain.boundaries, strict=True):
        assert 2 * once.chain.nbytes(a) == twice.chain.nbytes(b)
    seconds = [sum(s.forward_s for s in n.costs.stages) for n in (once, twice)]
    assert seconds[0] < seconds[1] < 2 * seconds[0]


def test_resnet50_boundaries() -> None:
    """64 x 112 x 112 after the stem's first layers, 2048 x 7 x 7 before the classifier."""
    found = network("resnet50", image=224, batch=1)
    sizes = [found.chain.nbytes(boundary) // 4 for boundary in found.chain.boundaries]
    assert sizes[:4] == [3 * 224**2, 64 * 112**2, 64 * 112**2, 64 * 56**2]
    assert sizes[-2:] == [2048 * 7**2, 1000]
