"""The page of all errors and warnings: ``python -m docs.troubleshooting --write``.

Each text on it was printed by the program above it, which this module runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fxremat.diagnostics.entry import SETUP, Diagnostic
from fxremat.diagnostics.table import DIAGNOSTICS
from fxremat.errors import FxrematError, FxrematWarning

FILE = Path(__file__).with_suffix(".md")
WIDTH = 100

INTRO = """\
# Troubleshooting

Each error and warning of fxremat has a code, with which its text ends. This page has an entry for
each code: why it comes, a program that raises it, and programs that follow the advice. In a
terminal, `fxremat explain FXR002` prints the same.

All errors are `fxremat.FxrematError`, all warnings `fxremat.FxrematWarning`, and both have `code`
and `message`. Errors of `compile` come before your model is changed. What your model raises by
itself is not changed. If your problem has no code, see
[where no error helps](#where-no-error-helps).

The programs below begin with

```python
{setup}```

The texts were printed by torch 2.13 on a CPU; bytes and seconds differ on other machines.
`python -m docs.troubleshooting --write` makes this page from the table in `fxremat/diagnostics`.
"""

NOTES = {
    "BudgetError": "The budget cannot be read, or no plan keeps to it. An error comes before the "
    "budget is accepted, or with `strict=True`; a later step that does not fit is a "
    "[BudgetWarning](#budgetwarning).",
    "BudgetWarning": "A step may exceed its budget, for a reason that was unknown when it was "
    "planned. `logging.basicConfig(level=logging.INFO)` logs each observed step, also those within "
    "the budget, and `model.plan.also_held` lists the memory that the planned call needs in "
    "addition to that of every call.",
    "GraphBreakWarning": "Dynamo captures the model as several graphs. Each is planned, and all "
    "share the budget; the code between them is counted, but not planned.",
    "CaptureError": "The step cannot be captured as one graph where one is asked for, or it "
    "contains what cannot be planned.",
    "ArgumentError": "An argument other than the budget is wrong. The error is a `ValueError` and "
    "a `TypeError`, and has `argument` and `value`.",
    "BackwardError": "A planned step cannot give this backward, or it would be wrong. The error is "
    "a `RuntimeError`, as errors of autograd are.",
    "HostMemoryError": "With `offload=`, host memory cannot be allocated. `error.asked_bytes` is "
    "the number of bytes requested.",
    "TransferError": "With `offload=`, a copy between device and host was not made, or is "
    "requested where it cannot be made.",
    "RankError": "Several processes train one model and must follow one plan. `error.ranks` names "
    "those that differ or do not come.",
    "FxrematError": "The base of all errors: `except fxremat.FxrematError` catches what fxremat "
    "raises, and nothing that your own code raises.",
}
"""What is said about a class before its entries."""

END = """\
## Where no error helps

### Memory that is not counted

The budget is for one process, and for what the step allocates on its device. Other processes,
CUDA's context, and tensors of your loop, such as prefetched batches or averaged weights, are not in
it: `reserve=` leaves bytes for them. On CUDA the allocator takes more of the device than it hands
out; a budget such as `"22 GiB reserved"` limits that
([what is counted](design/0006-what-is-counted.md), [the allocator](design/0015-the-allocator.md)).

### It is slow

* The first call captures, measures and plans. That happens once for each step, and a second process
  takes the plan from the cache folder, which `FXREMAT_CACHE` names.
* If a step is slower than expected, `model.plan.explain()` says what is recomputed and what that
  costs. `plan.lower_bound_s` is the least that any plan within that budget could take. A few
  percent more budget often saves most: `fxremat.frontier(model, sample)` has the time at every
  budget.
* Fused kernels are `executor="inductor"`. Without it, operations run one by one, as in eager,
  except with `torch.compile(backend="fxremat")` on a GPU, where fused kernels are the default.

### Numbers differ from eager's

They are those of the same graph with everything kept, as `torch.compile(backend="aot_eager")` runs
it: compare with that. Eager itself differs from it where decompositions or fused kernels round
differently.
"""


def page(texts: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        texts: for each code that has a program, what it printed.
    """
    lines = [INTRO.format(setup=SETUP), "| code | class | |", "|---|---|---|"]
    for entry in DIAGNOSTICS:
        name = entry.kind.__name__
        lines += [f"| [{entry.code}](#{entry.code.lower()}) | `{name}` | {entry.title} |"]
    lines += [""]
    kinds = dict.fromkeys(entry.kind for entry in DIAGNOSTICS)
    for kind in kinds:
        lines += [f"## {kind.__name__}", ""]
        if kind.__name__ in NOTES:
            lines += [_wrapped(NOTES[kind.__name__]), ""]
        for entry in DIAGNOSTICS:
            if entry.kind is kind:
                lines += [*_section(entry, texts.get(entry.code, "")), ""]
    return "\n".join([*lines, END])


def _section(entry: Diagnostic, text: str) -> Iterator[str]:
    # An anchor of its own: GitHub and the site make other ones of the same heading.
    yield f'<a id="{entry.code.lower()}"></a>'
    yield ""
    yield f"### {entry.code}: {entry.title}"
    yield ""
    yield _wrapped(entry.why)
    yield ""
    if entry.trouble:
        yield f"```python\n{entry.trouble}```\n"
        yield f"```text\n{text}\n```\n"
    yield _wrapped(entry.remedy)
    for remedy in entry.remedies:
        yield f"\n```python\n{remedy}```"
    if entry.needs:
        yield f"\nThere is no program here, since raising it takes {entry.needs}."


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def texts_of(text: str) -> dict[str, str]:
    """Return for each code what a page says that its program printed."""
    sections = re.split(r'^<a id="(fxr\d+)"></a>$', text, flags=re.M)[1:]
    found = zip(sections[::2], sections[1::2], strict=True)
    blocks = {
        code.upper(): re.search(r"^```text\n(.*?)\n```$", t, re.M | re.S) for code, t in found
    }
    return {code: block[1] for code, block in blocks.items() if block}


def run(program: str, folder: Path, names: dict[str, Any]) -> None:
    """Run a program from a file of its own, since Dynamo reads the lines that it captures."""
    file = folder / f"block{len(list(folder.glob('block*.py')))}.py"
    file.write_text(program)
    exec(compile(program, str(file), "exec"), names)


def raised_by(
    entry: Diagnostic, folder: Path, names: dict[str, Any]
) -> FxrematError | FxrematWarning | None:
    """Run a program and return what it raised or warned of by its entry's code, if it did."""
    run(SETUP, folder, names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(entry.trouble, folder, names)
        except FxrematError as error:
            return error if error.code == entry.code else None
    ours = [each.message for each in caught if isinstance(each.message, FxrematWarning)]
    return next((warning for warning in ours if warning.code == entry.code), None)


def printed(error: FxrematError | FxrematWarning) -> str:
    """Return what is printed of an error or warning, with short names of files, and wrapped."""
    text = re.sub(r"[^\s\"']*block\d+\.py", "model.py", f"{type(error).__name__}: {error}")
    lines: list[str] = []
    for line in text.splitlines():
        indented = line.startswith(" ")
        lines += [line] if indented or not line else _wrapped(line).splitlines()
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def _in_new_folder() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def _printed_by(entry: Diagnostic) -> str:
    import torch  # noqa: PLC0415, slow

    from fxremat.costs.measured import cache  # noqa: PLC0415, imports torch

    torch._dynamo.reset()
    cache.COSTS.clear()
    names: dict[str, Any] = {}
    with _in_new_folder() as folder:
        error = raised_by(entry, folder, names)
        if error is None:
            raise SystemExit(f"the program of {entry.code} does not raise it")
        text = printed(error)
        for remedy in entry.remedies:  # which also ends what the program has begun
            run(remedy, folder, names)
    return text


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("codes", nargs="*", help="run programs of these codes only")
    asked = parser.parse_args()
    texts = texts_of(FILE.read_text()) if FILE.exists() else {}
    for entry in DIAGNOSTICS:
        if entry.trouble and (entry.code in asked.codes or not asked.codes):
            texts[entry.code] = _printed_by(entry)
            if asked.write:
                FILE.write_text(page(texts))
    if not asked.write:
        print(page(texts))


if __name__ == "__main__":
    main()
