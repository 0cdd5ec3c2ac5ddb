"""Fixtures of several test files, and how a run of the suite is set up."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["FXREMAT_CACHE"] = "0"  # the user's folder is not for tests
os.environ.setdefault("FXREMAT_CHECK", "1")  # each pass keeps its contract

from tests.examples import register_profiles

register_profiles()

LONG = (
    "tests/on_cuda/test_cuda_promise.py", "tests/on_cuda/test_cuda_user_kernels.py",
    "tests/on_cuda/test_cuda_circumstances.py", "tests/test_ranks.py", "tests/test_split.py",
    "tests/test_breaks.py", "tests/sizing/test_max_batch.py", "tests/calls/test_plans.py",
    "tests/regions/test_regions.py", "tests/test_corners.py", "tests/test_usual_loop.py",
    "tests/module/test_compiled.py", "tests/integrations/test_integrations.py",
    "tests/test_callers.py", "tests/test_loops.py", "tests/regions/test_regions_host.py",
)  # fmt: skip
"""The files that take longest. They begin first, so that no process waits for one at the end."""

# A whole collection walks a million objects of torch and of captured graphs: rarely, then.
gc.set_threshold(*gc.get_threshold()[:2], 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a model, so that it is captured once, and else whole files.

    ``--dist worksteal`` does as it says: single tests, on a machine of many cores.
    """
    if config.getoption("dist") == "worksteal":
        return None
    from xdist.scheduler import LoadScopeScheduling

    from tests.models import ZOO

    config.option.loadscopereorder = False  # else files of few tests come last, however long

    class ByModel(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            values = test.partition("[")[2].rstrip("]").split("-")
            return next((value for value in values if value in ZOO), file)

    return ByModel(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of rare models, and exhaustive ones that show nothing new, as slow.

    In one of several processes, tests of ``LONG`` files come first.
    """
    from hypothesis import is_hypothesis_test

    from tests import references
    from tests.models import RARE, ZOO

    folders = () if references.have_changed() else references.FOLDERS
    for item in items:
        if item.nodeid.startswith(folders) and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.slow)
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        models = {value for value in values if isinstance(value, str) and value in ZOO}
        # On CUDA, models of these names are small ones.
        if models.intersection(RARE) and not item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        place = {file: at for at, file in enumerate(LONG)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Weights and batches do not depend on what ran before: a failure comes again."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _keep_collections_short() -> None:
    """Keep collections from walking the million objects that exist before each test file."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that one test compiled is there in another one."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are a little slower, and held to the same promise."""
    from tests.harness import search_quickly

    search_quickly(monkeypatch)
