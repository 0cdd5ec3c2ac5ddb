"""A process that runs one case after the other, and may die or hang of one."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import Row
from benchmarks.sweep.cases import Case, databases, models

START_S = 600
"""A worker may take to start."""


def work(pipe: Any) -> None:
    """Do what is asked for until the pipe is closed."""
    import torch

    from benchmarks.sweep.train import row_of

    torch.set_num_threads(1)
    databases()
    gc.collect()
    gc.freeze()  # each plan looks at all objects that are there
    pipe.send(("ready", None))
    while True:
        try:
            case, samples, first = pipe.recv()
        except EOFError:
            return
        try:
            for number, make in enumerate(models(case, samples)):
                if number >= first:
                    pipe.send(("begins", number))
                    pipe.send(("row", row_of(make)))
        except Exception as error:  # of torch's own sample
            print(f"{case.name}: no sample: {error!r}", file=sys.stderr)
        pipe.send(("done", None))


@dataclass(slots=True)
class Worker:
    """A process that runs cases, one at a time.

    Attributes:
        limit_s: that one model may take.
        process, pipe: of the present one; ``None``: the next case starts one.
    """

    limit_s: float
    process: Any = None
    pipe: Any = None

    def rows(self, case: Case, samples: int, first: int = 0) -> Iterator[Row]:
        """The rows of a case's samples from ``first`` on, as they are made."""
        while True:
            number = first
            self._start()
            self.pipe.send((case, samples, first))
            try:
                while (told := self._received(self.limit_s))[0] != "done":
                    if told[0] == "begins":
                        number = told[1]
                    else:
                        yield {**case.row, "sample": number, **told[1]}
                return
            except (EOFError, ConnectionError, TimeoutError) as error:
                self.stop()
                hangs = isinstance(error, TimeoutError)
                failed = f"takes over {self.limit_s:.0f} s" if hangs else "the process died"
                yield {**case.row, "sample": number, "outcome": "died", "failed": failed}
                first = number + 1
                if first >= samples:
                    return

    def _start(self) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(target=work, args=(other,), daemon=True)
            self.process.start()
            other.close()
            self._received(START_S)

    def _received(self, seconds: float) -> tuple[str, Any]:
        if not self.pipe.poll(seconds):
            raise TimeoutError
        return self.pipe.recv()

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.pipe.close()
            self.process.kill()
            self.process.join()
            self.process = self.pipe = None
