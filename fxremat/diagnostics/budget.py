"""Errors about the budget."""

from __future__ import annotations

from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import BudgetError

BUDGET = (
    Diagnostic(
        "FXR001",
        BudgetError,
        "The budget is missing or cannot be read",
        why="A budget is a number of bytes, a share of the memory that the step takes with "
        "everything kept, or `'min'`. Some functions, such as `max_batch`, take only bytes.",
        remedy="Write bytes as an int or as `'6 GiB'`, a share as `0.5` or `'50%'`, or `'min'`. "
        "`'22 GiB reserved'` limits the bytes that CUDA's allocator reserves.",
        trouble="""
        fxremat.compile(model, x, "6 gigs")
        """,
        remedies=(
            """
            fxremat.compile(model, x, "6 GiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR002",
        BudgetError,
        "No plan keeps to the budget",
        why="The step takes more than the budget with every plan that was searched. The message "
        "names the least budget, the operation that needs it, and, after `of which`, memory that "
        "is held outside the step: gradients that exist, outputs that are still held, a loss, an "
        "optimizer's state.",
        remedy="Give at least the first number after `Give at least`, which is "
        "`error.least_budget_bytes`; the numbers after it suffice under the conditions that they "
        "name. To need less, pass `loss=` for a loss outside the model, without which three times "
        "the bytes of the outputs are set aside. Call `optimizer.zero_grad()` before the forward, "
        "or pass `offload='auto'`. `fxremat.max_batch` finds the largest batch that fits; where "
        "sizes vary, `error.largest` has the largest size of each dimension.",
        trouble="""
        fxremat.compile(model, x, "1 MiB")
        """,
        remedies=(
            """
            try:
                fxremat.compile(model, x, "1 MiB")
            except fxremat.BudgetError as error:
                fxremat.compile(model, x, error.least_budget_bytes)
            """,
        ),
    ),
    Diagnostic(
        "FXR003",
        BudgetError,
        "The budget is less than the saved plan takes",
        why="A saved plan is followed as it is, and takes the same memory under any budget.",
        remedy="Omit the budget to follow the plan, or omit `plan=` to plan for the budget.",
        trouble="""
        plan = fxremat.plan(model, x, 0.9)
        fxremat.compile(model, x, "1 MiB", plan=plan)
        """,
        remedies=(
            """
            fxremat.compile(model, x, plan=plan)
            """,
        ),
    ),
    Diagnostic(
        "FXR004",
        BudgetError,
        "Steps of several graphs exceed the budget, with `strict=True`",
        why="The model is captured as several graphs. The code between them allocates memory that "
        "no plan reduces, and several steps in a row took more than the budget.",
        remedy="Give at least the bytes that the message names, or move the code that breaks the "
        "graph out of the forward.",
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
            return y.repeat(1, WIDTH[0]).cos()[:, :64]


        PARTS = ["first", "second"]  # as if a graph break were after each
        WIDTH = [16]


        def train(budget, more):
            compiled = fxremat.compile(Wide(), x, budget, regions=PARTS, strict=True)
            for step in range(8):
                WIDTH[0] = 16 + step * more
                compiled(x).sum().backward()
                compiled.zero_grad()


        train("24 MiB", more=16)
        """,
        remedies=(
            """
            train("64 MiB", more=0)
            """,
        ),
    ),
)
