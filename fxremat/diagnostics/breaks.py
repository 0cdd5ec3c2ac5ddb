"""Warnings about models that are captured as several graphs, and about kernels."""

from __future__ import annotations

from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import FxrematWarning, GraphBreakWarning

BRANCHES = """
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = block(), block()

            def forward(self, x):
                y = self.first(x)
                if y.sum() > 0:
                    y = y * 2
                return self.second(y)


        """
"""A model whose graph breaks, with which several programs begin."""

BREAKS = (
    Diagnostic(
        "FXR201",
        GraphBreakWarning,
        "The model is captured as several graphs",
        why="Dynamo breaks the graph at each place that the message names. Each graph is planned, "
        "and all share the budget. The code between them is counted, but not planned. The message "
        "has the seconds and bytes of that code, and the warning is given once.",
        remedy="Nothing is wrong: the peak is within the budget, or a `BudgetWarning` follows. "
        "Where the seconds or bytes matter, write what breaks the graph so that it can be "
        "captured, as `torch.where` in place of an `if` on data. Or move it out of the forward.",
        trouble=BRANCHES
        + """
        def train(model, **options):
            compiled = fxremat.compile(model, x, "64 MiB", **options)
            for _ in range(8):
                compiled(x).sum().backward()
                compiled.zero_grad()


        train(Branches())
        """,
        remedies=(
            """
            class Chooses(Branches):
                def forward(self, x):
                    y = self.first(x)
                    y = torch.where(y.sum() > 0, y * 2, y)
                    return self.second(y)


            train(Chooses(), regions="one")
            """,
        ),
    ),
    Diagnostic(
        "FXR202",
        GraphBreakWarning,
        "A function is captured again at each step",
        why="Dynamo compiles a function for the values that it reads, such as the length of a "
        "list. Here such a value differs at each step although the graph is the same. From now on "
        "the function runs as without fxremat, and functions that it calls are captured "
        "separately.",
        remedy="Do not let the forward depend on a value that changes at each step: keep the list "
        "or the counter outside of it, or make it a tensor.",
        trouble="""
        class Logs(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.seen = block(), []

            def forward(self, x):
                y = self.body(x)
                torch._dynamo.graph_break()
                self.seen.append(len(self.seen))
                return y * 2


        def train(model, **options):
            compiled = fxremat.compile(model, x, "64 MiB", **options)
            for _ in range(16):
                compiled(x).sum().backward()
                compiled.zero_grad()


        train(Logs())
        """,
        remedies=(
            """
            class Pure(Logs):
                def forward(self, x):
                    return self.body(x) * 2


            train(Pure())
            """,
        ),
    ),
    Diagnostic(
        "FXR203",
        GraphBreakWarning,
        "A graph of the model cannot be planned",
        why="The model is captured as several graphs, and one of them has what cannot be planned, "
        "which the message names. That graph runs as without fxremat, with all the memory that it "
        "needs.",
        remedy="Do what the message says about that graph. If its memory does not matter, nothing "
        "needs to be done.",
        trouble="""
        import torch.distributed as dist
        import torch.distributed._functional_collectives as collectives
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


        class Reduced(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = block()

            def forward(self, x):
                return collectives.all_reduce(self.body(x).tanh(), "sum", dist.group.WORLD) * 2


        compiled = fxremat.compile(Reduced(), x, "64 MiB")
        for _ in range(3):
            compiled(x).sum().backward()
        """,
        remedies=(
            """
            dist.destroy_process_group()
            compiled = fxremat.compile(Reduced().body, x, "64 MiB")
            compiled(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR204",
        GraphBreakWarning,
        "Nothing of the model is planned",
        why="No operation of the model that has a gradient can be captured, or the model returns "
        "only views of its parameters and inputs. It runs as without fxremat.",
        remedy="Move code that can be captured into separate modules or functions. A model of "
        "views needs no plan: use it without fxremat.",
        trouble="""
        class Seen(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(64, 64))

            def forward(self, x):
                return self.weight.t()


        compiled = fxremat.compile(Seen(), x, "64 MiB")
        compiled(x).sum().backward()
        """,
        remedies=(
            """
            Seen()(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR205",
        GraphBreakWarning,
        "Steps of several graphs could not be observed, or not be planned together",
        why="The plans of several graphs are chosen together once a step has been observed. Each "
        "step called new graphs or had new sizes, or its memory could not be observed, as while "
        "a profiler is active. Such steps follow the plans of least memory: their results are "
        "correct, but they are slower.",
        remedy="Run some steps before the profiler starts, and let steps have sizes that come "
        "again. Moving the code that breaks the graph out of the forward avoids it altogether.",
        trouble=BRANCHES
        + """
        def train(compiled):
            compiled(x).sum().backward()
            compiled.zero_grad()


        compiled = fxremat.compile(Branches(), x, "64 MiB", regions=["first", "second"])
        train(compiled)
        with torch.profiler.profile():
            for _ in range(4):
                train(compiled)
        """,
        remedies=(
            """
            compiled = fxremat.compile(Branches(), x, "64 MiB", regions=["first", "second"])
            for _ in range(8):
                train(compiled)
            with torch.profiler.profile():
                train(compiled)
            """,
        ),
    ),
    Diagnostic(
        "FXR210",
        FxrematWarning,
        "A fused kernel could not be compiled",
        why="With `executor='inductor'`, Inductor compiles runs of operations to kernels. It "
        "failed for the operations that the message names, for instance because a compiler is "
        "missing or broken. They run one by one, with the same results.",
        remedy="Nothing needs to be done, but such a step is slower. Repair what the message "
        "names, or pass `executor='eager'`.",
        needs="a compiler that fails",
        test="tests/passes/test_unit.py::test_a_unit_that_its_compiler_refuses_is_told_of_and_runs_as_it_is",
    ),
)
