"""Rows of a results file that is whole after each of them, whatever happens next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, save

Row = dict[str, Any]

_POLL_S = 0.2
_LAST_WORDS = 300
"""Characters that are kept of an error's message, or of what a process wrote at its end."""


@dataclass(slots=True)
class Rows:
    """The rows of ``name.json``, written anew after each.

    Attributes:
        name: of the file.
        about: what all rows have in common.
        folder: where the file goes.
        rows: those so far.
    """

    name: str
    about: Row
    folder: Path = RESULTS
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row and save all."""
        self.rows.append(row)
        self.save(quiet=True)

    def save(self, *, quiet: bool = False) -> Path:
        """Write the file."""
        results = {**self.about, "rows": self.rows}
        return save(self.name, results, folder=self.folder, quiet=quiet)


def failure(error: BaseException) -> Row:
    """Type and message of an error, and of the errors that caused it, as part of a row."""
    causes = []
    cause: BaseException | None = error
    while cause is not None:
        message = " ".join(str(cause).split())[:_LAST_WORDS]
        causes.append(f"{type(cause).__name__}: {message}")
        cause = cause.__cause__
    return {"failed": causes[0], "causes": causes[1:]}


def run_part(
    arguments: Sequence[str],
    *,
    settings: Mapping[str, str | None],
    seconds: float,
    add: Callable[[Row], None],
) -> str | None:
    """Run a Python process that writes a row a line to a file, and add rows as they come.

    Args:
        arguments: of the interpreter; ``--rows PATH`` is added, see :func:`append`.
        settings: environment variables to set, or to leave out (``None``).
        seconds: the process is ended after that.
        add: called with each row.

    Returns:
        Why the process ended before it was done; ``None`` if it was.
    """
    environment = {**os.environ, **settings}
    kept = {name: value for name, value in environment.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="fxremat-rows-") as folder:
        path, words = Path(folder) / "rows", Path(folder) / "words"
        path.touch()
        with words.open("w") as errors, path.open() as lines:
            command = [sys.executable, *arguments, "--rows", str(path)]
            process = subprocess.Popen(command, env=kept, stderr=errors)
            try:
                in_time = _follow(process, lines.read, add, end_s=time.monotonic() + seconds)
            finally:
                process.kill()  # without effect if it has ended
                code = process.wait()
        if not in_time:
            return f"stopped after {seconds:.0f} s"
        if code:
            ending = words.read_text(errors="replace").strip()[-_LAST_WORDS:]
            return f"ended with status {code}: {' '.join(ending.split())}"
    return None


def _follow(
    process: subprocess.Popen[bytes],
    read: Callable[[], str],
    add: Callable[[Row], None],
    *,
    end_s: float,
) -> bool:
    """Add rows until the process has ended; False if time was up before that."""
    rest = ""
    while True:
        # Asked before reading: what it writes after its last row nobody waits for.
        over = process.poll() is not None
        late = not over and time.monotonic() > end_s
        *whole, rest = (rest + read()).split("\n")
        for line in whole:
            add(json.loads(line))
        if over or late:
            return over
        time.sleep(_POLL_S)


def append(path: Path, row: Row) -> None:
    """Write a row for the process that waits in :func:`run_part`."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
