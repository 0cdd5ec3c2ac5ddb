"""What the planner's compiled loops cost on a new machine: CPU seconds of the first ``compile``.

Each run is a process of its own: numba's cache folder is empty, then holds what that run left. The
package's own cache is off. Which loops a run compiles, for which types, and how long each takes
without the loops that it calls, goes into ``results/compiling_planner.json``.
Run: python -m benchmarks.planner_loops [example …] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import save, show


def _readme() -> None:
    """Run the example of README."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    exec(text.split("```python\n")[1].split("```")[0], {})


def _of(name: str, budget: Any, **options: Any) -> Callable[[], None]:
    def run() -> None:
        from benchmarks.steps import entry_of, planned

        planned(entry_of(name), budget, **options)

    return run


EXAMPLES: dict[str, Callable[[], None]] = {
    "readme": _readme,
    "llama": _of("hf_llama", 0.5),
    "unet": _of("unet", 0.5),
    "offload": _of("gpt4", 0.5, offload="auto"),
    "branches": _of("bench_siamese_resnet", 0.5),
}


def cpu_seconds() -> float:
    """User and system seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Loops:
    """Listens to numba: the seconds of each compiled loop, without those of loops inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.passes: dict[str, float] = defaultdict(float)
        self._open: list[list[float]] = []

    def listen(self) -> None:
        """Note all that is compiled from now on."""
        from numba.core import event

        outer = self

        class Compiled(event.Listener):  # type: ignore[misc]
            def on_start(self, _event: Any) -> None:
                outer._open.append([cpu_seconds(), 0.0])

            def on_end(self, event: Any) -> None:
                begin, inner = outer._open.pop()
                total = cpu_seconds() - begin
                if outer._open:
                    outer._open[-1][1] += total
                function = event.data["dispatcher"].py_func
                types = ", ".join(map(str, event.data["args"]))
                name = f"{function.__module__}.{function.__qualname__}({types})"
                outer.seconds[name] = outer.seconds.get(name, 0.0) + total - inner

        class Passed(event.Listener):  # type: ignore[misc]
            def __init__(self) -> None:
                self.open: list[list[float]] = []

            def on_start(self, _event: Any) -> None:
                self.open.append([cpu_seconds(), 0.0])

            def on_end(self, event: Any) -> None:
                begin, inner = self.open.pop()
                total = cpu_seconds() - begin
                if self.open:
                    self.open[-1][1] += total
                outer.passes[event.data["name"]] += total - inner

        event.register("numba:compile", Compiled())
        event.register("numba:run_pass", Passed())


def measure(example: str, *, listens: bool) -> dict[str, Any]:
    """CPU seconds of an example in this process, after torch is imported."""
    import torch

    torch.set_num_threads(1)
    loops = Loops()
    begin = cpu_seconds()
    import numba  # noqa: F401

    imported = cpu_seconds()
    if listens:
        loops.listen()
    EXAMPLES[example]()
    return {
        "cpu_s": cpu_seconds() - begin,
        "numba_import_s": imported - begin,
        "loops": loops.seconds,
        "passes": loops.passes,
    }


def in_a_process(example: str, cache: str, *, listens: bool) -> dict[str, Any]:
    """The same in a new process, with numba's cache in the folder ``cache``."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "FXREMAT_CACHE": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "FXREMAT_PROGRESS": "0"}
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, "--one", example]  # type: ignore[name-defined]
    command += ["--listen"] if listens else []
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=EXAMPLES)
    parser.add_argument("--listen", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, listens=options.listen)))
        return
    found: dict[str, Any] = {}
    for example in options.examples:
        runs = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                runs.append([in_a_process(example, cache, listens=False) for _ in range(2)])
        with tempfile.TemporaryDirectory() as cache:
            listened = in_a_process(example, cache, listens=True)
        first, second = (statistics.median(r[i]["cpu_s"] for r in runs) for i in range(2))
        found[example] = {
            "first_s": first,
            "second_s": second,
            "numba_import_s": listened["numba_import_s"],
            "loops": dict(sorted(listened["loops"].items(), key=lambda each: -each[1])),
            "passes": dict(sorted(listened["passes"].items(), key=lambda each: -each[1])[:12]),
        }
    if not options.no_save:
        save("compiling_planner", found, quiet=True)
    show(
        "CPU seconds of the first compile",
        ["example", "empty cache", "filled", "difference", "loops", "in loops"],
        [
            [
                name,
                f"{each['first_s']:.1f}",
                f"{each['second_s']:.1f}",
                f"{each['first_s'] - each['second_s']:.1f}",
                str(len(each["loops"])),
                f"{sum(each['loops'].values()):.1f}",
            ]
            for name, each in found.items()
        ],
    )


if __name__ == "__main__":
    main()
