"""Programs that break the graph, checked from a shell: see :mod:`tests.broken_programs`."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from tests.broken_check import BUDGETS, Budget, check, truth, varies
from tests.broken_programs import program

MOST_S = 600
"""Of one check."""


def main(words: Sequence[str]) -> None:
    """See :mod:`tests.broken_programs`."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it tells of breaks
    if words and words[0] in ("--range", "--reference"):
        one = _range_line if words[0] == "--range" else _reference_line
        for seed in range(int(words[1]), int(words[2])):
            one(seed)
        return
    seed = int(words[0])
    model, (sample,) = program(seed)
    print(model.source)
    known = truth(seed)
    print(
        f"{tuple(sample.shape)}, new data each step: {varies(seed)}, {known.graphs} graphs, "
        f"eager's peak {known.peak_bytes} bytes\n"
        f"beside {known.backend}; eager differs: {known.differs}"
    )
    for budget in [_read(word) for word in words[1:]] or BUDGETS:
        begin = time.perf_counter()
        found = check(seed, budget)
        print(f"\nbudget {budget}: {time.perf_counter() - begin:.1f} s")
        for text in found.notes:
            print(f"  {text}")
        for text in found.failures:
            print(f"  FAILED {text}")


def _read(word: str) -> Budget:
    if word == "min":
        return word
    return float(word) if float(word) <= 1 else int(word)


def _range_line(seed: int) -> None:
    """Lines of one program, whatever happens."""
    for budget in BUDGETS:
        begin = time.perf_counter()
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(MOST_S)
        try:
            failures = check(seed, budget).failures
        except Exception as error:
            failures = [f"the check raised {type(error).__name__}: {error}"]
        finally:
            signal.alarm(0)
        told = "; ".join(" ".join(text.split())[:240] for text in failures) or "ok"
        print(f"{seed} {budget} {time.perf_counter() - begin:.1f}s {told}", flush=True)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {MOST_S} s")


def _reference_line(seed: int) -> None:
    """Whether a program runs, comes to the same under ``aot_eager``, and has gradients."""
    begin = time.perf_counter()
    known = truth(seed)
    gradients = known.ran.states[-1].gradients.values()
    trained = sum(gradient is not None for gradient in gradients)
    model_bytes = sum(p.nbytes for p in known.ran.states[-1].parameters.values())
    print(
        f"{seed} {time.perf_counter() - begin:.1f}s {known.backend} graphs={known.graphs} "
        f"trained={trained}/{len(gradients)} peak={known.peak_bytes} model={model_bytes} "
        f"eager differs: {known.differs}",
        flush=True,
    )
