"""A Llama of 1.2 billion parameters on one GPU: what each way to save memory takes, and how long.

The configuration is that of torchtitan#3881 on one GPU: the shape of Llama-3.2-1B, random weights
in bfloat16, 4 x 2048 tokens, fused AdamW. A second network has convolutions: ResNet-50 under
autocast. All contenders are functions over one module, so there is one set of parameters and of
optimizer state. Each trains five steps, the last two of them from an empty cache, which show what
the allocator reserves; then five steps are timed, in turns with the contender whose peak it was
given. A step is forward, backward and optimizer, and peaks are of all three; ``held`` compares what
fxremat promises, the peak of forward and backward, with the budget, and predictions are of these
two.

MFU is ``tokens * (6 * parameters + 12 * layers * width * length)`` floating point operations a step
over the dense peak of an H100 or H200 in bfloat16, 989e12 a second.

Each row is saved as it is made, in ``--results``, with a copy in ``--cache``; the table and the
targets go into a file there, too. ``--seconds`` bounds the run: rows that would begin later are
left, and a call with ``--skip-done`` goes on from there.

Run: python -m benchmarks.gpu_llama [--network llama|resnet50|all] [--results FOLDER] [--seconds S]
     python -m benchmarks.gpu_llama --skip-done            (what the last call left)
     python -m benchmarks.gpu_llama --only "57%"           (those rows, once more)
     python -m benchmarks.gpu_llama --summary              (the table of what there is)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import RESULTS

CACHE = Path(__file__).parents[1] / "build" / "gpu"
"""In a folder that git ignores: compiled kernels, measured costs, plans, and a copy of the rows."""


def environment(given: Mapping[str, str], cache: Path, *, small: bool) -> dict[str, str]:
    """Variables to set before torch is imported.

    Args:
        given: the variables that are set already; what their user chose stays. ``FXREMAT_CACHE=0``
            counts as no choice, since all benchmarks set it.
        cache: the folder of all caches.
        small: a run that only tries the script.
    """
    found = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "FXREMAT_CACHE": str(cache / "fxremat"),
        # As torchtitan does: contenders that take turns leave each other whole segments.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    if small:
        # Over the tests' stand-in compiled kernels compute nothing, so nor may what reads them.
        found["STAND_IN_VALUES"] = "skipped"
    if "PYTORCH_CUDA_ALLOC_CONF" in given:
        del found["PYTORCH_ALLOC_CONF"]
    return {
        name: value
        for name, value in found.items()
        if name not in given or (name == "FXREMAT_CACHE" and given[name] == "0")
    }


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=("llama", "resnet50", "all"), default="llama")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--seconds", type=float, default=480.0, help="no row begins after that")
    parser.add_argument("--skip-done", action="store_true", help="go on from the rows of before")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows that have it")
    parser.add_argument("--summary", action="store_true", help="show the rows that there are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where files go")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of all caches")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    options.cache = options.cache.absolute()
    os.environ.update(environment(os.environ, options.cache, small=options.small))
    # It imports torch, which reads these variables as it is imported.
    from benchmarks.gpu_llama_run import run

    run(options)


if __name__ == "__main__":
    main()
