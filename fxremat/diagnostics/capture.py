"""Errors about the capture of a model, and about what cannot be planned in it."""

from __future__ import annotations

from fxremat.diagnostics.breaks import BRANCHES
from fxremat.diagnostics.entry import Diagnostic
from fxremat.errors import CaptureError, DataSizesError, SizesError

CAPTURE = (
    Diagnostic(
        "FXR301",
        CaptureError,
        "The model cannot be captured as one graph",
        why="Dynamo breaks the graph, and one graph is asked for: by `regions='one'`, or by "
        "`fxremat.plan`, `frontier`, `max_batch` or `estimate`. The message has Dynamo's reason, "
        "your line, and what to write in its place.",
        remedy="Change that line, or let `fxremat.compile` plan the model in pieces, without "
        "`regions='one'`.",
        trouble=BRANCHES
        + """
        fxremat.compile(Branches(), x, "64 MiB", regions="one")
        """,
        remedies=(
            """
            compiled = fxremat.compile(Branches(), x, "64 MiB")
            compiled(x).sum().backward()
            """,
        ),
    ),
    Diagnostic(
        "FXR302",
        CaptureError,
        "The capture of the model failed",
        why="Dynamo can read the code of the model, but tracing its forward or backward failed. "
        "The message has the error.",
        remedy="Repair an operation of your own whose fake implementation or backward fails: "
        "`torch.library.opcheck` tests them. Otherwise, please report this.",
        needs="an operation that fails only while it is traced",
        test="tests/capture/test_errors.py::test_an_error_of_planning_is_not_blamed_on_the_model",
    ),
    Diagnostic(
        "FXR303",
        CaptureError,
        "Dynamo's recompile limit is reached",
        why="Dynamo captures code again for each new value that it depends on, up to a limit that "
        "all models with the same code share. Beyond the limit torch would run the model without "
        "a plan, so fxremat raises an error.",
        remedy="Use one capture for values that change from call to call: `dynamic=True` for "
        "sizes, a tensor in place of a number. Or raise "
        "`torch._dynamo.config.recompile_limit`.",
        trouble="""
        def train(limit):
            with torch._dynamo.config.patch(recompile_limit=limit):
                settings = {"dynamic": False, "options": {"budget": "64 MiB"}}
                compiled = torch.compile(model, backend="fxremat", **settings)
                for size in (512, 100, 200, 300):
                    compiled(x[:size]).sum().backward()


        train(limit=2)
        """,
        remedies=(
            """
            train(limit=8)
            """,
        ),
    ),
    Diagnostic(
        "FXR304",
        CaptureError,
        "An option requires the model to be captured as one graph",
        why="A saved plan, or a number of steps in flight, is for one graph, but Dynamo captures "
        "the model as several.",
        remedy="Omit the option that the message names, or move the code that breaks the graph "
        "out of the forward.",
        trouble=BRANCHES
        + """
        fxremat.compile(Branches(), x, "64 MiB", in_flight=2)
        """,
        remedies=(
            """
            fxremat.compile(Branches(), x, "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR305",
        CaptureError,
        "The sample gives no step to plan",
        why="No output of the model has a gradient for this sample, or all outputs are views of "
        "parameters and inputs, which autograd differentiates without a graph.",
        remedy="Let the model return what the loss is computed from, without `detach()` and "
        "outside of `torch.no_grad()`.",
        trouble="""
        class Detached(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = block()

            def forward(self, x):
                return self.body(x).detach()


        fxremat.compile(Detached(), x, "64 MiB")
        """,
        remedies=(
            """
            fxremat.compile(Detached().body, x, "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR306",
        CaptureError,
        "The model has a collective that is not supported",
        why="An operation of the model waits for other processes, and fxremat does not know which "
        "bytes and seconds it takes.",
        remedy="Use a collective of `torch.distributed._functional_collectives` that reduces, "
        "gathers, scatters or exchanges.",
        needs="several processes",
        test="tests/costs/link/test_collectives.py::test_a_collective_that_nothing_stands_for_is_refused",
    ),
    Diagnostic(
        "FXR307",
        CaptureError,
        "The model waits for other processes, but they do not plan together",
        why="The graph has collectives. All processes must run them in the same order, so they "
        "must follow the same plan.",
        remedy="Pass `fxremat.compile` a sample and `ranks=fxremat.Ranks()` in all processes, and "
        "use all sizes in the first call.",
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


        fxremat.compile(Reduced(), x, "64 MiB", regions="one")
        """,
        remedies=(
            """
            dist.destroy_process_group()
            """,
        ),
    ),
    Diagnostic(
        "FXR308",
        CaptureError,
        "A step cannot be planned while a CUDA graph is being captured",
        why="Planning runs and times operations, which would become part of the CUDA graph.",
        remedy="Compile the model, and run one step of each shape, before `torch.cuda.graph`.",
        needs="a GPU",
        test="tests/runtime/test_cuda_graph.py::test_a_model_is_not_compiled_then",
    ),
    Diagnostic(
        "FXR309",
        CaptureError,
        "A parameter was created in `torch.inference_mode()`",
        why="Autograd cannot save such a tensor for a backward.",
        remedy="Create the model outside of that mode, or compile `copy.deepcopy(model)`.",
        trouble="""
        with torch.inference_mode():
            loaded = block()
        fxremat.compile(loaded, x, "64 MiB")
        """,
        remedies=(
            """
            import copy

            fxremat.compile(copy.deepcopy(loaded), x, "64 MiB")
            """,
        ),
    ),
    Diagnostic(
        "FXR310",
        CaptureError,
        "The model has tensors that are not dense",
        why="The memory of nested tensors, whose rows differ in length, and of some sparse "
        "tensors cannot be planned.",
        remedy="Compute with dense tensors, such as the `values()` of a nested tensor, and make "
        "the sparse or nested tensor outside the model.",
        trouble="""
        class Nested(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = block()

            def forward(self, rows):
                return self.body(rows).tanh()


        rows = torch.nested.nested_tensor([x[:200], x[200:]], layout=torch.jagged)
        fxremat.compile(Nested(), rows, "64 MiB", regions="one")
        """,
        remedies=(
            """
            fxremat.compile(Nested(), rows.values(), "64 MiB", regions="one")
            """,
        ),
    ),
    Diagnostic(
        "FXR320",
        SizesError,
        "The model cannot be captured with symbols in place of sizes",
        why="The step computes something from sizes that a plan cannot compute at each call. Only "
        "integers, and sums, products and quotients of integers, may depend on sizes. "
        "`fxremat.compile` with `dynamic=None` captures each size by itself then, without an "
        "error.",
        remedy="Capture each size separately with `dynamic=False`. In place of `max_batch` or "
        "`estimate(dim=...)`, plan or estimate a sample of each size.",
        trouble="""
        class Remainders(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = block()

            def forward(self, x):
                return self.body(x) * (0.5 * x.shape[0] % 1.7)


        def train(dynamic):
            settings = {"dynamic": dynamic, "options": {"budget": "64 MiB"}}
            compiled = torch.compile(Remainders(), backend="fxremat", **settings)
            compiled(x).sum().backward()


        train(dynamic=True)
        """,
        remedies=(
            """
            train(dynamic=False)
            """,
        ),
    ),
    Diagnostic(
        "FXR330",
        DataSizesError,
        "A size depends on data and leads out of the graph",
        why="A size is read from values, as of `y[y > 0]`. The operations between such a size and "
        "the next fixed one are planned as one operation, so a size may depend on data inside the "
        "graph. But this one reaches an output, or an operation that waits for other processes. "
        "With `regions='auto'` there is no error: Dynamo breaks the graph there.",
        remedy="Return a tensor of fixed size, such as the loss, from the model, or use a mask or "
        "`torch.where`.",
        trouble="""
        class Chosen(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = block()

            def forward(self, x):
                y = self.body(x)
                return y[y > 0]


        fxremat.compile(Chosen(), x, "64 MiB", regions="one")
        """,
        remedies=(
            """
            class Summed(Chosen):
                def forward(self, x):
                    return super().forward(x).sum()


            chosen = fxremat.compile(Summed(), x, "64 MiB", regions="one", loss="own")
            chosen(x).backward()
            """,
        ),
    ),
)
