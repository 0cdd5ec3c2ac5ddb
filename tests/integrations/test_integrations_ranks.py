"""Trainers of others in several processes: all follow one plan, with ``ranks=``."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, TensorDataset

import fxremat
from fxremat.integrations.accelerate import prepare
from fxremat.integrations.lightning import FxrematCallback as LightningCallback
from fxremat.integrations.transformers import FxrematCallback
from tests.clients import Lit, Net, Tokens, gpt2, rows

PROCESSES = 2

BUDGET = "24 MiB"

ROWS, STEPS = 8, 2
"""Of a batch, and in a training."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The first plan that a process has in a training.

    Attributes:
        code: that it runs.
        predicted_s: of the step, from what was measured: another number for each measurement.
    """

    code: str
    predicted_s: float


def planned(client: str, differ: Iterable[bool]) -> list[list[Planned | str]]:
    """Train in several processes, one training after the other.

    Args:
        client: which of :data:`CLIENTS` trains.
        differ: for each training, whether batches of the last process are smaller.

    Returns by rank, for each training, the first plan, or the error.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        arguments = port, client, list(differ), folder
        started = [context.Process(target=_train, args=(r, *arguments)) for r in range(PROCESSES)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        paths = [Path(folder) / f"{rank}.pt" for rank in range(PROCESSES)]
        return [torch.load(path, weights_only=False) for path in paths]


def _train(rank: int, port: int, client: str, differ: list[bool], folder: str) -> None:
    """In a process as ``torchrun`` starts it."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES),
        "LOCAL_WORLD_SIZE": str(PROCESSES), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "FXREMAT_CACHE": "0",
    }  # fmt: skip
    found: list[Planned | str] = []
    for other in differ:
        torch._dynamo.reset()
        count = ROWS // 2 if other and rank == PROCESSES - 1 else ROWS
        try:
            plan = CLIENTS[client](count, Path(folder) / str(rank)).plans[0]
            found.append(Planned(plan.forward_code + plan.backward_code, plan.predicted_s))
        except fxremat.FxrematError as error:
            found.append(f"{type(error).__name__}: {error}")
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.barrier()  # the first one keeps what the others read
    torch.distributed.destroy_process_group()


def _accelerate(count: int, _folder: Path) -> Any:
    client = accelerate.Accelerator(cpu=True)
    model: nn.Module = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = prepare(client, model, optimizer, budget=BUDGET, ranks=fxremat.Ranks())
    for seed in range(STEPS):
        optimizer.zero_grad()
        client.backward(model(rows(count, seed)).square().mean())
        optimizer.step()
    return model.module


def _lightning(count: int, folder: Path) -> Any:
    callback = LightningCallback(BUDGET, ranks=fxremat.Ranks())
    trainer = lightning.Trainer(
        accelerator="cpu", devices=PROCESSES, strategy="ddp", max_steps=STEPS, logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Lit(Net()), DataLoader(TensorDataset(rows(count * STEPS, 0)), batch_size=count))
    return callback.model


def _transformers(count: int, folder: Path) -> Any:
    callback = FxrematCallback(BUDGET, ranks=fxremat.Ranks())
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=ROWS, max_steps=STEPS, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    transformers.Trainer(
        model=gpt2(),
        args=arguments,
        train_dataset=Tokens(ROWS * PROCESSES * STEPS, 0),
        data_collator=lambda batch: transformers.default_data_collator(batch[:count]),
        callbacks=[callback],
    ).train()
    return callback.model


CLIENTS = {"accelerate": _accelerate, "lightning": _lightning, "transformers": _transformers}


@pytest.mark.parametrize(
    "client",
    [c if c == "accelerate" else pytest.param(c, marks=pytest.mark.slow) for c in CLIENTS],
)
def test_all_processes_of_a_trainer_follow_one_plan(client: str) -> None:
    (plan, error), *others = planned(client, [False, True])
    assert isinstance(plan, Planned)
    assert isinstance(error, str)
    assert error.startswith("RankError: rank 1 has captured another step than rank 0: ")
    assert others == [[plan, error]]
