"""Errors about plans, costs, graphs and schedules."""

from __future__ import annotations

from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import CostError, GraphError, PlanError, ScheduleError

PLANS = (
    Diagnostic(
        "FXR601",
        PlanError,
        "There is no plan yet",
        why="The module was compiled without a sample and has not trained, or it is captured as "
        "several graphs whose plans were not chosen together yet.",
        remedy="Run a training step, or some where the model is captured as several graphs, or "
        "pass `fxremat.compile` a sample.",
        trouble="""
        compiled = fxremat.compile(model, budget="64 MiB")
        compiled.plan
        """,
        remedies=(
            """
            compiled(x).sum().backward()
            compiled.plan
            """,
        ),
    ),
    Diagnostic(
        "FXR602",
        PlanError,
        "The saved plan is for another step",
        why="A plan holds for the operations, sizes, dtypes, device, options and version of torch "
        "that it was made for. `error.differs` lists what is different.",
        remedy="Compile as the plan was made, or omit `plan=` to plan again.",
        trouble="""
        fxremat.plan(model, x, 0.9).save("plan.json")
        fxremat.compile(nn.Sequential(block(), block()), x, plan="plan.json")
        """,
        remedies=(
            """
            fxremat.compile(model, x, plan="plan.json")
            """,
        ),
    ),
    Diagnostic(
        "FXR603",
        PlanError,
        "The saved plan cannot be read or followed",
        why="The file is missing or damaged, or another version of fxremat wrote it, or the code "
        "that it contains is not what its decisions lead to.",
        remedy="Plan again, and save the new plan.",
        trouble="""
        with open("plan.json", "w") as file:
            file.write("{}")
        fxremat.compile(model, x, plan="plan.json")
        """,
        remedies=(
            """
            fxremat.plan(model, x, 0.9).save("plan.json")
            fxremat.compile(model, x, plan="plan.json")
            """,
        ),
    ),
    Diagnostic(
        "FXR604",
        PlanError,
        "A plan cannot be written",
        why="The folder does not exist, or this user cannot write to it.",
        remedy="Pass the path of a file in an existing folder that this user can write to.",
        trouble="""
        plan = fxremat.plan(model, x, 0.9)
        plan.save("missing/plan.json")
        """,
        remedies=(
            """
            plan.save("plan.json")
            """,
        ),
    ),
    Diagnostic(
        "FXR605",
        PlanError,
        "The plan does not contain what is asked of it",
        why="Traces and pictures need a record of one graph of a model. A step of several "
        "graphs, a plan of a problem in numbers, and a trace of another step have none.",
        remedy="Use the plan of one graph that `fxremat.compile` or `fxremat.plan` made. For a "
        "step of several graphs, `plan.save_trace(path)` has the prediction.",
        trouble="""
        def step(compiled):
            compiled(x).sum().backward()
            compiled.zero_grad()


        several = fxremat.compile(model, x, "64 MiB", regions=["0", "1"])
        step(several)
        several.trace_step(lambda: step(several))
        """,
        remedies=(
            """
            whole = fxremat.compile(model, x, "64 MiB")
            whole.trace_step(lambda: step(whole))
            """,
        ),
    ),
    Diagnostic(
        "FXR611",
        CostError,
        "Memory cannot be measured while a profiler is active",
        why="Planning observes the allocator by torch's profiler, of which a thread has one.",
        remedy="Plan before the profiler starts: compile with a sample, or run once, each shape "
        "of the step that is profiled.",
        trouble="""
        fresh = nn.Sequential(block(), nn.Tanh(), block())
        with torch.profiler.profile():
            fxremat.compile(fresh, x, "64 MiB")
        """,
        remedies=(
            """
            compiled = fxremat.compile(fresh, x, "64 MiB")
            compiled(x).sum().backward()
            with torch.profiler.profile():
                compiled(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR612",
        CostError,
        "An operation cannot be measured by itself",
        why="Each operation is run on tensors of the right shapes, but with other values, to "
        "measure its seconds and bytes. The operation that the message names failed there, or "
        "returned other tensors than its fake implementation.",
        remedy="Repair the operation: it must run for any values, and its fake implementation "
        "must return what it returns. `torch.library.opcheck` tests that.",
        trouble="""
        @torch.library.custom_op("example::half", mutates_args=())
        def half(y: torch.Tensor) -> torch.Tensor:
            return y / 2


        @torch.library.custom_op("example::half_backward", mutates_args=())
        def half_backward(gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("this kernel exists in name only")


        half.register_fake(torch.empty_like)
        half_backward.register_fake(torch.empty_like)
        half.register_autograd(lambda context, gradient: half_backward(gradient))


        class Half(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = block()

            def forward(self, x):
                return half(self.body(x))


        fxremat.compile(Half(), x, "64 MiB")
        """,
        remedies=(
            """
            half.register_autograd(lambda context, gradient: gradient / 2)
            fxremat.compile(Half(), x, "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR613",
        CostError,
        "The costs are of another step",
        why="`costs=` of `fxremat.estimate` takes measurements from a saved plan. That plan is "
        "for another model or other options, or its file is damaged.",
        remedy="Pass a plan of the same model and options, or omit `costs=`.",
        trouble="""
        plan = fxremat.plan(nn.Sequential(block(), block()), x, 0.9)
        fxremat.estimate(model, x, device="cpu", costs=plan)
        """,
        remedies=(
            """
            fxremat.estimate(model, x, device="cpu", costs=fxremat.plan(model, x, 0.9))
            """,
        ),
    ),
    Diagnostic(
        "FXR621",
        GraphError,
        "A pass violates its contract",
        why="With `FXREMAT_CHECK=1`, the conditions that a pass requires and ensures are checked "
        "wherever it runs. The message names the pass, the condition, and the operation that "
        "violates it.",
        remedy="Repair the pass, or correct its contract. A pass of fxremat itself that violates "
        "its contract is a fault: please report it.",
        needs="a custom pass",
        test="tests/passes/test_check.py::test_what_every_pass_keeps_of_a_traced_graph",
    ),
    Diagnostic(
        "FXR622",
        GraphError,
        "An operation of the model cannot be run a second time",
        why="It draws random numbers on a device whose generator cannot be recorded, or it writes "
        "into its arguments without saying so.",
        remedy="Draw on the CPU or on CUDA, and let an operation of your own name what it writes "
        "by `mutates_args`.",
        trouble="""
        class Draws(nn.Module):
            def __init__(self, device):
                super().__init__()
                self.body, self.device = block(), device

            def forward(self, x):
                return self.body(x), torch.rand(3, device=self.device)


        fxremat.compile(Draws("meta"), x, "64 MiB")
        """,
        remedies=(
            """
            fxremat.compile(Draws("cpu"), x, "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR631",
        ScheduleError,
        "A schedule cannot be run",
        why="A generator of yours has given a schedule that reads what nothing computes, or that "
        "has too many operations. From `fxremat.compile` without a custom generator, this "
        "is a fault of fxremat.",
        remedy="Let the forward of each stage come before its backward. Without a custom "
        "generator, please report this.",
        trouble="""
        from fxremat.ir import Backward, Schedule
        from fxremat.ir.schedule import coded
        from fxremat.planner.search.search import GENERATORS_BY_NAME


        def no_forwards(setting):
            yield coded(Schedule(tuple(map(Backward, reversed(range(len(setting.chain)))))))


        GENERATORS_BY_NAME["no_forwards"] = no_forwards
        fxremat.plan(model, x, "64 MiB", effort=fxremat.Effort(generators=["no_forwards"]))
        """,
        remedies=(
            """
            fxremat.plan(model, x, "64 MiB", effort=fxremat.Effort(generators=["rotor"]))
            """,
        ),
    ),
)
