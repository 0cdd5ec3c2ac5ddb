"""A probe asks questions of a device, and writes an answer to each as a row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.rows import Row, append, failure


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer.

    Attributes:
        found: what was measured, for the table.
        assumed: what the project takes for granted.
        holds: whether that is so; ``None`` where nothing is assumed.
        figures: what goes into the JSON file beside.
    """

    found: str
    assumed: str = ""
    holds: bool | None = None
    figures: Row = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the questions of a part share.

    Attributes:
        part: whose questions they are.
        device: of which they are asked.
        tiny: sizes for a trial of the script.
        end_s: on the clock of ``time.monotonic``; nothing is asked after that.
        path: where rows go.
    """

    part: str
    device: torch.device
    tiny: bool
    end_s: float
    path: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def ask(self, what: str, find: Callable[[], Finding]) -> None:
        """Write the answer, or why there is none: no question is the end of the others."""
        row: Row = {"part": self.part, "what": what}
        begin_s = time.monotonic()
        if begin_s > self.end_s:
            row["skipped"] = "time is up"
        else:
            try:
                row |= asdict(find())
                if self.cuda:
                    torch.cuda.synchronize(self.device)  # a kernel that failed is this one's
            except Exception as error:
                row |= failure(error)
        append(self.path, {**row, "seconds": time.monotonic() - begin_s})
