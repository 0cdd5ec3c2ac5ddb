"""Warnings about the budget."""

from __future__ import annotations

from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import BudgetWarning

BUDGET_WARNINGS = (
    Diagnostic(
        "FXR101",
        BudgetWarning,
        "A step took more than its budget",
        why="The step needed memory that you did not specify: a loss outside the model, tensors "
        "that the loop keeps, values whose sizes depend on data, or an operation that takes more "
        "than when it was measured. The message names the cause. On a GPU, a step that was not "
        "observed is counted by CUDA's allocator, and the next step is observed.",
        remedy="One such warning in the first steps and none later needs no action: the next "
        "plan leaves room for that memory. But that step was over the budget, which may be an "
        "`OutOfMemoryError` on a full GPU. With `loss=` no step takes more. For memory that the "
        "loop holds in the backward, such as a list of outputs, pass `reserve=` with its bytes, or "
        "release it. For several forwards at once pass `in_flight=`. A warning at each step means "
        "that the memory of the step grows.",
        trouble="""
        def loss_of(y):
            return sum((scale * y).cos().square().sum() for scale in range(1, 9))


        compiled = fxremat.compile(model, x, "min")
        for _ in range(3):
            loss_of(compiled(x)).backward()
            compiled.zero_grad()
        """,
        remedies=(
            """
            compiled = fxremat.compile(model, x, "min", loss=loss_of)
            for _ in range(3):
                loss_of(compiled(x)).backward()
                compiled.zero_grad()
            """,
        ),
    ),
    Diagnostic(
        "FXR102",
        BudgetWarning,
        "No plan keeps a step of a running job to the budget",
        why="Since the budget was resolved, the memory outside the step has grown: state of an "
        "optimizer, outputs that are still held, gradients, another network, or another size. The "
        "step runs with the plan of least memory, and so do the next ones until there is room "
        "again.",
        remedy="Give the budget that the message names, or pass `optimizer=`, which counts the "
        "state of the optimizer from the beginning. With `strict=True` such a step is an error.",
        trouble="""
        def train(budget, **options):
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            given = {name: optimizer for name in options}
            compiled = fxremat.compile(model, x, budget, loss=torch.sum, **given)
            for _ in range(3):
                compiled(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


        least = fxremat.plan(model, x, "min", loss=torch.sum).budget_bytes
        train(least)
        """,
        remedies=(
            """
            train("min", optimizer=True)
            """,
        ),
    ),
    Diagnostic(
        "FXR103",
        BudgetWarning,
        "The loop holds tensors outside the model",
        why="Tensors were allocated since the model was compiled, and are held while a step runs: "
        "targets, a prefetched batch, a copy of the weights, results of an evaluation. Together "
        "with the step they exceed the budget.",
        remedy="Pass `reserve=` with the bytes that the message names, or "
        "`loss=fxremat.Loss(function, target=y)` where they are the target of the loss.",
        trouble="""
        def train(**options):
            compiled = fxremat.compile(model, x, "min", loss=torch.sum, **options)
            averaged = [torch.zeros_like(p) for p in model.parameters()]
            for _ in range(3):
                compiled(x).sum().backward()
                compiled.zero_grad()
            return averaged


        train()
        """,
        remedies=(
            """
            train(reserve="1 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR104",
        BudgetWarning,
        "Operations were measured inside a training step",
        why="The model was compiled without a sample, hooks were registered after that, or a "
        "batch has a new size. Operations are then measured inside the training call, where whole "
        "stages take more than the parts that the plan computes. For a new size, Inductor also "
        "chooses the fastest version of each Triton kernel, with a buffer as large as the GPU's "
        "L2 cache. A kernel of yours that Triton tunes takes 256 MiB.",
        remedy="Give `compile` a sample, after all hooks are registered. For new sizes, give a "
        "budget of the bytes that the message names.",
        trouble="""
        least = fxremat.plan(model, x, "min", loss=torch.sum).budget_bytes
        other = nn.Sequential(block(), nn.ReLU(), block(), block())
        compiled = fxremat.compile(other, budget=least, loss=torch.sum)
        compiled(x).sum().backward()
        """,
        remedies=(
            """
            compiled = fxremat.compile(other, x, "min", loss=torch.sum)
            compiled(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR105",
        BudgetWarning,
        "The memory of a new size is estimated",
        why="A step has a size that no step had before, and its operations cannot be measured, as "
        "while a profiler is on. Their workspaces are estimated from other sizes.",
        remedy="Run each size once before the profiler starts.",
        trouble="""
        def train(sizes):
            for size in sizes:
                compiled(torch.randn(size, 8, 16, 16)).sum().backward()
                compiled.zero_grad()


        convolutions = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        compiled = fxremat.compile(convolutions, torch.randn(8, 8, 16, 16), "64 MiB")
        train([8, 6])
        with torch.profiler.profile():
            train([7])
        """,
        remedies=(
            """
            train([7, 5])
            with torch.profiler.profile():
                train([7, 5])
            """,
        ),
    ),
    Diagnostic(
        "FXR106",
        BudgetWarning,
        "Gradients or outputs are still held in the backward",
        why="The loop used to clear gradients, or to release outputs, between forward and "
        "backward. In this step they are still held, as in a loop that accumulates gradients. Or "
        "the source of a post-accumulate hook says that it takes the gradient away, as an "
        "optimizer that steps in the backward does, but gradients stayed allocated.",
        remedy="Pass `accumulate=True` where gradients are accumulated. Otherwise the next plan "
        "leaves room for them.",
        trouble="""
        def train(**options):
            compiled = fxremat.compile(model, x, "min", loss=torch.sum, **options)
            for step in range(8):
                y = compiled(x)
                if step < 6:
                    compiled.zero_grad()
                y.sum().backward()


        train()
        """,
        remedies=(
            """
            train(accumulate=True)
            """,
        ),
    ),
    Diagnostic(
        "FXR107",
        BudgetWarning,
        "Earlier steps wait for their backward",
        why="Several forwards run before the first backward. The plan of an earlier forward "
        "assumed that it was the only one.",
        remedy="Pass `in_flight=` with the number of forwards that run before a backward.",
        trouble="""
        both = fxremat.plan(model, x, "min", loss=torch.sum, in_flight=2).budget_bytes


        def train(**options):
            compiled = fxremat.compile(model, x, both, loss=torch.sum, **options)
            for _ in range(3):
                losses = [compiled(x).sum(), compiled(x).sum()]
                sum(losses).backward()
                compiled.zero_grad()


        train()
        """,
        remedies=(
            """
            train(in_flight=2)
            """,
        ),
    ),
    Diagnostic(
        "FXR108",
        BudgetWarning,
        "The model is in eval mode, and its gradients are computed",
        why="Only training calls are planned. After `model.eval()`, a call runs as without "
        "fxremat, and no budget holds.",
        remedy="Call `model.train()` to train, or use `torch.no_grad()` where no gradient is "
        "needed.",
        trouble="""
        compiled = fxremat.compile(model, x, "64 MiB")
        compiled.eval()
        compiled(x).sum().backward()
        """,
        remedies=(
            """
            compiled.train()
            compiled(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR109",
        BudgetWarning,
        "The model is called inside a mode that follows no plan",
        why="A transform of `torch.func`, a `TorchDispatchMode` such as `FlopCounterMode`, or a "
        "stance of `torch.compiler` that runs code eagerly receives each operation of the model. "
        "The call runs as without fxremat, and no budget holds.",
        remedy="Call the compiled model outside of such a mode, or use the original model there.",
        trouble="""
        from torch.utils.flop_counter import FlopCounterMode

        compiled = fxremat.compile(model, x, "64 MiB")
        with FlopCounterMode(display=False):
            compiled(x).sum().backward()
        """,
        remedies=(
            """
            with FlopCounterMode(display=False):
                model(x).sum().backward()
            compiled(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR110",
        BudgetWarning,
        "A step of several graphs took more than its budget",
        why="The model is captured as several graphs, and the code between them allocates memory "
        "that is not planned. The message names the places where graphs break.",
        remedy="If the warning does not come again, the plans have left room. Otherwise give the "
        "budget that the message names, or move the code that breaks the graph out of the forward "
        "(see FXR201).",
        trouble="""
        class Wide(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = block(), block()

            def forward(self, x):
                y = self.first(x)
                return self.second(y) + allocate(y)


        @torch.compiler.disable
        def allocate(y):
            return y.repeat(1, 32).cos()[:, :64]


        PARTS = ["first", "second"]  # as if a graph break were after each


        def train(budget):
            compiled = fxremat.compile(Wide(), x, budget, regions=PARTS)
            for _ in range(12):
                compiled(x).sum().backward()
                compiled.zero_grad()


        train("6 MiB")
        """,
        remedies=(
            """
            train("32 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR111",
        BudgetWarning,
        "A module with a `loss=` is saved before its first step",
        why="`torch.save` and pickle do not save the function of `loss=`, but the memory that it "
        "was measured to need. This module was not planned yet, so nothing was measured.",
        remedy="Save the module after a step, give `compile` a sample, or compile the loaded "
        "module again with `loss=`.",
        trouble="""
        import pickle

        pickle.dumps(fxremat.compile(model, budget="64 MiB", loss=torch.sum))
        """,
        remedies=(
            """
            pickle.dumps(fxremat.compile(model, x, "64 MiB", loss=torch.sum))
            """,
        ),
    ),
    Diagnostic(
        "FXR112",
        BudgetWarning,
        "The optimizer's own step exceeds the budget",
        why="`optimizer.step()` allocates memory after the planned step, so no plan reduces it.",
        remedy="Give the budget that the message names, or an optimizer with `fused=True`, which "
        "allocates less.",
        trouble="""
        wide = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64))


        def train(fused):
            optimizer = torch.optim.AdamW(wide.parameters(), fused=fused)
            compiled = fxremat.compile(wide, x[:8], "min", optimizer=optimizer)
            for _ in range(3):
                compiled(x[:8]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


        train(fused=False)
        """,
        remedies=(
            """
            train(fused=True)
            """,
        ),
    ),
    Diagnostic(
        "FXR113",
        BudgetWarning,
        "`verify_every=` compares nothing",
        why="`fxremat.Bits(verify_every=n)` compares operations that are computed in parts with "
        "their results as a whole. The budget leaves no memory for the whole, or the steps in "
        "which a comparison was due were measured for later plans.",
        remedy="Give as many bytes more as the message names, or omit `verify_every=`.",
        trouble="""
        def train(more_bytes):
            budget = fxremat.plan(model, x, "min", loss=torch.sum).budget_bytes + more_bytes
            bits = fxremat.Bits(verify_every=1)
            compiled = fxremat.compile(model, x, budget, loss=torch.sum, bits=bits)
            for _ in range(6):
                compiled(x).sum().backward()
                compiled.zero_grad()


        train(0)
        """,
        remedies=(
            """
            train(2**20)
            """,
        ),
    ),
    Diagnostic(
        "FXR114",
        BudgetWarning,
        "Operations gave other bits in parts than as a whole",
        why="A library has chosen another kernel for parts of a tensor in a training step than "
        "when it was measured. The step uses the bits of the whole; earlier steps may differ by "
        "rounding.",
        remedy="Please report this. Later plans do not use this run of operations, so they may "
        "take more memory or time. `effort=fxremat.Effort(forms=('norms',))` disables parts.",
        needs="a kernel that gives other bits for a part of its rows",
        test="tests/loop/test_comparison.py::test_a_run_that_changes_bits_is_not_in_parts_any_more",
    ),
    Diagnostic(
        "FXR115",
        BudgetWarning,
        "The sample is ignored, because parameters do not exist yet",
        why="Lazy modules, such as `nn.LazyLinear`, create their parameters in the first call.",
        remedy="Call the model once before you compile it.",
        trouble="""
        lazy = nn.Sequential(nn.LazyLinear(64), block())
        fxremat.compile(lazy, x, "64 MiB")
        """,
        remedies=(
            """
            lazy(x)
            fxremat.compile(lazy, x, "64 MiB")
            """,
        ),
    ),
)
