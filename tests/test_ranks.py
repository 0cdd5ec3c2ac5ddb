"""Several processes: the same numbers as without a plan, and each within its budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from tests.rank_training import MODELS, Case, Trained, trained

WAYS = (
    "ddp_around", "ddp_inside", "fsdp", "hybrid", "tensor_parallel", "broken", "both", "gathered",
    "vocabulary",
)  # fmt: skip

OTHERS = {
    "argument": r"ArgumentError: ranks must be .*, but got 'all'",
    "batch": r"rank 1 has captured another step than rank 0: .*rank 0's was",
    "graph": r"rank 1 has captured another step than rank 0: .*other operations",
    "budget": r"different budgets: 0.6 on rank 0, 0.7 on rank 1",
    "killed": r"rank 1 did not arrive within 15 s",
}


def check(
    how: str,
    budgets: Sequence[float | str],
    *,
    model: str = "mlp",
    processes: int = 2,
    **options: Any,
) -> list[list[Trained]]:
    """Within shares of what it takes as it is; by rank."""
    planned = [Case(budget, options=tuple(options.items())) for budget in budgets]
    cases = [Case(None), *planned]
    found = trained(how, cases, model=model, processes=processes)
    assert [len(own) for own in found] == [len(cases)] * processes
    for rank, (plain, *planned) in enumerate(found):
        for case, own, first in zip(cases[1:], planned, found[0][1:], strict=True):
            assert not isinstance(own, str), (rank, case, own)
            assert all(map(torch.equal, own.parameters, plain.parameters)), (rank, case)
            assert max(own.peaks_bytes) <= own.budget_bytes, (rank, case)
            assert own.codes and own.first_code == first.first_code, (rank, case)
            if how.startswith("ddp"):
                continue  # their graphs have no collectives: each process learns from its own steps
            assert own.codes == first.codes, (rank, case)
            assert own.schedules == first.schedules, (rank, case)
    return found


@pytest.mark.parametrize("how", ["ddp_inside", "fsdp", "tensor_parallel"])
def test_same_numbers_within_the_budget_by_one_plan(how: str) -> None:
    check(how, [_share("mlp", how)])


def _share(model: str, how: str) -> float:
    """Of what a step takes as it is: within so much some of it must be computed again.

    On a CPU room is left for buffers that go late: three of the largest groups of parameters, most
    of what a ResNet has, and six of a graph's collectives, which are activations where its channels
    are spread.
    """
    if how == "both":
        return 0.75
    late = how in ("fsdp", "hybrid", "tensor_parallel")
    return 0.85 if model == "resnet" and late else 0.6


@pytest.mark.slow
def test_a_shard_has_its_own_place_in_an_embedding() -> None:
    check("vocabulary", [0.6], model="gpt")


@pytest.mark.slow
def test_modules_by_themselves_where_their_layers_are_spread() -> None:
    check("tensor_parallel", [0.75], regions=[f"blocks.{i}" for i in range(6)])


@pytest.mark.parametrize("how", ["tensor_parallel", pytest.param("both", marks=pytest.mark.slow)])
def test_another_size_for_all_where_graphs_have_collectives(how: str) -> None:
    for plain, planned in trained(how, [Case(None, "shorter"), Case(0.9, "shorter")]):
        assert not isinstance(planned, str), planned
        assert all(map(torch.equal, planned.parameters, plain.parameters))


@pytest.mark.slow
def test_every_process_has_its_share_of_a_nodes_host_memory() -> None:
    limit = 16 << 20
    host = fxremat.HostMemory("only", limit=limit)
    for _, own in check("ddp_inside", [0.6], offload=host):
        assert 0 < own.host_bytes <= limit // 2


@pytest.mark.parametrize("offload", [pytest.param("only", marks=pytest.mark.slow), "auto"])
def test_sharded_blocks_travel_within_a_nodes_host_memory(offload: str) -> None:
    limit = 32 << 20
    host = fxremat.HostMemory(offload, limit=limit)
    for _, own in check("fsdp", [0.5], offload=host):
        assert 0 < own.host_bytes <= limit // 2


def test_parameters_are_gathered_again_where_there_is_no_room() -> None:
    for plain, kept, least in trained("gathered", [Case(None), Case(1.0), Case("min")]):
        assert all(map(torch.equal, least.parameters, plain.parameters))
        assert kept.gathers == plain.gathers
        assert min(least.gathers) > max(kept.gathers)


@pytest.mark.parametrize(
    "how",
    [
        "ddp_inside",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("fsdp", "gathered", "both", "broken")
        ),
    ],
)
def test_processes_that_differ_are_named_on_all(how: str) -> None:
    cases = [Case(0.6, other) for other in OTHERS]
    for rank, errors in enumerate(trained(how, cases)):
        assert len(errors) == len(cases) - (rank == 1)  # it was killed
        for error, (other, told) in zip(errors, OTHERS.items(), strict=False):
            named = "ArgumentError" if (rank, other) == (1, "argument") else "RankError"
            assert isinstance(error, str) and error.startswith(f"{named}: "), (rank, other)
            assert re.search(told, error), error


@pytest.mark.parametrize("how", [pytest.param("both", marks=pytest.mark.slow), "broken"])
def test_another_batch_in_a_later_step_is_refused_by_all(how: str) -> None:
    for (error,) in trained(how, [Case("min", "later")]):
        assert isinstance(error, str) and error.startswith("RankError: "), error


@pytest.mark.slow
def test_who_does_not_come_is_named() -> None:
    (first,), second = trained("ddp_inside", [Case(0.6, "late")])
    assert not second
    assert re.search("RankError: rank 1 did not arrive within 15 s", first)


def test_a_plan_that_one_process_has_stored_is_none_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in parts, which several do not look at: they would agree on other things."""
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    entry = MODELS["mlp"].entry
    torch.set_num_threads(1)
    sample = fxremat.Sample(*entry.sample(0))
    compiled = fxremat.compile(entry.build().train(), sample, "min")
    assert compiled.plan.form.has_parts
    for found in trained("ddp_around", [Case("min")]):
        assert not isinstance(found[0], str), found


@pytest.mark.slow
def test_the_least_budget_where_that_is_asked_for() -> None:
    (first,), (second,) = trained("ddp_around", [Case(0.8, "budget", "least")])
    assert first.budget_bytes == second.budget_bytes
    assert first.codes == second.codes


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("model", ["mlp", "gpt", "llama", "resnet"])
@pytest.mark.parametrize("processes", [2, 4])
def test_same_numbers_within_other_budgets(how: str, model: str, processes: int) -> None:
    if how == "vocabulary" and model in ("mlp", "resnet"):
        pytest.skip("it has no embedding")
    if model == "resnet" and how in ("broken", "both"):
        pytest.skip("its layers are spread by parametrizations, which nothing spreads again")
    if how == "hybrid" and processes == 2:
        pytest.skip("two processes have no replicas of shards")
    check(how, [1.0, _share(model, how), "min"], model=model, processes=processes)
