"""For ``pytest -p cuda_stand_in_pytest``: a fault of the stand-in fails the test in which it was.

What only keeps a GPU busy is left out: streams are late here without it.
"""

import os
from collections.abc import Iterator

import cuda_stand_in
import pytest
import torch


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    cuda_stand_in.faults()
    yield
    try:
        torch.cuda.synchronize()
    finally:
        found = cuda_stand_in.faults()
    assert not found, found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if hasattr(item, "module")}:
        if module.__name__.endswith("test_cuda_streams"):
            module.busy = lambda seconds: None


def pytest_collection_finish(session: pytest.Session) -> None:
    """With STAND_IN_SMALL=1 the models of ``tests/cuda.py`` are small: a CPU computes them."""
    if os.environ.get("STAND_IN_SMALL") != "1":
        return
    from tests import cuda
    from tests.models.gpt import GPTConfig, gpt_entry
    from tests.models.images import image_entry
    from tests.models.resnet import ResNet
    from tests.models.zoo import drawn_once

    def resnet() -> torch.nn.Module:
        model = ResNet(width=4, classes=10)
        model.stem[-1] = torch.nn.AvgPool2d(3, stride=2, padding=1)
        return model

    config = GPTConfig(vocabulary=128, context=64, width=64, blocks=4, dropout=0.1)
    cuda.ENTRIES["gpt"] = gpt_entry("gpt", config, batch=8, length=64)
    cuda.ENTRIES["resnet50"] = image_entry(
        "resnet50", drawn_once(resnet), batch=3, size=61, classes=10
    )
